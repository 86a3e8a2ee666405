"""A model whose loader does what vLLM's do: fuse, shard, pad, tie, transpose, transform."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from tests.unit.weight_transfer.weight_cases import chunks_of
from weight_transfer.apply.loader_map import LoaderMap
from weight_transfer.apply.receiver import Receiver, StagedUpdate
from weight_transfer.apply.trace_loader import trace_loader
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import TensorBits, bits_of, tensor_bits, tensor_of
from weight_transfer.publish.version_publisher import VersionPublisher

HIDDEN, VOCABULARY, PADDED, RANKS = 8, 10, 16, 2
SHAPES = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "attn.q_proj.weight": (8, HIDDEN),
    "attn.k_proj.weight": (2, HIDDEN),
    "attn.v_proj.weight": (2, HIDDEN),
    "attn.o_proj.weight": (HIDDEN, 8),
    "experts.0.down.weight": (HIDDEN, 4),
    "experts.1.down.weight": (HIDDEN, 4),
    "norm.weight": (HIDDEN,),
}


def checkpoint(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, TensorBits]:
    torch.manual_seed(seed)
    return {name: tensor_bits(name, torch.randn(s).to(dtype)) for name, s in SHAPES.items()}


def sparse_step(old: dict[str, TensorBits], seed: int) -> dict[str, TensorBits]:
    """About a fifth of the weights move."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in old.items():
        weight = tensor_of(tensor)
        chosen = torch.rand(weight.shape, generator=generator) < 0.2
        new[name] = tensor_bits(name, torch.where(chosen, weight * 2 + 1, weight))
    return new


class FakeEngineModel(nn.Module):
    """Rank `rank` of two: qkv fused by rows with its K and V heads on both, o_proj by columns."""

    def __init__(self, rank: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        self.embed = nn.ParameterDict({"weight": empty(PADDED // RANKS, HIDDEN)})
        self.head = nn.ParameterDict({"weight": self.embed["weight"]})
        self.qkv = nn.ParameterDict({"weight": empty(8, HIDDEN)})
        self.o_proj = nn.ParameterDict({"weight": empty(HIDDEN, 4)})
        self.experts = nn.ParameterDict({"w2": empty(2, 4, HIDDEN)})
        self.norm = nn.ParameterDict({"weight": empty(HIDDEN)})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self.load(name, loaded)

    def load(self, name: str, loaded: torch.Tensor) -> None:
        path = name.split(".")
        if path[0] == "embed":
            rows = PADDED // RANKS
            mine = loaded[self.rank * rows : (self.rank + 1) * rows]
            self.embed["weight"][: len(mine)].data.copy_(mine)
            self.embed["weight"][len(mine) :].data.fill_(0)
        elif path[1] == "o_proj":
            self.o_proj["weight"].data.copy_(loaded.chunk(RANKS, dim=1)[self.rank])
        elif path[0] == "attn":
            first, rows = {"q_proj": (0, 4), "k_proj": (4, 2), "v_proj": (6, 2)}[path[1]]
            start = 4 * self.rank if path[1] == "q_proj" else 0
            self.qkv["weight"].data.narrow(0, first, rows).copy_(loaded.narrow(0, start, rows))
        elif path[0] == "experts":
            self.experts["w2"].data[int(path[1])].copy_(loaded.t())
        else:
            self.norm["weight"].data.copy_(loaded)


class NormTransforming(FakeEngineModel):
    """Adds one to the norm's weight as it loads it, as Gemma's does at each step."""

    def load(self, name: str, loaded: torch.Tensor) -> None:
        super().load(name, loaded + 1 if name == "norm.weight" else loaded)


def loaded(model: FakeEngineModel, tensors: dict[str, TensorBits]) -> FakeEngineModel:
    model.load_weights((name, tensor_of(tensor)) for name, tensor in tensors.items())
    return model


def everything(model: nn.Module) -> dict[str, list[int]]:
    return {name: bits_of(p).tolist() for name, p in model.named_parameters()}


def never() -> FakeEngineModel:
    raise AssertionError("everything has a map: nothing has to be loaded anew")


def proved(model: FakeEngineModel, base: dict[str, TensorBits]) -> LoaderMap:
    with torch.device("meta"):
        skeleton = type(model)(model.rank)
    return LoaderMap.prove(model, trace_loader(skeleton, base), base, never)


def staged(base: dict[str, TensorBits], new: dict[str, TensorBits], folder: Path) -> StagedUpdate:
    store, key = ChunkStore(folder), SigningKey.generate()
    publisher = VersionPublisher(store, "job", "trainer", key, clock=lambda: 0.0)
    manifest = publisher.publish(1, 0, base, new)
    return Receiver(base).decode(manifest, chunks_of(store, manifest), key.verify_key, 0.0)
