"""TRL as released trains through ROSE: server mode, rollout_func, a callback, AsyncGRPOTrainer.

One fleet serves all of these trainings, one after the other, each a new run of the same job.
"""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from rose.client import BlockingRolloutClient, Sampling
from tests.harness.vision_model import save_vision_model
from tests.harness.waiting import until
from tests.trainers.stack import ROOT, TrainerStack, save_policy, spawn_trainer, venv

pytestmark = [pytest.mark.engine, pytest.mark.trainers, pytest.mark.timeout(600)]

PROGRAM = "bench.trainers.trl_run"
# TRL's imports, and what a busy machine adds.
RUN_S = 240.0


@dataclass(frozen=True)
class TrlRun:
    """Output of one run."""

    steps: list[dict[str, Any]]
    end: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "TrlRun":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return cls([each for each in lines if "step" in each], lines[-1])

    @property
    def versions(self) -> list[int]:
        """That it published, each of which was served before its next step."""
        return [each["version"] for each in self.end["receipts"]]

    @property
    def mismatch(self) -> float:
        """Mean difference of the trainer's logprobs and the sampler's."""
        return mean(each["sampling/sampling_logp_difference/mean"] for each in self.steps)

    def learned(self) -> bool:
        """True if the reward of its last third is above that of its first."""
        rewards = [each["reward"] for each in self.steps]
        third = len(rewards) // 3
        return mean(rewards[-third:]) > mean(rewards[:third])


@pytest.fixture(scope="module")
def python() -> Path:
    return venv("trl")


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy, with a chat template that TRL knows."""
    (template,) = python.parents[1].glob("lib/*/site-packages/trl/chat_templates/qwen2_5.jinja")
    return save_policy(tmp_path_factory.mktemp("policy") / "model", template.read_text())


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStack]:
    with TrainerStack(tmp_path_factory.mktemp("stack"), model) as started:
        started.wait_ready()
        yield started


@contextmanager
def started(
    python: Path,
    stack: TrainerStack,
    folder: Path,
    mode: str,
    steps: int,
    *options: str,
    bucket: str = "",
) -> Iterator["subprocess.Popen[bytes]"]:
    """A training with a root of its own in `folder`; it is ended with the block."""
    words = [mode, f"--model={stack.model}", f"--steps={steps}", *options]
    words += [f"--folder={folder / 'saved'}", f"--out={folder / 'out'}"]
    environ = stack.environ(root=folder / "published", replicas=1, bucket=bucket)
    process = spawn_trainer(python, PROGRAM, *words, environ=environ, log=folder / "log")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finished(process: "subprocess.Popen[bytes]", folder: Path) -> TrlRun:
    """Return its result, once it has ended by itself."""
    code = process.wait(RUN_S)
    assert code == 0, (folder / "log").read_text()[-4_000:]
    return TrlRun.read(folder / "out")


def serves(stack: TrainerStack, version: int) -> bool:
    """Return True if a turn of exactly that version comes back."""
    with BlockingRolloutClient(stack.gateway, 30.0, job=stack.job) as client:
        turn = client.generate([1, 2], Sampling(max_tokens=2), exact_version=version)
        return {each for each, *_ in turn.versions} == {version}


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("server", 12),
        pytest.param("rollout", 12, marks=pytest.mark.nightly),
        pytest.param("callback", 12, marks=pytest.mark.nightly),
    ],
)
def test_grpo_learns_and_samples_what_it_trains(
    python: Path, stack: TrainerStack, tmp_path: Path, mode: str, steps: int
) -> None:
    bucket = f"{stack.buckets}/{mode}" if mode == "server" else ""
    with started(python, stack, tmp_path, mode, steps, bucket=bucket) as process:
        run = finished(process, tmp_path)
    first, *_, last = run.versions
    assert run.versions == list(range(first, first + steps + (mode == "callback")))
    assert serves(stack, last)
    assert run.learned(), [each["reward"] for each in run.steps]
    assert not bucket or Path(bucket.removeprefix("file://"), "catalog").is_file()
    if mode != "callback":
        # Without vLLM's mode TRL does not look at the sampler's.
        assert run.mismatch <= 0.01


def test_a_student_learns_the_likeliest_tokens_of_a_teacher(
    python: Path, stack: TrainerStack, tmp_path: Path
) -> None:
    with started(python, stack, tmp_path, "distill", 12) as process:
        run = finished(process, tmp_path)
    losses = [each["loss"] for each in run.steps]
    assert mean(losses[-4:]) < mean(losses[:4]) / 2, losses


@pytest.fixture(scope="module")
def seeing(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStack]:
    """A fleet of a model that takes images."""
    model = tmp_path_factory.mktemp("vision") / "model"
    save_vision_model(model, "bfloat16")
    with TrainerStack(tmp_path_factory.mktemp("seeing"), model) as started:
        started.wait_ready()
        yield started


def test_grpo_of_a_vision_language_model_trains_on_what_its_sampler_saw(
    python: Path, seeing: TrainerStack, tmp_path: Path
) -> None:
    with started(python, seeing, tmp_path, "vision", 4) as process:
        run = finished(process, tmp_path)
    first, *_, last = run.versions
    assert run.versions == list(range(first, first + 4))
    assert serves(seeing, last)
    # The sampler's bfloat16 alone is 0.03 for this random model, another image 2.5.
    assert run.mismatch <= 0.1


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStack]:
    """A fleet whose replica takes adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    with TrainerStack(folder, model, replica={"lora": {"max_rank": 8}}) as started:
        started.wait_ready()
        yield started


def test_grpo_with_peft_publishes_the_adapter_alone(
    python: Path, adapted: TrainerStack, tmp_path: Path
) -> None:
    with started(python, adapted, tmp_path, "lora", 12, "--rate=1e-2") as process:
        run = finished(process, tmp_path)
    first, *_, last = run.versions
    assert run.versions == list(range(first, first + 12))
    assert serves(adapted, last)
    assert run.learned(), [each["reward"] for each in run.steps]
    assert run.mismatch <= 0.01
    whole = sum(path.stat().st_size for path in adapted.model.glob("*.safetensors"))
    assert run.end["receipts"][0]["full_bytes"] < whole / 2
    assert max(each["served_s"] for each in run.end["receipts"][1:]) < 1.0


def test_async_grpo_learns_while_rollouts_go_on(
    python: Path, stack: TrainerStack, tmp_path: Path
) -> None:
    with started(python, stack, tmp_path, "async", 9, "--rate=3e-3") as process:
        run = finished(process, tmp_path)
    first, *_, last = run.versions
    assert run.versions == list(range(first, first + 10)), "one before the first step"
    assert serves(stack, last)
    assert run.learned(), [each["reward"] for each in run.steps]


@pytest.mark.nightly
def test_the_example_trains_on_a_game_of_several_turns(
    python: Path, stack: TrainerStack, tmp_path: Path
) -> None:
    example = [str(python), str(ROOT / "examples/trl_grpo.py"), str(stack.model), "20"]
    environ = stack.environ(root=tmp_path / "published") | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        example, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert re.findall(r"^step (\d+): won", done.stdout, re.M) == ["10", "20"]
    assert re.search(r"^version \d+ is served$", done.stdout, re.M)


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStack]:
    """A fleet of two replicas, of which one may go."""
    with TrainerStack(tmp_path_factory.mktemp("pair"), model, replicas=2) as started:
        started.wait_ready()
        yield started


def steps_done(folder: Path) -> int:
    out = folder / "out"
    return len(out.read_text().splitlines()) if out.exists() else 0


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["engine", "gateway", "scheduler"])
def test_training_goes_on_past_a_killed(
    python: Path, pair: TrainerStack, tmp_path: Path, killed: str
) -> None:
    pair.wait_ready()
    with started(python, pair, tmp_path, "server", 24) as process:
        until(lambda: steps_done(tmp_path) >= 6, RUN_S, "six steps", every_s=0.05)
        if killed == "engine":
            pair.kill_engine()
        else:
            pair.members[killed].kill()
            pair.members[killed].start()
        run = finished(process, tmp_path)
    assert [each["step"] for each in run.steps] == list(range(1, 25))
    first = run.versions[0]
    assert run.versions == list(range(first, first + 24))
    assert run.learned(), [each["reward"] for each in run.steps]


@pytest.mark.nightly
def test_a_killed_trainer_goes_on_from_its_checkpoint_and_its_version(
    python: Path, pair: TrainerStack, tmp_path: Path
) -> None:
    pair.wait_ready()
    with started(python, pair, tmp_path, "server", 16, "--save=2") as process:
        until(lambda: steps_done(tmp_path) >= 7, RUN_S, "seven steps", every_s=0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    (tmp_path / "out").unlink()
    with started(python, pair, tmp_path, "server", 16, "--save=2") as process:
        run = finished(process, tmp_path)
    assert run.end["resumed"]
    # From the newest checkpoint on, each step once.
    done = [each["step"] for each in run.steps]
    assert done == list(range(done[0], 17))
    assert before[-1]["step"] - 2 < done[0] <= before[-1]["step"] + 2
    assert run.versions[0] > len(before), "a version is never said twice"
    assert serves(pair, run.versions[-1])
