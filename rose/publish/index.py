"""A catalog as JSON, between a publisher and whoever catches up.

{"bases": {"16": bytes}, "deltas": [[version, parent, bytes]]}
It is unsigned: it only says what to ask for, and every manifest is checked by itself.
"""

import json

from rose.errors import RoseError
from weight_transfer import WeightError
from weight_transfer.catalog import Catalog, Published


class IndexFormatError(RoseError):
    """What was sent is no catalog."""


def written(catalog: Catalog) -> bytes:
    """As JSON."""
    plain = {
        "bases": {str(version): size for version, size in catalog.bases.items()},
        "deltas": [[d.version, d.parent, d.wire_bytes] for d in catalog.deltas],
    }
    return json.dumps(plain).encode()


def read(raw: bytes) -> Catalog:
    """From untrusted JSON; raises IndexFormatError."""
    try:
        plain = json.loads(raw)
        bases = {_count(int(version)): _count(size) for version, size in plain["bases"].items()}
        deltas = tuple(Published(*map(_count, delta)) for delta in plain["deltas"])
        return Catalog(bases, deltas)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, WeightError) as error:
        raise IndexFormatError(f"no catalog of versions: {error!r}") from error


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r:.80} is no count")
    return value
