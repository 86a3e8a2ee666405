"""Piece `copy`: what the card's own copies move."""

from typing import Any

from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.work.cuda import told
from rose.bench.gpu.work.timing import rate, seconds

SMALLEST_BYTES = 64 << 20


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Copy within the card (bytes read and written), and to and from pinned host memory."""
    import torch

    rows = []
    for nbytes in (SMALLEST_BYTES, 1 << 30, 4 << 30):
        if nbytes > max(sizes.tensor_bytes, SMALLEST_BYTES):
            continue
        one = torch.ones(nbytes, dtype=torch.uint8, device=place)
        other = torch.empty_like(one)

        def copied(source: torch.Tensor = one, target: torch.Tensor = other) -> None:
            target.copy_(source)

        rows.append({"bytes": nbytes, **rate(2 * nbytes, seconds(copied, sizes.rounds, place))})
    nbytes = min(sizes.tensor_bytes, 1 << 30)
    on_card = torch.ones(nbytes, dtype=torch.uint8, device=place)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=place.startswith("cuda"))
    return {
        "within_card": rows,
        "to_host": {
            "bytes": nbytes,
            **rate(nbytes, seconds(lambda: on_host.copy_(on_card), sizes.rounds, place)),
        },
        "from_host": {
            "bytes": nbytes,
            **rate(nbytes, seconds(lambda: on_card.copy_(on_host), sizes.rounds, place)),
        },
        **told(place),
    }
