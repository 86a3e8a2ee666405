"""The trainer's protocol, from the first evaluation to the last count, without engines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.models import new_policy, save_model
from bench.demo.report.records import StepRow, TrajectoryRecord, TurnRecord
from bench.demo.training.main import DemoTrainer, TrainConfig, publish_model
from rose.weight_distribution import Receipt
from tests.fakes.policy import StandInSource
from weight_transfer import TensorBits

STEPS = 3


class FakePublisher:
    """Publishes nowhere; the stand-in source then stamps the new version."""

    def __init__(self, source: StandInSource) -> None:
        self._source = source
        self.published: list[tuple[int, int]] = []
        self.bases: list[int] = []

    async def publish_base(self, version: int, tensors: Mapping[str, TensorBits]) -> None:
        assert tensors
        self.bases.append(version)

    async def publish(
        self,
        version: int,
        parent: int,
        old: Mapping[str, TensorBits],
        new: Mapping[str, TensorBits],
    ) -> Receipt:
        assert old.keys() == new.keys()
        self.published.append((version, parent))
        self._source.version = version
        return Receipt(version, 1, 2, 0.5, 0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_model(new_policy(0), folder, vocab.WORDS)
    return folder


def _config(model_dir: Path, out: Path) -> TrainConfig:
    return TrainConfig(
        model_dir=model_dir,
        gateway_url="http://127.0.0.1:1",
        scheduler="127.0.0.1:1",
        out=out,
        publish_root=out / "published",
        publish_port=0,
        key=out / "key",
        steps=STEPS,
        streams=3,
        groups=2,
        group_size=2,
        held_out_maps=4,
    )


def _trainer(
    model_dir: Path, out: Path, source: StandInSource
) -> tuple[DemoTrainer, FakePublisher, list[dict[str, Any]]]:
    publisher, events = FakePublisher(source), list[dict[str, Any]]()
    return DemoTrainer(_config(model_dir, out), source, publisher, events.append), publisher, events


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_run_speaks_the_protocol_and_accounts_for_everything(
    model_dir: Path, tmp_path: Path
) -> None:
    trainer, publisher, events = _trainer(model_dir, tmp_path, StandInSource())
    await trainer.run()
    assert [event["event"] for event in events] == ["eval", *["step"] * STEPS, "eval", "done"]
    assert [event["which"] for event in events if event["event"] == "eval"] == [
        "warm_start",
        "final",
    ]
    assert all(len(event["crossed"]) == event["n"] == 4 for event in (events[0], events[-2]))
    assert publisher.published == [(1, 0), (2, 1), (3, 2)]
    done = events[-1]
    assert (done["started"], done["delivered"], done["lost"], done["duplicated"]) == (12, 12, 0, 0)


async def test_a_run_that_shares_its_replicas_begins_with_its_model_as_version_1(
    model_dir: Path, tmp_path: Path
) -> None:
    """At version 0 no engine that has another job's weights could be updated to this job's."""
    changed = {"held_out_maps": 0, "shared": True}
    config = _config(model_dir, tmp_path).model_copy(update=changed)
    source = StandInSource()
    publisher = FakePublisher(source)
    await publish_model(publisher, config)
    await DemoTrainer(config, source, publisher, lambda event: None).run()
    assert publisher.bases == [0]
    assert publisher.published == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert min(oldest or 0 for _, oldest in source.asked) == 1
    assert all(turn["gap"]["dedicated"][1] == 3 for turn in _lines(tmp_path / "turns.jsonl"))
    first = _lines(tmp_path / "steps.jsonl")[0]
    assert (first["job"], first["step"], first["version"]) == ("frozen-lake", 0, 2)


async def test_records_are_those_of_the_report(model_dir: Path, tmp_path: Path) -> None:
    trainer, _, _ = _trainer(model_dir, tmp_path, StandInSource())
    await trainer.run()
    for name, schema, count in (
        ("steps", StepRow, STEPS),
        ("trajectories", TrajectoryRecord, 12),
    ):
        lines = _lines(tmp_path / f"{name}.jsonl")
        assert len(lines) == count
        assert set(lines[0]) == set(schema.__struct_fields__)
    turns = _lines(tmp_path / "turns.jsonl")
    assert set(turns[0]) == set(TurnRecord.__struct_fields__)
    assert all(turn["gap"]["dedicated"][1] == 3 and turn["unstamped"] == 0 for turn in turns)


async def test_a_lost_trajectory_is_counted_and_not_trained_on(
    model_dir: Path, tmp_path: Path
) -> None:
    source = StandInSource()
    source.fails.add("0.1")
    trainer, _, events = _trainer(model_dir, tmp_path, source)
    await trainer.run()
    assert events[1]["reward_n"] == 3
    assert events[-1]["lost"] == 1
    lost = [one for one in _lines(tmp_path / "trajectories.jsonl") if not one["delivered"]]
    assert [one["trajectory"] for one in lost] == ["0.1"]
