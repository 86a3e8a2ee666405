"""The demo's controls are the demo's: nothing that an operator writes makes a replica lie."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.demo.cli import Control, DemoSettings
from bench.demo.faulty_node import FaultyNodeConfig
from bench.demo.faulty_worker import StaleWorker, WrongChunkWorker, permuted
from bench.demo.report.records import RunLayout
from bench.demo.stack import Ports, Stack
from rose.engines import process_spec
from rose.errors import ConfigError
from rose.node import NodeConfig
from weight_transfer import Change, SigningKey
from weight_transfer.apply.receiver import StagedTensor, StagedUpdate
from weight_transfer.vllm.worker import WeightWorker


def serving_node(folder: Path, control: Control | None) -> Path:
    settings = DemoSettings(out=folder, control=control)
    stack = Stack(settings, RunLayout(folder), Ports.from_base(18_000), folder, folder)
    path = folder / "node.json"
    key = SigningKey.generate().verify_key.hex
    path.write_text(json.dumps(stack.serving_node(folder / "page", key)))
    return path


@pytest.mark.parametrize(
    ("control", "worker"), [("stale-guest", StaleWorker), ("wrong-chunk", WrongChunkWorker)]
)
def test_a_faulty_worker_reaches_the_guests_engine_and_no_product_takes_it(
    tmp_path: Path, control: Any, worker: type[WeightWorker]
) -> None:
    path = serving_node(tmp_path, control)
    node = FaultyNodeConfig.load(path)
    spec = node.replicas[0].engine_spec(node)
    given = [arg for arg in process_spec(spec).argv if arg.startswith("--worker-extension-cls=")]
    assert given[-1] == f"--worker-extension-cls={worker.__module__}.{worker.__qualname__}"
    with pytest.raises(ConfigError, match="worker"):
        NodeConfig.load(path)


def test_without_such_a_control_the_guest_is_one_of_the_product(tmp_path: Path) -> None:
    for control in (None, "corrupt-chunk", "naive"):
        assert NodeConfig.load(serving_node(tmp_path, control)).replicas[0].id == "guest"


def test_permuted_values_are_those_of_the_most_changed_tensor_alone() -> None:
    def staged(name: str, count: int) -> StagedTensor:
        values = np.arange(count, dtype=np.uint16)
        return StagedTensor(name, Change(np.arange(count), values, values), 0)

    few, many = staged("few", 2), staged("many", 5)
    [kept, moved] = permuted(StagedUpdate(2, 1, (few, many), 10)).tensors
    assert kept is few
    assert moved.change.new.tolist() == [3, 4, 0, 1, 2]
    assert moved.change.indices is many.change.indices
    nothing = StagedUpdate(2, 1, (), 0)
    assert permuted(nothing) is nothing
