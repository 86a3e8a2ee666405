"""Publishing from torch: one process or all ranks of a trainer, tensors and DTensors.

Reader of a rank's torch tensors, and the pieces of a state dict by its DTensors' placements.

A chunk at a time crosses to the host and becomes bits.

Publication by a trainer with several ranks: every rank calls it, all together.

begin    rank: its blocks → first rank: which of the replicas publishes → all
         rank: parts of digests → first rank: digests → all
publish  rank encodes, reports → first rank: manifest, durable → all: baselines advance

Where a rank fails, all raise its error, nothing is published and every baseline stays, so the next
publication can succeed.

`Ranks` moves bytes between ranks, all to the first and the first to all, without pickle:

every rank works ── + bytes or − an error ──► the first merges
all return or raise ◄── + bytes or − an error ──┘
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import ShardError, WeightError
from weight_transfer.format.digest import Range
from weight_transfer.format.manifest import Manifest, hex_digest
from weight_transfer.format.tensors import Bits, bits_of
from weight_transfer.publish.sharding import Pieces, first_holders, piece, share, whole
from weight_transfer.publish.shards import (
    ShardCoordinator,
    ShardEncoder,
    ShardReport,
    ShardSettings,
)
from weight_transfer.publish.version_publisher import VersionPublisher

__all__ = ["ShardedPublisher", "local_weights", "state_pieces"]
_GOOD, _BAD = b"+", b"-"


class TorchWeights:
    """A rank's local part of a torch tensor, read as bits; floats are cast to `dtype` when read."""

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
    """Return a reader of this rank's part of each tensor of `state`, by name.

    Weights are read as `dtype`, None: as they are. Only a tensor that is not contiguous is copied.
    """
    return {name: TorchWeights(tensor, dtype) for name, tensor in state.items()}


def state_pieces(state: Mapping[str, torch.Tensor]) -> Pieces:
    """Return the pieces of checkpoint tensors that this rank holds of a state dict.

    The names in `state` are those of the checkpoint. Ranks that are replicas return equal pieces,
    and the caller chooses one of them to publish: a DTensor does not tell, since FSDP's mesh does
    not show tensor parallelism beside it. Raises ShardError.
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
    """Return this rank's piece of a DTensor.

    () if it has no weights or the rank is not in its mesh. Raises ShardError for partial sums, for
    shards of a third dimension and for an unknown order of shards.
    """
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
    """Return [first, end) of a dimension that this rank holds, cut by each mesh dimension in
    turn."""
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
    """Return the cuts of FSDP over tensor parallelism in the order in which they were made.

    The mesh names FSDP first, which cut last. Torch marks that by a strided shard whose factor is
    the number of tensor-parallel ranks. Raises ShardError for any other strided shard.
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


class Ranks:
    """A group of trainer ranks that exchange bytes through torch.distributed, or this rank
    alone."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 600.0) -> None:
        """Join `group`, or without one a new gloo group of all ranks, whatever backend the trainer
        uses.

        Without torch.distributed this rank is alone. `timeout_s`: longest wait for another rank.
        """
        self._group = group
        if group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.size = 1 if self._group is None else dist.get_world_size(self._group)

    def agree(self, work: Callable[[], bytes], merge: Callable[[list[bytes]], bytes]) -> bytes:
        """Return on every rank the bytes that rank 0 merges from all ranks' results.

        A collective call. `work` runs on each rank, `merge` on rank 0 alone. If any of them fails,
        all ranks raise ShardError and no rank waits.
        """
        gathered = self._gather(_attempt(work))

        def merged() -> bytes:
            for rank, raw in enumerate(gathered):
                if not raw.startswith(_GOOD):
                    reason = raw[len(_BAD) :].decode()
                    raise ShardError(f"rank {rank} could not take part: {reason}")
            return merge([raw[len(_GOOD) :] for raw in gathered])

        answer = self._broadcast(_attempt(merged) if self.rank == 0 else b"")
        if not answer.startswith(_GOOD):
            raise ShardError(answer[len(_BAD) :].decode())
        return answer[len(_GOOD) :]

    def _gather(self, raw: bytes) -> list[bytes]:
        """Return each rank's bytes in rank order on rank 0, and [] on the other ranks."""
        if self._group is None:
            return [raw]
        with _alive():
            size = torch.tensor([len(raw)])
            sizes = [torch.zeros_like(size) for _ in range(self.size)]
            dist.all_gather(sizes, size, group=self._group)
            lengths = [int(length) for length in sizes]
            padded = _tensor(raw.ljust(max(lengths), b"\0"))
            found = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 else None
            dist.gather(padded, found, group=self._group, group_dst=0)
        received = zip(found or (), lengths, strict=False)
        return [bytes(sent.numpy())[:length] for sent, length in received]

    def _broadcast(self, raw: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        if self._group is None:
            return raw
        with _alive():
            size = torch.tensor([len(raw)])
            dist.broadcast(size, group=self._group, group_src=0)
            sent = _tensor(raw if self.rank == 0 else bytes(int(size)))
            dist.broadcast(sent, group=self._group, group_src=0)
        return bytes(sent.numpy())


def _attempt(work: Callable[[], bytes]) -> bytes:
    try:
        return _GOOD + work()
    except (WeightError, OSError) as error:
        return _BAD + str(error).encode()


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise ShardError(
            f"a rank is gone or late ({lines[-1] if lines else error!r:.200}); restart the ranks "
            "from the newest version"
        ) from error


class ShardedPublisher:
    """Publisher of one job's versions by all ranks of a group, each of which holds its shard
    alone."""

    def __init__(
        self,
        store: ChunkStore,
        state: Mapping[str, torch.Tensor],
        signer: VersionPublisher | None = None,
        version: int = 0,
        origin: str = "",
        dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
        settings: ShardSettings | None = None,
    ) -> None:
        """Agree with all ranks on pieces and digests of `version`; a collective call.

        `state`: state dict with checkpoint names, which holds `version`. `signer`:
        publisher that signs the job's versions into rank 0's `store`, needed on rank 0 alone.
        `origin`: address that serves this rank's store, "" where all ranks share rank 0's folder.
        `dtype`: type in which weights are published, None: as they are. Raise ShardError on all
        ranks.
        """
        self._store = store
        self._ranks = ranks or Ranks()
        self._dtype = dtype
        self._origin = origin
        self._origins: list[str] = []
        pieces = self._owned(state)
        weights = local_weights(state, dtype)

        def begin() -> ShardReport:
            rank = self._ranks.rank
            self._encoder = ShardEncoder(store, rank, pieces, weights, version, settings)
            return self._encoder.parts()

        def merge(parts: list[ShardReport]) -> Mapping[str, int]:
            if signer is None:
                raise ShardError("the first rank signs; give it a VersionPublisher with the key")
            origins = self._origins if any(self._origins) else ()
            self._coordinator = ShardCoordinator(signer, self._ranks.size, origins)
            return self._coordinator.begin(parts)

        self._digests = self._agree_on_digests(begin, merge)

    @property
    def version(self) -> int:
        """Number of the version that was published last, or that the publisher began with."""
        return self._encoder.version

    def publish(self, version: int, state: Mapping[str, torch.Tensor]) -> Manifest:
        """Publish the step from the last version to `state` as `version`, and return its manifest.

        All ranks call it together, and `state` must not change meanwhile. The version is durable on
        all ranks on return. Raises ShardError on all ranks when nothing was published. A StoreError
        on one rank means that the version is published and that this rank's store cannot keep its
        manifest.
        """

        def encode() -> ShardReport:
            return self._encoder.encode(version, self._digests, local_weights(state, self._dtype))

        def merge(reports: list[ShardReport]) -> bytes:
            return self._coordinator.publish(version, reports).to_bytes()

        manifest = Manifest.from_bytes(self._agree(encode, merge))
        self._encoder.advance(manifest)
        self._digests = manifest.digests
        self._keep(manifest)
        return manifest

    def publish_base(self) -> Manifest:
        """Publish all weights of the newest version for readers that join.

        Return the base's manifest. All ranks call it together.
        """

        def zeros() -> ShardReport:
            return self._encoder.parts(of_zeros=True)

        def merge_zeros(reports: list[ShardReport]) -> Mapping[str, int]:
            return self._coordinator.merged(self.version, reports)

        digests = self._agree_on_digests(zeros, merge_zeros)

        def merge(reports: list[ShardReport]) -> bytes:
            return self._coordinator.publish_base(digests, reports).to_bytes()

        raw = self._agree(lambda: self._encoder.encode_base(digests), merge)
        manifest = Manifest.from_bytes(raw)
        self._keep(manifest)
        return manifest

    def _keep(self, manifest: Manifest) -> None:
        """Put the manifest into this rank's own store too, which tells which chunks may be
        deleted."""
        if self._origin and self._ranks.rank:
            self._store.put_manifest(manifest, manifest.origins.index(self._origin))

    def _owned(self, state: Mapping[str, torch.Tensor]) -> Pieces:
        """Return the pieces that this rank publishes.

        A piece of several replicas is the first rank's.
        """
        pieces: Pieces = ()

        def held() -> bytes:
            nonlocal pieces
            pieces = state_pieces(state)
            blocks = [(p.tensor, p.block.rows, p.block.columns) for p in pieces]
            return json.dumps([self._origin, blocks]).encode("ascii")

        def merge(raws: list[bytes]) -> bytes:
            reports = [json.loads(raw) for raw in raws]
            self._origins = [origin for origin, _ in reports]
            keys = [[(name, *rows, *columns) for name, rows, columns in b] for _, b in reports]
            return json.dumps(first_holders(keys)).encode("ascii")

        kept = json.loads(self._ranks.agree(held, merge))[self._ranks.rank]
        return tuple(pieces[at] for at in kept)

    def _agree_on_digests(
        self,
        work: Callable[[], ShardReport],
        merge: Callable[[list[ShardReport]], Mapping[str, int]],
    ) -> Mapping[str, int]:
        def merged(reports: list[ShardReport]) -> bytes:
            plain = {name: hex_digest(digest) for name, digest in merge(reports).items()}
            return json.dumps(plain).encode("ascii")

        digests = json.loads(self._agree(work, merged))
        return {name: int(digest, 16) for name, digest in digests.items()}

    def _agree(
        self, work: Callable[[], ShardReport], merge: Callable[[list[ShardReport]], bytes]
    ) -> bytes:
        return self._ranks.agree(
            lambda: work().to_json(),
            lambda raws: merge([ShardReport.from_json(raw) for raw in raws]),
        )
