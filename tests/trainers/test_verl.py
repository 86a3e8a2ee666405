"""verl as it is released trains through ROSE: `examples/verl_grpo.sh` on real engines."""

import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.bench.trainers.verl_run import VerlRun
from tests.awaited import until
from tests.trainers.stack import ROOT, TrainerStack, save_policy, venv
from weight_transfer import ChunkStore

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1_200)]
RUN_S, GONE_S = 500.0, 60.0
# Mean difference of logprobs between sampler (bf16) and trainer (fp32), as probabilities.
MOST_MEAN = 0.01


@pytest.fixture
def python() -> Path:
    return venv("verl")


@pytest.fixture
def fleet(python: Path, tmp_path: Path) -> Iterator[TrainerStack]:
    """Two replicas of a policy."""
    del python  # no engine is started where verl is not there
    with TrainerStack(tmp_path / "stack", save_policy(tmp_path / "model"), replicas=2) as stack:
        stack.wait_ready()
        yield stack


def checked(python: Path, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(python), "-m", "rose.integrations.verl"],
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0):
            return True
    except OSError:
        return False


def versions(stack: TrainerStack) -> tuple[int, ...]:
    """All that the job published and that is still there."""
    return ChunkStore(stack.settings().root).versions()


def test_the_self_check_finds_the_plugin_in_verls_registries_and_says_what_is_wrong(
    python: Path, tmp_path: Path
) -> None:
    with TrainerStack(tmp_path / "stack", save_policy(tmp_path / "model"), replicas=0) as stack:
        until(lambda: answers(f"{stack.gateway}/health"), GONE_S, "an answer of the gateway")
        found = checked(python, stack.environ())
        assert found.returncode == 0, found.stdout + found.stderr
        assert "RoseReplica, ServerAdapter, RoseCheckpointEngine" in found.stdout
        wrong = checked(python, {**stack.environ(), "ROSE_KEY": str(tmp_path / "none")})
    assert wrong.returncode == 2
    [line] = [line for line in wrong.stdout.splitlines() if line.startswith("WRONG")]
    assert "rose token key --out" in line


@pytest.mark.nightly
def test_sync_and_async_training_sample_from_the_weights_that_they_train(
    python: Path, fleet: TrainerStack, tmp_path: Path
) -> None:
    with VerlRun(fleet, python, tmp_path, STEPS="3") as run:
        steps = run.finished(RUN_S)
        assert [*steps] == [1, 2, 3]
        for figures in steps.values():
            assert figures["training/rollout_probs_diff_mean"] <= MOST_MEAN
            assert figures["training/off_policy/trajectory_staleness/max"] == 0
        until(lambda: not run.members(), GONE_S, "an end of Ray")
    # The weights that it began with, and one after each step.
    assert versions(fleet) == (1, 2, 3, 4)
    with VerlRun(fleet, python, tmp_path, STEPS="3", MODE="async") as run:
        steps = run.finished(RUN_S)
        assert [*steps] == [1, 2, 3]
        for figures in steps.values():
            assert figures["training/rollout_probs_diff_mean"] <= MOST_MEAN
        assert steps[3]["rose/version"] == 8
        until(lambda: not run.members(), GONE_S, "an end of Ray")


@pytest.mark.nightly
def test_training_goes_on_when_an_engine_is_killed(
    python: Path, fleet: TrainerStack, tmp_path: Path
) -> None:
    with VerlRun(fleet, python, tmp_path, STEPS="6") as run:
        run.until(lambda: 2 in run.steps, RUN_S, "a second step")
        fleet.kill_engine()
        steps = run.finished(RUN_S)
    assert [*steps] == [1, 2, 3, 4, 5, 6]
    assert versions(fleet)[-1] == 7


@pytest.mark.nightly
def test_a_killed_trainer_goes_on_from_its_checkpoint_and_its_version(
    python: Path, fleet: TrainerStack, tmp_path: Path
) -> None:
    saving = ("trainer.save_freq=1", "trainer.resume_mode=auto")
    with VerlRun(fleet, python, tmp_path, *saving, STEPS="20") as run:
        run.until(lambda: 3 in run.steps, RUN_S, "a third step")
        run.kill()
        assert not run.members()
    before = versions(fleet)[-1]
    assert before >= 3
    with VerlRun(fleet, python, tmp_path, *saving, STEPS="5") as run:
        steps = run.finished(RUN_S)
    assert min(steps) in (3, 4)
    assert max(steps) == 5
    # What it restored, and one after each step.
    assert versions(fleet)[-1] == before + 1 + len(steps)
