"""Names as books keep them: whatever length callers give theirs, an entry has the same size."""

from hashlib import blake2b

MAX_KEPT_CHARS = 64


def kept_name(name: str) -> str:
    """The name, or of a long one 32 characters that stand for it."""
    if len(name) <= MAX_KEPT_CHARS:
        return name
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
