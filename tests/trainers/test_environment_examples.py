"""Examples on real environments, as readers run them: textarena, TextWorld, verifiers and others.

One fleet of two replicas serves all of them: one says that it reads fast, the other that it writes
fast. `scripts/trainer-env environments` makes the environment that the examples run in.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.stack import ROOT, TrainerStack, save_policy, venv

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.trainers,
    pytest.mark.timeout(600),
]
RUN_S = 300.0
POOLS = (
    {"id": "reads", "prefill_tok_s": 40_000.0, "decode_tok_s": 500.0},
    {"id": "writes", "prefill_tok_s": 5_000.0, "decode_tok_s": 2_000.0},
)


@pytest.fixture(scope="module")
def python() -> Path:
    return venv("environments")


@pytest.fixture(scope="module")
def stack(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStack]:
    del python  # no engine is started where the environments are not there
    folder = tmp_path_factory.mktemp("environments")
    policy = save_policy(folder / "policy")
    stack = TrainerStack(folder, policy, replicas=len(POOLS), max_model_len=2_048)
    file = folder / "node.json"
    config = json.loads(file.read_text())
    for replica, pool in zip(config["replicas"], POOLS, strict=True):
        replica |= pool
    file.write_text(json.dumps(config))
    with stack:
        stack.wait_ready()
        yield stack


def rows(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for row in found:
        assert len(row["tokens"]) == len(row["logprobs"]) == len(row["mask"])
    return found


def test_a_policy_plays_both_seats_of_a_game(
    python: Path, stack: TrainerStack, tmp_path: Path
) -> None:
    games = tmp_path / "games.jsonl"
    printed = stack.said(python, "textarena_self_play.py", str(games), "32")
    assert len(re.findall(r"^seat \d: won \d+ of 32 games", printed, re.M)) == 2
    played = rows(games)
    assert len(played) == 64
    # The player who takes the last one wins, an impossible move loses; 0 is a game given up.
    assert {-1, 1} <= {row["reward"] for row in played} <= {-1, 0, 1}
    assert all(row["versions"] == [0] for row in played if row["moves"])


def test_a_policy_calls_the_tools_of_a_quest(
    python: Path, stack: TrainerStack, tmp_path: Path
) -> None:
    game, quests = tmp_path / "quest.z8", tmp_path / "quests.jsonl"
    make = [str(python.parent / "tw-make"), "tw-simple", "--rewards", "dense", "--goal", "detailed"]
    subprocess.run([*make, "--seed", "7", "--output", str(game)], check=True, timeout=RUN_S)
    stack.said(python, "textworld_tools.py", str(game), str(quests), "16")
    played = rows(quests)
    assert len(played) == 16
    assert all(row["turns"] == 6 or row["done"] for row in played)


def test_the_episodes_of_verifiers_come_to_an_end_and_are_traced(
    python: Path, stack: TrainerStack, tmp_path: Path
) -> None:
    settings = ROOT / "examples/verifiers_numbers.toml"
    command = [str(python.parent / "vf-eval"), "@", str(settings), "--model", str(stack.model)]
    done = subprocess.run(
        # vf-eval reads no "=" in what it knows of its client.
        [*command, "--client.base-url", f"{stack.gateway}/v1"],
        cwd=tmp_path,
        env={**stack.environ(), "PYTHONPATH": str(ROOT / "examples"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    (traces,) = tmp_path.glob("outputs/*/traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    assert len(episodes) == 32
    assert all(each["ok"] and not each["errors"] for each in episodes)
    # A move is one token.
    assert all(1 <= each["num_output_tokens"] <= 4 for each in episodes)


def test_turns_that_read_and_turns_that_write_go_to_the_pools_that_suit_them(
    python: Path, stack: TrainerStack
) -> None:
    printed = stack.said(python, "two_pools.py", "32")
    shares = {
        kind: {name: int(share) for name, share in re.findall(r"(\w+) (\d+)%", line)}
        for kind, line in re.findall(r"^(solve|judge): \d+ tokens by (.*)$", printed, re.M)
    }
    # Both replicas write at one pace here, whatever is said of them, and the gateway sees it: turns
    # that write are shared by load, and those that read go where reading is said to be fast.
    assert shares["judge"].get("reads", 0) > shares["judge"].get("writes", 0)
    assert shares["solve"].get("writes", 0) > shares["judge"].get("writes", 0)
    assert re.search(r"^32 tasks, mean reward \d", printed, re.M)
