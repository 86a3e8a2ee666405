"""What is exchanged on a device: brought there beforehand as far as memory is granted for it.

resident   pieces that wait on the device; under the pause nothing of them is copied
streamed   pieces beyond that wait in pinned memory and pass one after the other through a slot
Under the pause nothing is allocated, and the host waits once, for the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weight_transfer.kernels.device import exchanging
from weight_transfer.kernels.device.bits import DeviceBits
from weight_transfer.kernels.device.memory import named_shortage
from weight_transfer.kernels.device.order import Order, order_of
from weight_transfer.kernels.device.packed import PIECE_BYTES, Packed, pack
from weight_transfer.kernels.exchange import Change, Int64s, check_places

_TILE = 1024


@dataclass(frozen=True, slots=True)
class DeviceExchange:
    """`counts` i64[changes, 2]; `slot`: room for one streamed piece, empty when there is none."""

    resident: tuple[tuple[Packed, torch.Tensor], ...]
    streamed: tuple[tuple[Packed, torch.Tensor], ...]
    slot: torch.Tensor
    counts: torch.Tensor
    order: Order

    @property
    def device_bytes(self) -> int:
        """Memory of the device that it holds."""
        held = [packed for _, packed in self.resident]
        return sum(tensor.nbytes for tensor in (*held, self.slot, self.counts))

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values, or all old ones `back`; see `Exchange`."""
        # Steps that the engine has launched still read what is overwritten here.
        self.order.settle()
        with torch.cuda.device_of(self.counts):  # type: ignore[no-untyped-call]
            self.counts.zero_()
            for piece, packed in self.resident:
                launch(piece, packed, self.counts, back=back)
            for piece, host in self.streamed:
                packed = self.slot[: piece.nbytes]
                packed.copy_(host, non_blocking=True)
                launch(piece, packed, self.counts, back=back)
        # Its answer is the first that the host waits for, and all before it has ended then.
        counts: Int64s = self.counts.cpu().numpy()
        return counts.copy()


def launch(piece: Packed, packed: torch.Tensor, counts: torch.Tensor, *, back: bool) -> None:
    """Exchange one piece and read it back, on the device's current stream."""
    places, old, new = piece.views(packed)
    old, new = (new, old) if back else (old, new)
    target, row = piece.change.target.flat, counts[piece.row]
    grid = (-(-piece.count // _TILE),)
    exchanging.exchange[grid](target, places, old, new, row, piece.count, tile_size=_TILE)
    exchanging.read_back[grid](target, places, new, row, piece.count, tile_size=_TILE)


def stage(changes: Sequence[Change[DeviceBits]], resident_bytes: int) -> DeviceExchange:
    """Bring changes to their device; of what is beyond `resident_bytes`, a slot takes its turns.

    Any thread may call it while the engine serves. Raises IndexError for a place outside, and
    DeviceMemoryError where the device has no room; nothing was written then.
    """
    check_places(changes, [change.target.size for change in changes])
    device = changes[0].target.flat.device
    order = order_of(device)
    pieces = list(pack(list(changes)))
    kept = _first_within(pieces, resident_bytes)
    needed = sum(piece.nbytes for piece in pieces[:kept])
    with named_shortage(device, f"the {needed >> 20} MiB of an update's changes"), order.aside():
        counts = torch.zeros((len(changes), 2), dtype=torch.int64, device=device)
        resident = tuple((p, uploaded(p, device)) for p in pieces[:kept])
        streamed = tuple((p, waiting(p, device)) for p in pieces[kept:])
        room = PIECE_BYTES if streamed else 0
        slot = torch.empty(room, dtype=torch.uint8, device=device)
    return DeviceExchange(resident, streamed, slot, counts, order)


def _first_within(pieces: Sequence[Packed], room: int) -> int:
    """How many of the first pieces have room together."""
    for number, piece in enumerate(pieces):
        room -= piece.nbytes
        if room < 0:
            return number
    return len(pieces)


def uploaded(piece: Packed, device: torch.device) -> torch.Tensor:
    """A piece in memory of the device."""
    return torch.from_numpy(piece.host).to(device)


def waiting(piece: Packed, device: torch.device) -> torch.Tensor:
    """A piece in host memory that the device reads by itself."""
    host = torch.from_numpy(piece.host)
    return host.pin_memory() if device.type == "cuda" else host
