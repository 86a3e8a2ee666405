"""verl as it is released trains through ROSE: `examples/verl_grpo.sh` on real engines."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.trainers.verl_run import VerlRun
from rose.client.blocking import LoopThread
from tests.fakes.gateway import StandInGateway
from tests.harness.policies import trainer_environment
from tests.harness.vision_model import save_vision_model
from tests.harness.waiting import until
from tests.trainers.stack import ROOT, TrainerStack, save_policy, venv
from weight_transfer import ChunkStore, read_model_dir, restore

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1_200)]
RUN_S, GONE_S = 500.0, 60.0
# Mean difference of logprobs between sampler (bf16) and trainer (fp32), as probabilities.
MOST_MEAN = 0.01


@pytest.fixture
def python() -> Path:
    return venv("verl")


@pytest.fixture
def gateway() -> Iterator[StandInGateway]:
    """A gateway without replicas, on a loop of its own."""
    standin = StandInGateway()
    thread = LoopThread("standin-gateway")
    thread.call(standin.__aenter__())
    yield standin
    thread.call(standin.__aexit__())
    thread.stop()


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


def in_verls_loop(python: Path, what: str, model: Path, environ: dict[str, str]) -> dict[str, Any]:
    """Return what `verl_loop_main.py` found."""
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("verl_loop_main.py")), what, str(model)],
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_verls_trainer_replays_the_experts_of_each_position(python: Path, tmp_path: Path) -> None:
    model = save_policy(tmp_path / "model")
    found = in_verls_loop(python, "routes", model, trainer_environment(tmp_path))
    assert found["dtype"] == "torch.int16"
    assert found["replayed"] == [1.0, 1.0]
    assert max(found["native"]) < 0.8, "else this shows nothing"
    assert -1.0 < found["rollout/moe/max_vio/avg"] < 8.0, "verl counts them"


@pytest.mark.nightly
def test_images_of_verls_agent_loop_are_what_its_trainer_sees(python: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_vision_model(model, "float32")
    replica = {"dtype": "float32"}
    with TrainerStack(tmp_path / "stack", model, replica=replica) as stack:
        stack.wait_ready()
        found = in_verls_loop(python, "images", model, stack.environ())
    assert found["images"] == [1] * 4
    assert max(found["own"]) < 0.01
    assert min(found["another"]) > 0.1


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
def test_with_lora_the_adapter_alone_is_published(python: Path, tmp_path: Path) -> None:
    model = save_policy(tmp_path / "model")
    lora = ("lora_rank=8", "lora_alpha=16", "target_modules=all-linear")
    more = [f"actor_rollout_ref.model.{each}" for each in lora]
    with TrainerStack(tmp_path / "stack", model, replica={"lora": {"max_rank": 8}}) as stack:
        stack.wait_ready()
        with VerlRun(stack, python, tmp_path, *more, STEPS="3") as run:
            steps = run.finished(RUN_S)
        assert [*steps] == [1, 2, 3]
        for figures in steps.values():
            assert figures["training/rollout_probs_diff_mean"] <= MOST_MEAN
        assert versions(stack) == (2, 3, 4)
        store = ChunkStore(stack.settings().root)
        manifests = [store.get_manifest(version) for version in (2, 3, 4)]
        assert all(each.adapter is not None and each.adapter.r == 8 for each in manifests)
        assert all(each.changed for each in manifests)


@pytest.mark.nightly
def test_of_two_ranks_the_first_publishes_what_both_gather(
    python: Path, tmp_path: Path, gateway: StandInGateway
) -> None:
    model = save_policy(tmp_path / "model")
    two = (
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    )
    # A stand-in answers, always the same: no engine is needed.
    without_engines = {"ROSE_GATEWAY": gateway.url, "ROSE_REPLICAS": "0"}
    with (
        TrainerStack(tmp_path / "stack", model, replicas=0) as stack,
        VerlRun(stack, python, tmp_path, *two, STEPS="2", **without_engines) as run,
    ):
        steps = run.finished(RUN_S)
        assert [*steps] == [1, 2]
        assert versions(stack) == (1, 2, 3)
        # Equal answers have no advantage: what two ranks gather is the checkpoint, bit for bit.
        store = ChunkStore(stack.settings().root)
        assert [store.get_manifest(version).changed for version in (1, 2, 3)] == [0, 0, 0]
        base = read_model_dir(model)
        assert restore(store, 3, base).keys() == base.keys()
        assert {asked["job"] for asked in gateway.asked} == {stack.job}
        assert {asked.get("min_version") for asked in gateway.asked} == {1, 2}


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["engine", "gateway", "scheduler"])
def test_training_goes_on_past_a_killed(
    python: Path, fleet: TrainerStack, tmp_path: Path, killed: str
) -> None:
    with VerlRun(fleet, python, tmp_path, STEPS="6") as run:
        run.until(lambda: 2 in run.steps, RUN_S, "a second step")
        if killed == "engine":
            fleet.kill_engine()
        else:
            fleet.members[killed].kill()
            fleet.members[killed].start()
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
    # The restored version, and one after each step.
    assert versions(fleet)[-1] == before + 1 + len(steps)
