"""Ranks of a trainer, run by test_weight_torch_ranks.py. argv: ROOT.

Each line on standard input, RANKS SCENARIO…, is answered with how its ranks ended, a JSON list of
exit codes. Ranks are forked from this process: torch is imported once, which takes seconds.

The tests' only gathering is `gathered`: what the dense weights should be.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from weight_transfer import ChunkStore, ShardError, SigningKey
from weight_transfer.publish.shards import ShardSettings
from weight_transfer.publish.version_publisher import VersionPublisher
from weight_transfer.torch import Ranks, ShardedPublisher, state_pieces

KEY = SigningKey.from_hex("09" * 32)
ROOT = Path(sys.argv[1])
# Rank of this process, once it is one.
RANK = RANKS = 0
State = dict[str, torch.Tensor]


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class TrainedModel(nn.Module):
    """Rows that no number of ranks divides, unless `even`; a buffer, a scalar, an integer."""

    def __init__(self, even: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(24 if even else 21, 8)
        self.blocks = nn.ModuleList(Mlp(8, 16 if even else 11) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def gathered(state: State, dtype: torch.dtype | None = None) -> State:
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    cast = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in full.items()}
    return {name: tensor.detach().clone().contiguous() for name, tensor in cast.items()}


def save(where: Path, state: State) -> None:
    if RANK == 0:
        save_file(state, where)
    dist.barrier()


def publisher(where: Path, state: State, **options: object) -> ShardedPublisher:
    settings = ShardSettings(chunk_bytes=256, threads=2)
    store = ChunkStore(options.pop("root", where))
    signer = VersionPublisher(store, "job", "t", KEY) if RANK == 0 else None
    return ShardedPublisher(store, state, signer, settings=settings, **options)


def train(model: nn.Module, where: Path, dtype: torch.dtype | None, **options: object) -> None:
    """Two steps of an optimiser, each published by all ranks; then a base."""
    where.mkdir(exist_ok=True)
    save(where / "0.safetensors", gathered(model.state_dict(), dtype))
    sharded = publisher(where, model.state_dict(), dtype=dtype, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for version in (1, 2):
        tokens = torch.randint(0, 21, (4, 5), generator=torch.Generator().manual_seed(version))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.steps += 1
        sharded.publish(version, model.state_dict())
        save(where / f"{version}.safetensors", gathered(model.state_dict(), dtype))
    sharded.publish_base()


def fsdp(even: bool = False, mesh: DeviceMesh | None = None) -> nn.Module:
    model = TrainedModel(even)
    mesh = mesh or init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def scenario_fsdp() -> None:
    """Stores of their own, fp32 trained and bf16 published."""
    where = ROOT / "fsdp"
    origin = f"rank-{RANK}" if RANK else ""
    where.mkdir(exist_ok=True)
    train(fsdp(), where, torch.bfloat16, root=where / f"rank-{RANK}", origin=origin)


def scenario_pair() -> None:
    train(fsdp(), ROOT / "pair", torch.bfloat16)


def scenario_hsdp() -> None:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=names)
    train(fsdp(mesh=mesh), ROOT / "hsdp", None)


def scenario_fsdp_tp() -> None:
    """Torch calls the rows of `up` strided: tensor parallelism cuts them first, FSDP second."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    model = TrainedModel(even=True)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if RANKS == 4:  # What torch does here may change: then this scenario proves nothing.
        kinds = {
            type(p).__name__
            for t in model.state_dict().values()
            if isinstance(t, DTensor)
            for p in t.placements
        }
        assert "_StridedShard" in kinds, kinds
    train(model, ROOT / "fsdp_tp", None)


def scenario_dtensors() -> None:
    """Every pair of placements on a 2-D mesh, of dimensions that divide by nothing."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2))
    where = ROOT / "dtensors"
    where.mkdir(exist_ok=True)
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    layouts = {f"{a}{b}": (a, b) for a in kinds for b in kinds}

    def state(version: int) -> State:
        torch.manual_seed(version)
        drawn = {name: torch.randn(7, 5, 3) for name in layouts}
        return {name: distribute_tensor(t, mesh, layouts[name]) for name, t in drawn.items()}

    save(where / "0.safetensors", gathered(state(0)))
    sharded = publisher(where, state(0))
    for version in (1, 2):
        sharded.publish(version, state(version))
        save(where / f"{version}.safetensors", gathered(state(version)))
    sharded.publish_base()
    third = distribute_tensor(torch.randn(4, 4, 8), mesh, (Shard(2), Replicate()))
    partial = DTensor.from_local(torch.ones(4), mesh, (Partial(), Replicate()), run_check=False)
    odd = (_StridedShard(0, split_factor=3), Shard(0))
    strided = DTensor.from_local(
        torch.ones(3), mesh, odd, run_check=False, shape=torch.Size([12]), stride=(1,)
    )
    refused(lambda: state_pieces({"w": third}), "first two dimensions")
    refused(lambda: state_pieces({"w": partial}), "finished weights")
    refused(lambda: state_pieces({"w": strided}), "in no order that is known here")


def refused(work: Callable[[], object], words: str) -> None:
    with pytest.raises(ShardError, match=re.escape(words)) as caught:
        work()
    assert "\n" not in str(caught.value)


def scenario_faults() -> None:
    """A full disk on one rank, a wrong version on another: all are told, the next one works."""
    model, where = fsdp(), ROOT / "faults"
    where.mkdir(exist_ok=True)
    save(where / "0.safetensors", gathered(model.state_dict()))
    sharded = publisher(where, model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    fsync, guilty = os.fsync, RANKS - 1

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    if guilty == RANK:
        os.fsync = full
    refused(lambda: sharded.publish(1, model.state_dict()), f"rank {guilty} could not take part")
    os.fsync = fsync
    version = 7 if guilty == RANK else 1
    words = f"rank {guilty} reports version 7 on 0, wanted is 1 on 0"
    refused(lambda: sharded.publish(version, model.state_dict()), words)
    assert ChunkStore(where).versions() == ()
    sharded.publish(1, model.state_dict())
    assert sharded.version == 1
    save(where / "1.safetensors", gathered(model.state_dict()))


def scenario_death() -> None:
    """The last rank dies in the middle of a publish; the others are told and end."""
    model, where = fsdp(), ROOT / "death"
    where.mkdir(exist_ok=True)
    save(where / "0.safetensors", gathered(model.state_dict()))
    sharded = publisher(where, model.state_dict(), ranks=Ranks(timeout_s=20))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    if RANK == RANKS - 1:
        os._exit(9)
    refused(lambda: sharded.publish(1, model.state_dict()), "a rank is gone or late")
    assert ChunkStore(where).versions() == ()
    os._exit(0)


def scenario_restart() -> None:
    """After it, with another number of ranks: version 1 follows version 0."""
    where = ROOT / "death"
    model = fsdp()
    dense = gathered(model.state_dict())
    saved = load_file(where / "0.safetensors")
    assert all(torch.equal(dense[name], saved[name]) for name in saved)
    sharded = publisher(where, model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)
    sharded.publish(1, model.state_dict())
    save(where / "1.safetensors", gathered(model.state_dict()))


def forked(rank: int, ranks: int, scenarios: list[str]) -> int:
    """Start one rank; returns its process."""
    global RANK, RANKS
    if pid := os.fork():
        return pid
    RANK, RANKS = rank, ranks
    log = os.open(ROOT / f"{ranks}-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run(scenarios)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run(scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{ROOT}/rendezvous-{RANKS}", rank=RANK, world_size=RANKS
    )
    for name in scenarios:
        globals()[f"scenario_{name}"]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for line in sys.stdin:
        count, *names = line.split()
        pids = [forked(rank, int(count), names) for rank in range(int(count))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()
