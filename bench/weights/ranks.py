"""Host memory of the checkpoint over all tensor parallel ranks of a node, each a process.

The ranks meet over gloo as an engine's do. Each reads the checkpoint, decodes one update and
commits it; after each of these all of them wait while their proportional set sizes (PSS: shared
pages count once, divided among those who have them) are read. What a rank had before it read
anything is taken off, so a sum over ranks is what the checkpoint takes of the node.
"""

import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.common.processes import BenchProcess, python
from bench.common.tiny_models import write_safetensors
from bench.weights.codec import adam_step, rate_for
from weight_transfer import (
    ChunkStore,
    Receiver,
    SigningKey,
    StagedTensor,
    TensorBits,
    VerifiedManifest,
    VersionPublisher,
)
from weight_transfer.apply.node_copy import NodeCopy
from weight_transfer.format.checkpoint import Checkpoint

SIZES = (1, 2, 4)
TENSORS, ROWS, COLUMNS = 16, 2048, 4096
DENSITY = 0.01
_FILE = "model.safetensors"


def rank_memory(seed: int, sizes: Sequence[int] = SIZES) -> list[dict[str, object]]:
    """Return bytes of all ranks over the checkpoint's, at each tensor parallel size."""
    with tempfile.TemporaryDirectory(prefix="rose-ranks-") as name:
        root = Path(name)
        size = _publish(root, seed)
        return [_row(root, ranks, size) for ranks in sizes]


def _publish(root: Path, seed: int) -> int:
    """Write a checkpoint and version 1 of it; returns the checkpoint's bytes."""
    rate = rate_for(DENSITY, seed)
    steps = [adam_step(ROWS, COLUMNS, rate, seed + k) for k in range(TENSORS)]
    names = [f"model.layers.{k}.weight" for k in range(TENSORS)]
    old, new = (
        {
            name: TensorBits(name, "bfloat16", (ROWS, COLUMNS), bits)
            for name, bits in zip(names, side, strict=True)
        }
        for side in ([step.old.bits for step in steps], [step.new.bits for step in steps])
    )
    (root / "model").mkdir()
    write_safetensors(root / "model" / _FILE, old.values())
    VersionPublisher(ChunkStore(root / "store"), "bench", "bench", SigningKey.generate()).publish(
        1, 0, old, new
    )
    return sum(tensor.bits.nbytes for tensor in old.values())


def _row(root: Path, ranks: int, size: int) -> dict[str, object]:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        started = []
        for rank in range(ranks):
            argv = python("bench.weights.ranks", root, ranks, rank)
            process = BenchProcess(f"rank {rank}", argv, env=environment, piped=True)
            started.append(stack.enter_context(process))
        found = [json.loads(process.read()) for process in started]
    ratios = {
        name: sum(one[name] for one in found) / size for name in ("read", "decoded", "active")
    }
    return {
        "ranks": ranks,
        "checkpoint_bytes": size,
        "decodes": sum(one["decodes"] for one in found),
        **ratios,
    }


def _rank(root: Path, ranks: int, rank: int) -> None:
    """Run one rank: write the bytes that it has more after each step."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{root}/meet-{ranks}", rank=rank, world_size=ranks
    )
    # Their memory is not the checkpoint's.
    compile_kernels()
    own = _pss_bytes(root / "model")
    found = {}

    def measure(name: str) -> None:
        dist.barrier()
        found[name] = _pss_bytes(root / "model") - own
        dist.barrier()

    store = ChunkStore(root / "store")
    copy = NodeCopy(Checkpoint.open(root / "model"), root / "ranks" / str(ranks))
    receiver = Receiver.over(copy)
    measure("read")
    manifest = store.get_manifest(1)
    decoded = []

    def decode(name: str) -> StagedTensor:
        decoded.append(name)
        chunks = {ref.id: store.get(ref.id) for each in plan.tensors[name] for ref in each.chunks}
        return receiver.decode_tensor(plan, name, chunks)

    plan = receiver.plan([VerifiedManifest(manifest)], time.time())
    staged = copy.decode(plan, decode, "first")
    measure("decoded")
    receiver.commit(staged)
    del staged
    measure("active")
    sys.stdout.write(json.dumps(found | {"decodes": len(decoded) // len(plan.tensors)}) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def compile_kernels() -> None:
    """Compile the kernels, as an engine that serves has done at its start."""
    step = adam_step(64, 64, 1e-4, 0)
    with tempfile.TemporaryDirectory(prefix="rose-warm-") as folder:
        store = ChunkStore(Path(folder))
        publisher = VersionPublisher(store, "bench", "bench", SigningKey.generate())
        manifest = publisher.publish(1, 0, {"w": step.old}, {"w": step.new})
        receiver = Receiver({"w": step.old})
        chunks = {ref.id: store.get(ref.id) for ref in manifest.chunks}
        receiver.commit(receiver.decode(manifest, chunks, None, time.time()))


def _pss_bytes(model: Path) -> int:
    """Return the PSS of this process's own memory and of the checkpoint's files.

    Libraries are left out: their share depends on the other processes that map them just now.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if "-" in words[0]:
            path = words[5] if len(words) > 5 else ""
            counted = not path.startswith("/") or path.startswith(("/memfd:", str(model)))
        elif counted and words[0] == "Pss:":
            total += int(words[1]) << 10
    return total


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
