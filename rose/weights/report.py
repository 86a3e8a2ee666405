"""Output of `rose weights`, for people and for programs."""

from collections import Counter
from pathlib import Path

from weight_transfer.files.apply import Applied
from weight_transfer.files.delta_file import Delta

Report = tuple[dict[str, object], list[str]]
_MOST_TENSORS = 12


def delta_report(delta: Delta, model_bytes: int) -> Report:
    """After `diff`."""
    plain = _summary(delta) | {"model_bytes": model_bytes}
    share = 100 * delta.nbytes / max(1, model_bytes)
    return plain, [
        f"{delta.path}: {_size(delta.nbytes)}, {share:.2f}% of {_size(model_bytes)}",
        _changes(delta),
    ]


def inspect_report(delta: Delta) -> Report:
    """Of any delta."""
    index = delta.index
    tensors = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "changed": sum(chunk.changed for chunk in tensor.chunks),
            "encoded_bytes": sum(chunk.encoded_bytes for chunk in tensor.chunks),
            "fresh": tensor.name in index.fresh,
        }
        for tensor in index.tensors
    ]
    plain = _summary(delta) | {"tensor_list": tensors, "files": [f.path for f in index.files]}
    largest = sorted(index.tensors, key=lambda t: -sum(c.encoded_bytes for c in t.chunks))
    lines = [f"{delta.path}: {_size(delta.nbytes)}, codec {index.level}", _changes(delta)]
    for tensor in largest[:_MOST_TENSORS]:
        size = sum(chunk.encoded_bytes for chunk in tensor.chunks)
        if size:
            changed = sum(chunk.changed for chunk in tensor.chunks)
            lines.append(f"  {_size(size):>10}  {changed:>12,} changed  {tensor.name}")
    return plain, lines


def applied_report(applied: Applied, out: Path) -> Report:
    """After `apply`."""
    plain: dict[str, object] = {
        "out": str(out),
        "bytes": applied.nbytes,
        "changed": list(applied.changed),
    }
    changes = ", ".join(f"{changed:,}" for changed in applied.changed)
    return plain, [f"{out}: {_size(applied.nbytes)}; weights changed by each delta: {changes}"]


def _summary(delta: Delta) -> dict[str, object]:
    index = delta.index
    chunks = [chunk for tensor in index.tensors for chunk in tensor.chunks]
    return {
        "delta": str(delta.path),
        "bytes": delta.nbytes,
        "codec": index.level,
        "tensors": len(index.tensors),
        "changed_tensors": sum(bool(tensor.chunks) for tensor in index.tensors),
        "fresh_tensors": len(index.fresh),
        "changed": index.changed,
        "bytes_per_change": delta.nbytes / index.changed if index.changed else None,
        "chunks": dict(Counter(chunk.codec for chunk in chunks)),
    }


def _changes(delta: Delta) -> str:
    index = delta.index
    if not index.changed:
        return "no weight differs"
    touched = sum(bool(tensor.chunks) for tensor in index.tensors)
    each = delta.nbytes / index.changed
    fresh = f", {len(index.fresh)} of them new or of another shape" if index.fresh else ""
    return (
        f"{index.changed:,} weights differ in {touched} of {len(index.tensors)} tensors{fresh}:"
        f" {each:.2f} bytes each"
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
