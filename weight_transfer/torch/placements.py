"""Reader of a rank's torch tensors, and the pieces of a state dict by its DTensors' placements.

A chunk at a time crosses to the host and becomes bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weight_transfer.errors import ShardError
from weight_transfer.format.digest import Range
from weight_transfer.format.tensors import Bits, bits_of
from weight_transfer.publish.sharding import Pieces, piece, share, whole


class TorchWeights:
    """A rank's own part of a tensor, cast to `dtype` as it is read."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._flat = local.detach().contiguous().view(-1)
        cast = dtype is not None and local.is_floating_point()
        self._dtype = dtype if cast and dtype is not None else local.dtype

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def elements(self) -> int:
        return self._flat.numel()

    def read(self, offset: int, rows: int, width: int, stride: int) -> Bits:
        part = self._flat[offset : offset + (rows - 1) * stride + width]
        if stride != width:
            part = part.as_strided((rows, width), (stride, 1))
        return bits_of(part.to(self._dtype))


def local_weights(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, TorchWeights]:
    """Return what this rank holds of `state`; weights are published as `dtype`, None: as they are.

    Nothing is copied before it is read, but what does not lie in order.
    """
    return {name: TorchWeights(tensor, dtype) for name, tensor in state.items()}


def state_pieces(state: Mapping[str, torch.Tensor]) -> Pieces:
    """Return what this rank holds of `state`, whose names are those of the checkpoint.

    Replicas hold equal pieces, one of which is to be published: a DTensor does not tell, since
    FSDP keeps its parameters in a mesh that knows nothing of tensor parallelism beside it. Raises
    ShardError.
    """
    return tuple(
        found
        for name, tensor in state.items()
        for found in (
            dtensor_pieces(name, tensor)
            if isinstance(tensor, DTensor)
            else whole(name, tuple(tensor.shape), name)
        )
    )


def dtensor_pieces(name: str, tensor: DTensor) -> Pieces:
    """Return this rank's piece of a DTensor, () for one without weights or outside its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    placed = list(zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True))
    for placement, _, _ in placed:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise ShardError(f"{name}: placement {placement} is not one of finished weights")
    shape = tuple(tensor.shape)
    spans = [_span(name, dim, size, placed) for dim, size in enumerate(shape)]
    local = tuple(tensor.to_local().shape)
    if local != tuple(end - first for first, end in spans):
        raise ShardError(f"{name}: local shape {local} is not that of {tensor.placements}")
    if any(span != (0, size) for span, size in zip(spans[2:], shape[2:], strict=True)):
        raise ShardError(f"{name} {shape}: only its first two dimensions may be sharded")
    rows = spans[0] if spans else (0, 1)
    inner = prod(shape[2:])
    columns = (spans[1][0] * inner, spans[1][1] * inner) if len(shape) > 1 else None
    return piece(name, shape, name, rows, columns)


def _span(name: str, dim: int, size: int, placed: Sequence[tuple[Placement, int, int]]) -> Range:
    """What of a dimension is here: each mesh dimension that shards it cuts what is left."""
    cuts = [
        cut for cut in placed if isinstance(cut[0], Shard | _StridedShard) and cut[0].dim == dim
    ]
    strided = [cut for cut in cuts if isinstance(cut[0], _StridedShard)]
    if strided:
        cuts = _inside_out(name, size, cuts, strided)
    first, end = 0, size
    for _, at, ranks in cuts:
        a, b = share(end - first, at, ranks)
        first, end = first + a, first + b
    return first, end


def _inside_out(
    name: str,
    size: int,
    cuts: list[tuple[Placement, int, int]],
    strided: list[tuple[Placement, int, int]],
) -> list[tuple[Placement, int, int]]:
    """FSDP over tensor parallelism: the mesh names FSDP first, which cut last.

    Torch marks that by a strided shard whose factor is the number of tensor-parallel ranks.
    """
    placement = strided[0][0]
    assert isinstance(placement, _StridedShard)
    later = cuts[1:]
    known = len(strided) == 1 and cuts[0] is strided[0]
    known = known and placement.split_factor == prod(ranks for _, _, ranks in later)
    if not known or size % prod(ranks for _, _, ranks in cuts):
        raise ShardError(
            f"{name}: {size} rows sharded as {[cut[0] for cut in cuts]} are in no order that is "
            "known here; give its pieces by hand"
        )
    return [*later, cuts[0]]
