"""Ranks of a trainer, forked: `policy_rank_main.py FOLDER SCHEDULER JOB RANKS SCENARIO`.

Prints their exit codes as JSON. Each trains a small model by FSDP2 and publishes it.
"""

import json
import os
import sys
import traceback
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rose.errors import RefusedError
from rose.integrations import PolicyPublisher, TrainerSettings
from rose.integrations.named_weights import UnfitWeightsError
from rose.integrations.sharded import ShardedPolicyPublisher
from weight_transfer import ChunkStore, Manifest
from weight_transfer.format.manifest import TensorUpdate

FOLDER, SCHEDULER, JOB = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
RANKS, SCENARIO = int(sys.argv[4]), sys.argv[5]


class PolicyModel(nn.Module):
    """Rows that no number of ranks divides, and a head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens = nn.Embedding(21, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 21, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.norm(x))


def settings(**given: object) -> TrainerSettings:
    return TrainerSettings(
        JOB,
        SCHEDULER,
        "http://127.0.0.1:1",
        FOLDER / "checkpoint",
        FOLDER / "root",
        FOLDER / "key",
        **given,
    )


def save_gathered(state: dict[str, torch.Tensor], where: Path) -> None:
    """Whole tensors in bf16, without the head, as checkpoints of tied models have them."""
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    if dist.get_rank() == 0:
        where.mkdir(exist_ok=True)
        cast = {n: t.detach().bfloat16().clone() for n, t in full.items() if n != "lm_head.weight"}
        save_file(cast, where / "model.safetensors")
        (where / "config.json").write_text('{"tie_word_embeddings": true}')
    dist.barrier()


def model() -> nn.Module:
    made = PolicyModel().bfloat16().float()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in made.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def step(made: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 21, (4, 5), generator=torch.Generator().manual_seed(seed))
    made(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def scenario_gathered() -> None:
    made = model()
    save_gathered(made.state_dict(), FOLDER / "checkpoint")
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    with PolicyPublisher(settings()) as publisher:
        for version in (1, 2):
            step(made, optimizer, version)
            named = made.state_dict()
            assert publisher.publish(named.items(), wait=False) == version
            save_gathered(named, FOLDER / f"gathered-{version}")
        dist.barrier()


def scenario_unfit() -> None:
    made = model()
    save_gathered(made.state_dict(), FOLDER / "checkpoint")
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    step(made, optimizer, 1)
    with PolicyPublisher(settings()) as publisher:
        named = made.state_dict()
        strange = {**named, "adapter": torch.full((3,), 7.0)}
        with pytest.raises((UnfitWeightsError, RefusedError), match="adapter"):
            publisher.publish(strange.items(), wait=False)
        assert publisher.publish(named.items(), wait=False) == 1
        save_gathered(named, FOLDER / "gathered-1")
        dist.barrier()


def publish_shards(publisher: ShardedPolicyPublisher, made: nn.Module) -> None:
    """Weights that are no checkpoint's, then two steps, one of which does not fit at first."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    step(made, optimizer, 7)
    for version in (1, 2, 3):
        named = made.state_dict()
        if version == 2:
            lacking = {name: each for name, each in named.items() if name != "norm.bias"}
            with pytest.raises(RefusedError, match=r"does not give norm\.bias"):
                publisher.publish_state(lacking, wait=False)
        assert publisher.publish_state(named, wait=False) == version
        save_gathered(named, FOLDER / f"gathered-{version}")
        step(made, optimizer, version)


def scenario_sharded() -> None:
    """All ranks share a folder; a second trainer goes on in it from other weights."""
    made = model()
    save_gathered(made.state_dict(), FOLDER / "checkpoint")
    with ShardedPolicyPublisher(settings()) as publisher:
        publish_shards(publisher, made)
        dist.barrier()
    dist.barrier()
    with ShardedPolicyPublisher(settings()) as publisher:
        named = made.state_dict()
        assert publisher.publish_state(named, wait=False) == 4
        save_gathered(named, FOLDER / "gathered-4")
        dist.barrier()


def scenario_own_stores() -> None:
    """Each rank serves its shard, until somebody has fetched all of it."""
    made = model()
    save_gathered(made.state_dict(), FOLDER / "checkpoint")
    with ShardedPolicyPublisher(settings(), own_stores=True) as publisher:
        publish_shards(publisher, made)
        dist.barrier()
        if dist.get_rank() == 0:
            fetch(publisher)
        dist.barrier()


def fetch(publisher: ShardedPolicyPublisher) -> None:
    """Fetch like a node: manifests from the first rank, chunks from any rank that has them."""
    assert publisher._publisher is not None
    into = ChunkStore(FOLDER / "fetched")
    for version, base in ((1, True), (2, False), (3, False)):
        url = f"{publisher._publisher.url}/manifests/{version}{'.base' if base else ''}"
        manifest = Manifest.from_bytes(got(url))
        assert len(manifest.origins) == RANKS - 1
        for chunk in manifest.chunks:
            origin = chunk.origin
            where = publisher._publisher.url if origin is None else manifest.origins[origin]
            into.put(got(f"{where}/chunks/{chunk.id}"))
        into.put_manifest(replace(manifest, origins=(), tensors=local(manifest)))


def local(manifest: Manifest) -> tuple[TensorUpdate, ...]:
    return tuple(
        structs.replace(
            tensor, chunks=tuple(structs.replace(c, origin=None) for c in tensor.chunks)
        )
        for tensor in manifest.tensors
    )


def got(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return bytes(answer.read())


def run(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/rendezvous", rank=rank, world_size=RANKS
    )
    globals()[f"scenario_{SCENARIO}"]()
    dist.barrier()
    dist.destroy_process_group()


def forked(rank: int) -> int:
    """Start one rank; returns its process."""
    if pid := os.fork():
        return pid
    log = os.open(FOLDER / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run(rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    pids = [forked(rank) for rank in range(RANKS)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.stdout.write(json.dumps(codes))
