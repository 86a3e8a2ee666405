"""`python -m bench.micro.adapter_update`: a LoRA adapter from the trainer's call to its turns.

A scheduler, a gateway and a node with one dedicated vLLM run on this machine, on random weights, in
bfloat16 where the CPU has instructions for vectors of 512 bits, else in float32; a PolicyPublisher
in this process publishes adapters on all linear layers, about 1% of the base. Each round every
weight of the adapter changes, while one turn after the other is decoded.
Seconds until the version is announced, until the gateway routes turns to it, and the longest time
without a token: before the call, from then on until a second after the version is served (a running
turn goes on under it, all of its KV computed anew). Exit code 1 when an adapter that is announced
takes more than a second, or pauses its engine.
"""

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.common.report import parser_of, put_judged, reported
from bench.common.tiny_models import TinyModel
from bench.trainers.stack import NODE, TrainerStack
from rose.client import RolloutClient, Sampling
from rose.integrations import PolicyPublisher
from rose.integrations.lora import LoraSettings
from weight_transfer import TensorBits, read_model_dir

if TYPE_CHECKING:
    import torch

PROG = "bench.micro.adapter_update"
MOST_S: Final = 1.0
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Time before and after a round.
QUIET_S, AFTER_S = 2.0, 1.0
# A slow CPU takes minutes to run every size of step.
WARM_UP_S = 300.0


def adapter_of(base: Mapping[str, TensorBits], r: int, seed: int) -> "dict[str, torch.Tensor]":
    """Return random tensors of an adapter on all linear layers, by PEFT's names."""
    import torch

    chance = torch.Generator().manual_seed(seed)
    made = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module.endswith(LINEAR):
            rows, columns = tensor.shape
            for letter, shape in (("A", (r, columns)), ("B", (rows, r))):
                key = f"base_model.model.{module}.lora_{letter}.weight"
                made[key] = 0.01 * torch.randn(shape, generator=chance)
    return made


class RunningTurns(threading.Thread):
    """One turn after the other at a gateway, until `stop`. came_s: when tokens came."""

    def __init__(self, gateway: str, job: str, vocabulary: int) -> None:
        super().__init__(daemon=True)
        self._client = RolloutClient(gateway, job=job)
        self._prompt = [(7 * k) % vocabulary for k in range(64)]
        self._over = threading.Event()
        self.came_s: list[float] = []

    def run(self) -> None:
        asyncio.run(self._turns())

    def stop(self) -> None:
        self._over.set()
        self.join()

    def longest_s(self, since_s: float, until_s: float) -> float:
        """Return the longest time without a token between two moments."""
        within = [at_s for at_s in self.came_s if since_s < at_s < until_s]
        return max(b - a for a, b in pairwise([since_s, *within, until_s]))

    async def _turns(self) -> None:
        sampling = Sampling(max_tokens=256, ignore_eos=True)
        async with self._client as client:
            while not self._over.is_set():
                async with client.stream(self._prompt, sampling) as stream:
                    async for _ in stream:
                        self.came_s.append(time.monotonic())


def measure(root: Path, model: TinyModel, r: int, rounds: int) -> dict[str, Any]:
    """Return the figures of all rounds, the first of which warms up."""
    model.save(root / "model")
    base = read_model_dir(root / "model")
    weights = sum(tensor.bits.size for tensor in base.values())
    lora = {"max_rank": r, "max_adapters": 2}
    replica = {"lora": lora, "stream_interval": 1, "warm_up_s": WARM_UP_S, "dtype": model.dtype}
    found = []
    with TrainerStack(root / "stack", root / "model", replica=replica) as stack:
        stack.wait_ready(2 * WARM_UP_S)
        turns = RunningTurns(stack.gateway, stack.job, model.vocabulary)
        turns.start()
        with PolicyPublisher(stack.settings(replicas=1)) as publisher:
            for seed in range(rounds + 1):
                named = adapter_of(base, r, seed)
                time.sleep(QUIET_S)
                began_s = time.monotonic()
                publisher.publish(named.items(), lora=LoraSettings(r, 2.0 * r))
                over_s = time.monotonic()
                time.sleep(AFTER_S)
                receipt = publisher.receipts[-1]
                found.append(
                    {
                        "published_s": receipt.publish_s,
                        "served_s": receipt.served_s,
                        "seconds": over_s - began_s,
                        "wire_bytes": receipt.wire_bytes,
                        "density": receipt.density,
                        "quiet_gap_s": turns.longest_s(began_s - QUIET_S, began_s),
                        "gap_s": turns.longest_s(began_s, over_s + AFTER_S),
                    }
                )
        turns.stop()
        lines = (stack.folder / NODE / "activations.jsonl").read_bytes().splitlines()
    activated = [msgspec.json.decode(line) for line in lines][1:]
    for row, active in zip(found[1:], activated, strict=True):
        row |= {name: active[name] for name in ("pause_s", "apply_s", "probe_ok")}
    elements = sum(tensor.numel() for tensor in named.values())
    return {
        "weights": weights,
        "dtype": model.dtype,
        "r": r,
        "share_of_base": elements / weights,
        "median": {name: median(row[name] for row in found[1:]) for name in found[1]},
        "first": found[0],
        "rounds": found[1:],
    }


def main(argv: Sequence[str] | None = None) -> int:
    import torch

    numbers: dict[str, Any] = {"rounds": 7, "hidden": 768, "layers": 12, "r": 8}
    args = parser_of(__doc__, PROG, **numbers).parse_args(argv)
    model = TinyModel(
        hidden=args.hidden,
        layers=args.layers,
        heads=args.hidden // 64,
        kv_heads=args.hidden // 128,
        mlp=4 * args.hidden,
        vocabulary=32_000,
        # Others take two seconds for a step in bfloat16.
        dtype="bfloat16" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "float32",
    )

    def work() -> int:
        with tempfile.TemporaryDirectory(prefix="rose-adapter-") as folder:
            result = measure(Path(folder), model, args.r, args.rounds)
        middle = result["median"]
        good = middle["served_s"] <= MOST_S and middle["pause_s"] == 0.0
        return put_judged(result, args.out, good=good)

    return reported(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
