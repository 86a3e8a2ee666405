"""Examples of jobs without a trainer, as a reader runs them: evaluation, and a reward model."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.trainers.stack import START_S, TrainerStack
from tests.harness.waiting import until
from tests.trainers.stack import ROOT, save_policy

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.trainers,
    pytest.mark.timeout(900),
]

LIBRARIES = Path(os.environ.get("ROSE_TRAINER_CLIENTS") or ROOT / ".trainer-clients") / "libraries"
TASKS, RUN_S = 200, 240.0


def save_reward_model(folder: Path) -> Path:
    """Write a classifier of one label, random, with the policy's tokenizer."""
    from transformers import AutoConfig, Qwen2ForSequenceClassification

    save_policy(folder, seed=1)
    config = AutoConfig.from_pretrained(folder)
    config.architectures, config.num_labels = ["Qwen2ForSequenceClassification"], 1
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStack]:
    """Job `eval` with a replica of the policy, job `reward` with one of the reward model."""
    if not (LIBRARIES / "reasoning_gym").is_dir():
        pytest.skip(f"reasoning-gym is not in {LIBRARIES}: scripts/trainer-clients")
    folder = tmp_path_factory.mktemp("jobs")
    reward = save_reward_model(folder / "reward-model")
    policy = save_policy(folder / "policy")
    stack = TrainerStack(
        folder, policy, replicas=2, job="eval", scheduler=("--job=reward=reward-model",)
    )
    file = folder / "node.json"
    config = json.loads(file.read_text())
    config["replicas"][1] |= {"model_dir": str(reward), "runner": "pooling"}
    file.write_text(json.dumps(config))
    scheduler = stack.members["scheduler"]
    scheduler.argv = [each.replace("--job=eval", "--job=eval=policy") for each in scheduler.argv]
    with stack:
        stack.until(lambda: serving(stack) == ["eval", "reward"], START_S, "replica of each job")
        yield stack


def serving(stack: TrainerStack) -> list[str]:
    """Jobs whose replicas get turns."""
    try:
        with urllib.request.urlopen(f"{stack.gateway}/rose/v1/versions", timeout=5) as answer:
            replicas = json.load(answer)["replicas"]
    except OSError:
        return []
    return sorted(each["job"] for each in replicas if each["state"] == "serving")


def environ(stack: TrainerStack) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(LIBRARIES)])
    return {**stack.environ(), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def example(stack: TrainerStack, name: str, *argv: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "examples" / name), *argv]
    return subprocess.Popen(command, env=environ(stack), stdout=subprocess.PIPE, text=True)


def test_an_evaluation_that_is_killed_goes_on_and_its_answers_are_scored(
    stack: TrainerStack,
) -> None:
    answers, rewards = stack.folder / "answers.jsonl", stack.folder / "rewards.jsonl"

    def lines(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    first = example(stack, "batch_inference.py", str(answers), str(TASKS))
    until(lambda: len(lines(answers)) >= 10 or first.poll() is not None, RUN_S, "ten answers")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    written = len(lines(answers))
    assert 10 <= written < TASKS
    # A line cut off by a kill.
    with answers.open("a") as file:
        file.write('{"task": 7, "que')
    said, _ = example(stack, "batch_inference.py", str(answers), str(TASKS)).communicate(
        timeout=RUN_S
    )
    sys.stdout.write(said)
    assert f"{written} of {TASKS} tasks are answered already" in said
    rows = [json.loads(line) for line in lines(answers)]
    assert sorted(row["task"] for row in rows) == list(range(TASKS))
    assert all(len(row["samples"]) == 2 for row in rows)

    said, _ = example(stack, "reward_model.py", str(answers), str(rewards)).communicate(
        timeout=RUN_S
    )
    sys.stdout.write(said)
    scored = [json.loads(line)["reward"] for line in lines(rewards)]
    assert len(scored) == 2 * TASKS
    assert all(0.0 <= each <= 1.0 for each in scored)
    assert len(set(scored)) > TASKS
