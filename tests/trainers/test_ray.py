"""A dedicated pool on Ray: actors whose nodes come back when they are killed, and leave nothing."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.trainers.verl_run import RAY_ON_LOOPBACK
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import Role
from tests.harness.processes import left_behind
from tests.harness.waiting import until
from tests.trainers.stack import ROOT, TrainerStack, save_policy, venv
from weight_transfer import SigningKey

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]
MAIN = Path(__file__).with_name("ray_pool_main.py")
RUN, RUN_S, GONE_S = "ROSE_TEST_RUN", 600.0, 60.0


@pytest.fixture
def python() -> Path:
    return venv("verl")


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Ray puts sockets there, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run(
    python: Path, environ: dict[str, str], node: dict[str, Any], replica: dict[str, Any], *argv: str
) -> dict[str, Any]:
    """Return the program's output by name, and assert that nothing it started is left."""
    name = uuid.uuid4().hex
    told = {RUN: name, **RAY_ON_LOOPBACK}
    arguments = json.dumps(node), json.dumps(replica), *argv
    done = subprocess.run(
        [str(python), str(MAIN), *arguments],
        env={**environ, **told, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6_000:]
    until(lambda: not left_behind(RUN, name), GONE_S, "an end of all that Ray started")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {key: value for line in lines for key, value in line.items()}


def test_a_killed_actor_or_node_comes_back_and_a_drained_pool_leaves_nothing(
    python: Path, ray_folder: Path, tmp_path: Path
) -> None:
    model = save_policy(tmp_path / "model")
    # An engine that never gets anywhere: these are lives of nodes.
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexec sleep 600\n")
    engine.chmod(0o755)
    node = {
        "scheduler": "127.0.0.1:9",
        "run_dir": str(tmp_path / "run"),
        "log_dir": str(tmp_path / "log"),
        "verify_key": SigningKey.generate().verify_key.hex,
    }
    replica = {"model_dir": str(model), "engine_python": str(engine)}
    said = run(python, dict(os.environ), node, replica, str(ray_folder), "lifecycle")
    assert said["listens"] == [True], "Ray is reached from this machine alone"
    assert "prot" in said["refused"]
    assert said["names"] == ["rose-0", "rose-1"]
    assert said["restarted"] == [True, True]
    assert "no room for 38 times" in said["full"]
    assert said["after_full"] == 2
    assert said["scaled"] == ["rose-0"]
    assert said["free"]


def test_a_gateway_reaches_a_replica_through_its_nodes_proxy_and_nobody_else_does(
    python: Path, ray_folder: Path, tmp_path: Path
) -> None:
    ca = DevelopmentCa.make(tmp_path / "ca", "c")
    own, gateway = ca.issue(Role.NODE, "rose-0"), ca.issue(Role.GATEWAY, "gateway-0")
    node = {
        "scheduler": "127.0.0.1:9",
        "run_dir": str(tmp_path / "run"),
        "log_dir": str(tmp_path / "log"),
        "verify_key": SigningKey.generate().verify_key.hex,
        "certificates": {
            "ca": str(ca.file),
            "certificate": str(own.certificate).replace("rose-0", "{node}"),
            "key": str(own.key).replace("rose-0", "{node}"),
        },
    }
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexec sleep 600\n")
    engine.chmod(0o755)
    replica = {"model_dir": str(save_policy(tmp_path / "model")), "engine_python": str(engine)}
    files = [str(path) for path in (ca.file, gateway.certificate, gateway.key)]
    said = run(python, dict(os.environ), node, replica, str(ray_folder), "proxied", *files)
    # Its engine never comes up, and the proxy says so to who may ask.
    assert said["gateway"] == 503
    assert said["stranger"] is None


@pytest.mark.nightly
def test_trainer_actors_are_handed_publisher_and_client_and_outlive_a_killed_replica(
    python: Path, ray_folder: Path, tmp_path: Path
) -> None:
    model = save_policy(tmp_path / "model")
    with TrainerStack(tmp_path / "stack", model, replicas=0) as stack:
        node = {
            "scheduler": stack.scheduler,
            "run_dir": str(tmp_path / "run"),
            "log_dir": str(tmp_path / "log"),
            "verify_key": SigningKey.load(stack.key).verify_key.hex,
        }
        replica = {
            "model_dir": str(model),
            "engine_python": sys.executable,
            "max_sequences": 8,
            "stream_interval": 4,
            "start_timeout_s": 300.0,
            "extra_env": {"PYTHONPATH": str(ROOT)},
        }
        said = run(python, stack.environ(), node, replica, str(ray_folder), "training")
    assert said["before"]["version"] == 1
    assert said["after"]["version"] == 2
    for step in (said["before"], said["after"]):
        assert step["tokens"] == 4
        assert {span[0] for span in step["turn"]} == {step["version"]}


def test_a_sweep_on_ray_finds_what_processes_find(python: Path, tmp_path: Path) -> None:
    asked = ["frozen_lake-8b", "--scale=0.125", "--steps=1", "--vary=slack_share=0,0.5"]
    found = []
    for name, where in (("ray", "--ray"), ("processes", "--workers=2")):
        out, told = tmp_path / f"{name}.json", {RUN: uuid.uuid4().hex, **RAY_ON_LOOPBACK}
        done = subprocess.run(
            [str(python), "-m", "rose.cli", "sim", "sweep", *asked, where, f"--out={out}"],
            env={**os.environ, **told, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-6_000:]
        until(lambda told=told: not left_behind(RUN, told[RUN]), GONE_S, "an end of all of Ray")
        found.append(json.loads(out.read_text()))
    assert found[0] == found[1]
