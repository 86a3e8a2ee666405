"""Engines of a demo: its node's file, and settings refused before anything starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.demo.cli import DemoSettings, Engine
from bench.demo.report.records import RunLayout
from bench.demo.stack import Ports, Stack
from rose.engines import EngineKind
from rose.node.config import NodeConfig
from weight_transfer import SigningKey

PYTHON = Path(sys.executable)


def settings(folder: Path, **given: Any) -> DemoSettings:
    return DemoSettings(out=folder, sglang_python=PYTHON, **given)


@pytest.mark.parametrize("host", ["vllm", "sglang"])
@pytest.mark.parametrize("guest", ["vllm", "sglang"])
def test_any_host_has_any_guest_beside_it(tmp_path: Path, host: Engine, guest: Engine) -> None:
    run = settings(tmp_path, host=host, guest=guest)
    stack = Stack(run, RunLayout(tmp_path), Ports.from_base(18_000), tmp_path, tmp_path)
    path = tmp_path / "node.json"
    key = SigningKey.generate().verify_key.hex
    path.write_text(json.dumps(stack.serving_node(tmp_path / "page", key)))
    config = NodeConfig.load(path)
    assert config.host is not None
    assert config.host.engine is EngineKind(host)
    (replica,) = config.replicas
    assert replica.engine is EngineKind(guest)
    assert (replica.engine_python is None) is (guest == "vllm")
    assert stack.host_spec(tmp_path / "page").engine is EngineKind(host)
