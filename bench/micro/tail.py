"""`python -m bench.micro.tail`: a step's longest episode, by what its replica drafts.

Fleets run beside each other, each with one dedicated vLLM: without drafts, with n-gram drafts, and
with suffix drafts of what the replica's turns wrote before (left out without `arctic-inference`).
In each round each of them plays the same steps, one after the other: FrozenLake of the demo with
long turns, 4 groups of 8 siblings, and the TextWorld quest of `examples/textworld_tools.py`, 16
times (only where `scripts/trainer-env environments` was run). `longest_s` and `step_s` are medians
over the rounds of the longest episode and of all of them, `faster` that of both without drafts over
with them, in the same round; `tokens_a_step` tokens over steps of an episode that runs alone. Exit
code 1 when no drafts make the longest episode of an environment 1.4 times faster.
"""

import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.common.processes import ROOT
from bench.common.report import parser_of, put_judged, reported, say
from bench.demo.frozen_lake.models import ensure_models
from bench.demo.frozen_lake.task import training_lake
from bench.demo.training.rollouts import Trajectory, play, sampling
from bench.trainers.policy import save_policy
from bench.trainers.stack import RUN_S, TrainerStack
from rose.client import RolloutClient, Sampling, Turn
from rose.errors import ConfigError

PROG = "bench.micro.tail"
LEAST: Final = 1.4
PLAIN = "none"
DRAFTS: Final[dict[str, dict[str, object]]] = {
    PLAIN: {},
    "n-gram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "num_speculative_tokens_per_batch_size": [[1, 8, 8], [9, 48, 2]],
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}
GROUPS, SIBLINGS, QUESTS = 4, 8, 16
# A replica of few parameters is slow to warm up where a CPU has no bfloat16.
WARM_UP_S = 300.0

Round = dict[str, float]
"""longest_s, step_s and tokens of one step, and tokens_a_step where it is counted."""


class CountedClient(RolloutClient):
    """Client that takes its turns as streams. lines: chunks so far, one for each of a replica's
    steps where one turn runs alone.
    """

    lines = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **options: Any) -> Turn:  # noqa: ANN401
        async with self.stream(token_ids, sampling, **options) as stream:
            async for _ in stream:
                self.lines += 1
        return stream.turn


def lakes(stack: TrainerStack, seed: int) -> Round:
    """Play one step of FrozenLake, and the last episode's lake once more, alone. Raises ConfigError
    if an episode is lost.
    """
    how, played = sampling(long_turns=True), list[Trajectory]()

    async def step() -> None:
        async with (
            RolloutClient(stack.gateway, job=stack.job) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for group, sibling in product(range(GROUPS), range(SIBLINGS)):
                name = f"{seed}.{group}.{sibling}"
                played.append(Trajectory(name, group, seed, time.monotonic()))
                lake = training_lake(seed, group)
                tasks.create_task(play(client, lake, how, played[-1], min_version=0))

    async def alone() -> float:
        async with CountedClient(stack.gateway, job=stack.job) as client:
            again = Trajectory(f"{seed}.alone", GROUPS, seed, time.monotonic())
            await play(client, training_lake(seed, GROUPS - 1), how, again, min_version=0)
            return len(again.positions()) / client.lines

    began_s = time.monotonic()
    asyncio.run(step())
    step_s = time.monotonic() - began_s
    if lost := sum(one.lost for one in played):
        raise ConfigError(f"{lost} of {len(played)} episodes are lost")
    return {
        "longest_s": max(one.end_s - one.start_s for one in played),
        "step_s": step_s,
        "tokens": float(sum(len(one.positions()) for one in played)),
        "tokens_a_step": asyncio.run(alone()),
    }


def quests(python: Path, game: Path, stack: TrainerStack, seed: int) -> Round:
    """Play one step of TextWorld, by the example. Raises ConfigError if it fails."""
    path = stack.folder / f"quests-{seed}.jsonl"
    began_s = time.monotonic()
    stack.said(python, "textworld_tools.py", str(game), str(path), str(QUESTS))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        "longest_s": max(row["seconds"] for row in rows),
        "step_s": time.monotonic() - began_s,
        "tokens": float(sum(sum(row["mask"]) for row in rows)),
    }


def measure(
    folder: Path,
    model: Path,
    max_model_len: int,
    step: Callable[[TrainerStack, int], Round],
    rounds: int,
) -> dict[str, dict[str, float]]:
    """Return the figures of each kind of drafts: `rounds` steps after one that warms up."""
    have = {
        name: drafts
        for name, drafts in DRAFTS.items()
        if drafts.get("method") != "suffix" or importlib.util.find_spec("arctic_inference")
    }
    found: dict[str, list[Round]] = {name: [] for name in have}
    with ExitStack() as fleets:
        stacks = {}
        for name, drafts in have.items():
            option = [f"--speculative-config={json.dumps(drafts)}"] if drafts else []
            replica: dict[str, object] = {"engine_args": option, "warm_up_s": WARM_UP_S}
            replica["stream_interval"] = 1
            stacks[name] = fleets.enter_context(
                TrainerStack(folder / name, model, max_model_len=max_model_len, replica=replica)
            )
        for stack in stacks.values():
            stack.wait_ready(2 * WARM_UP_S)
        for seed in range(rounds + 1):
            for name, stack in stacks.items():
                found[name].append(step(stack, seed))
                say(PROG, f"{name}, round {seed}: {found[name][-1]}")
    rows = {}
    for name, (_, *played) in found.items():
        keys = ("longest_s", "step_s")
        row = {key: median(each[key] for each in played) for key in played[0]}
        for key in keys:
            pairs = zip(found[PLAIN][1:], played, strict=True)
            row[f"{key}_faster"] = median(plain[key] / each[key] for plain, each in pairs)
        rows[name] = row
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = parser_of(__doc__, PROG, rounds=5).parse_args(argv)

    def work() -> int:
        found = {}
        with tempfile.TemporaryDirectory(prefix="rose-tail-") as name:
            folder = Path(name)
            policy = ensure_models(ROOT / "out/models", True, lambda *_: None).policy_dir
            found["FrozenLake"] = measure(folder / "lakes", policy, 512, lakes, args.rounds)
            python = ROOT / ".venv-environments/bin/python"
            if python.exists():
                game = folder / "quest.z8"
                make = [str(python.parent / "tw-make"), "tw-simple", "--rewards", "dense"]
                make += ["--goal", "detailed", "--seed", "7", "--output", str(game)]
                subprocess.run(make, check=True, timeout=RUN_S, capture_output=True)  # noqa: S603
                policy = save_policy(folder / "policy")
                found["TextWorld"] = measure(
                    folder / "quests",
                    policy,
                    2_048,
                    lambda stack, seed: quests(python, game, stack, seed),
                    args.rounds,
                )
        best = [max(row["longest_s_faster"] for row in rows.values()) for rows in found.values()]
        return put_judged({"environments": found}, args.out, good=min(best) >= LEAST)

    return reported(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
