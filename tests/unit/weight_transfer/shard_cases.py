"""A small MoE model as a checkpoint has it, and as a Megatron-like trainer's ranks have it.

`cut` is the reference: it makes local parameters of dense tensors by reshaping and stacking, and
knows nothing of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from tests.unit.weight_transfer.weight_cases import tensor
from weight_transfer.apply.receiver import Receiver
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.format.manifest import Manifest
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import TensorBits
from weight_transfer.publish.sharding import (
    Heads,
    LocalBits,
    Pieces,
    column_shard,
    gate_up,
    grouped_qkv,
    row_shard,
    stacked,
    vocabulary,
    whole,
)
from weight_transfer.publish.shards import (
    ShardCoordinator,
    ShardEncoder,
    ShardReport,
    ShardSettings,
)
from weight_transfer.publish.version_publisher import VersionPublisher

KEY = SigningKey.from_hex("08" * 32)
Dense = dict[str, TensorBits]
Local = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """`ffn` and `vocabulary` (padded) divide by the ranks; `kv` need not."""

    hidden: int = 6
    heads: int = 8
    kv: int = 2
    dim: int = 2
    ffn: int = 8
    vocabulary: int = 21
    padded: int = 24
    experts: int = 8

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        h, q, kv = self.hidden, self.heads * self.dim, self.kv * self.dim
        found = {"embed": (self.vocabulary, h), "norm": (h,), "head": (self.vocabulary, h)}
        found |= {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        found |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        found |= {"gate": (self.ffn, h), "up": (self.ffn, h), "down": (h, self.ffn)}
        for e in range(self.experts):
            found |= {f"e{e}.gate": (3, h), f"e{e}.up": (3, h), f"e{e}.down": (h, 3)}
        return found


def dense(shape: Shape, seed: int) -> Dense:
    return {n: tensor(n, s, seed * 100 + k) for k, (n, s) in enumerate(shape.shapes.items())}


def cut(shape: Shape, model: Dense, rank: int, ranks: int) -> Local:
    full = {name: t.bits.reshape(t.shape) for name, t in model.items()}

    def part(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, ranks, axis)[rank]

    def padded(array: np.ndarray) -> np.ndarray:
        spare = np.full((shape.padded - shape.vocabulary, shape.hidden), 0xDEAD, array.dtype)
        return part(np.concatenate([array, spare]))

    def fused(suffix: str) -> np.ndarray:
        q, k, v = (full[name + suffix] for name in "qkv")
        inner = q.shape[1:]
        q = q.reshape(shape.heads, shape.dim, *inner)
        k, v = (x.reshape(shape.kv, shape.dim, *inner) for x in (k, v))
        if shape.kv < ranks:
            group = rank * shape.kv // ranks
            mine = np.split(q, ranks)[rank]
            groups = [np.concatenate([mine, k[group : group + 1], v[group : group + 1]])]
        else:
            per = shape.heads // shape.kv
            whole = [
                np.concatenate([q[g * per : (g + 1) * per], k[g : g + 1], v[g : g + 1]])
                for g in range(shape.kv)
            ]
            groups = whole[rank * shape.kv // ranks : (rank + 1) * shape.kv // ranks]
        return np.concatenate(groups).reshape(-1, *inner)

    mine = range(rank * shape.experts // ranks, (rank + 1) * shape.experts // ranks)
    fc1 = [np.concatenate([full[f"e{e}.gate"], full[f"e{e}.up"]]) for e in mine]
    return {
        "embedding": padded(full["embed"]),
        "output": padded(full["head"]),
        "final_norm": full["norm"],
        "linear_qkv": fused(""),
        "linear_qkv.bias": fused("_bias"),
        "linear_proj": part(full["o"], 1),
        "linear_fc1": np.concatenate([part(full["gate"]), part(full["up"])]),
        "linear_fc2": part(full["down"], 1),
        "experts.fc1": np.stack(fc1),
        "experts.fc2": np.stack([full[f"e{e}.down"] for e in mine]),
    }


def pieces(shape: Shape, rank: int, ranks: int) -> Pieces:
    s, heads = shape.shapes, Heads(shape.heads, shape.kv, shape.dim)
    rows = shape.padded // ranks
    mine = range(rank * shape.experts // ranks, (rank + 1) * shape.experts // ranks)
    fc1 = [gate_up(f"e{e}.gate", f"e{e}.up", s["e0.gate"], "experts.fc1", 0, 1) for e in mine]
    fc2 = [whole(f"e{e}.down", s["e0.down"], "experts.fc2") for e in mine]
    return (
        *vocabulary("embed", s["embed"], "embedding", rows, rank),
        *vocabulary("head", s["head"], "output", rows, rank),
        *whole("norm", s["norm"], "final_norm", rank),
        *grouped_qkv(("q", "k", "v"), heads, (shape.hidden,), "linear_qkv", rank, ranks),
        *grouped_qkv(("q_bias", "k_bias", "v_bias"), heads, (), "linear_qkv.bias", rank, ranks),
        *column_shard("o", s["o"], "linear_proj", rank, ranks),
        *gate_up("gate", "up", s["gate"], "linear_fc1", rank, ranks),
        *column_shard("down", s["down"], "linear_fc2", rank, ranks),
        *stacked(fc1, 2 * prod(s["e0.gate"])),
        *stacked(fc2, prod(s["e0.down"])),
    )


def rows_only(model: Dense, rank: int, ranks: int) -> Pieces:
    """Return the shards that FSDP makes of any model."""
    return tuple(p for n, t in model.items() for p in row_shard(n, t.shape, n, rank, ranks))


def weights(local: Local) -> dict[str, LocalBits]:
    return {name: LocalBits("bfloat16", np.ravel(bits)) for name, bits in local.items()}


def publisher_of(store: ChunkStore) -> VersionPublisher:
    return VersionPublisher(store, "job", "trainer", KEY, clock=lambda: 0.0)


class ShardedTrainer:
    """Ranks with stores of their own, a coordinator and a receiver that starts from the dense."""

    def __init__(
        self, root: Path, shape: Shape, model: Dense, ranks: int, *, shared: bool = False
    ) -> None:
        self.shape, self.ranks = shape, ranks
        self.stores = [ChunkStore(root / ("0" if shared else str(rank))) for rank in range(ranks)]
        settings = ShardSettings(chunk_bytes=64, threads=2)
        self.encoders = [
            ShardEncoder(
                self.stores[rank],
                rank,
                pieces(shape, rank, ranks),
                weights(cut(shape, model, rank, ranks)),
                settings=settings,
            )
            for rank in range(ranks)
        ]
        urls = [] if shared else ["", *(f"http://rank-{rank}" for rank in range(1, ranks))]
        self.coordinator = ShardCoordinator(publisher_of(self.stores[0]), ranks, urls)
        self.coordinator.begin([encoder.parts() for encoder in self.encoders])
        self.receiver = Receiver(model)

    def reports(self, version: int, new: Dense) -> list[ShardReport]:
        digests = self.coordinator.digests
        return [
            encoder.encode(version, digests, weights(cut(self.shape, new, rank, self.ranks)))
            for rank, encoder in enumerate(self.encoders)
        ]

    def publish(self, version: int, new: Dense) -> Manifest:
        manifest = self.coordinator.publish(version, self.reports(version, new))
        for encoder in self.encoders:
            encoder.advance(manifest)
        return manifest

    def publish_base(self, version: int) -> Manifest:
        parts = [encoder.parts(of_zeros=True) for encoder in self.encoders]
        zeros = self.coordinator.merged(version, parts)
        reports = [encoder.encode_base(zeros) for encoder in self.encoders]
        return self.coordinator.publish_base(zeros, reports)

    def chunks(self, manifest: Manifest) -> dict[str, bytes]:
        """Return the chunks from where the manifest says they are."""
        urls = (*manifest.origins, "http://rank-0")
        return {
            ref.id: self.stores[
                int(urls[-1 if ref.origin is None else ref.origin].removeprefix("http://rank-"))
            ].get(ref.id)
            for ref in manifest.chunks
        }

    def receive(self, manifest: Manifest) -> None:
        received = Manifest.from_bytes(manifest.to_bytes())
        staged = self.receiver.decode(received, self.chunks(received), KEY.verify_key, 0.0)
        self.receiver.commit(staged)
