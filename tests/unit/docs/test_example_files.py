"""The examples are what the product takes, and fit each other."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import yaml

from elastic_scheduler.capacity import PolicyMode, docs_table, effective, policies_of
from executor.engine_settings import EngineSettings
from rose.cli.machine.init import examples
from rose.client import RolloutClient
from rose.errors import ConfigError
from rose.integrations import TrainerSettings
from rose.integrations.settings import PREFIX
from rose.node.config import HostConfig, NodeConfig
from rose.weight_distribution import Begun, WeightPublisher
from weight_transfer import SigningKey, TensorBits

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SETTINGS = {PREFIX + field.name.upper() for field in fields(TrainerSettings)}
# A command which notes how it was called, and ends when all calls of it are noted.
SAYS = f"""#!{sys.executable}
import json, os, pathlib, sys, time
called = pathlib.Path("called")
with called.open("a") as file:
    file.write(json.dumps([sys.argv, dict(os.environ)]) + "\\n")
late_s = time.monotonic() + 20
while called.read_text().count("\\n") < CALLS and time.monotonic() < late_s:
    time.sleep(0.01)
"""


def called(
    folder: Path, script: str, command: str, *args: str, calls: int = 1
) -> list[tuple[list[str], dict[str, str]]]:
    """Run a script with `command` replaced; return the arguments and environment of each call."""
    stand_in = folder / "bin" / command
    stand_in.parent.mkdir()
    stand_in.write_text(SAYS.replace("CALLS", str(calls)))
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [EXAMPLES / script, *args],
        cwd=folder,
        env=os.environ | {"PATH": path},
        check=False,
        timeout=30,
    )
    lines = (folder / "called").read_text().splitlines()
    return [(argv[1:], env) for argv, env in map(json.loads, lines)]


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nodes' files with the key that their reader puts there."""
    folder = tmp_path_factory.mktemp("keyed")
    for name in ("node.json", "node-discover.json"):
        config = json.loads((EXAMPLES / name).read_text())
        config["verify_key"] = SigningKey.generate().verify_key.hex
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture
def node(keyed: Path) -> NodeConfig:
    return NodeConfig.load(keyed / "node.json")


@pytest.mark.parametrize("name", ["node.json", "node-discover.json"])
def test_a_node_refuses_the_placeholder_for_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"verify_key: .* is a placeholder"):
        NodeConfig.load(EXAMPLES / name)


def test_the_capacity_policies_are_what_a_scheduler_takes() -> None:
    policies = policies_of(json.loads((EXAMPLES / "capacity-policy.json").read_text()))
    assert [policy.name for policy in policies] == ["everywhere", "chat"]
    assert PolicyMode.ACTIVE not in [each.mode for each in policies], "nothing is lent unsaid"
    held = effective(policies, "serving-0", {"rose.dev/deployment": "chat"})
    assert held.decided_by["maxHarvest.compute"] == "chat"
    assert held.decided_by["reserve.kvHeadroom"] == "everywhere"


def test_the_table_of_policy_fields_is_current() -> None:
    page = (EXAMPLES.parent / "docs/capacity-policy.md").read_text(encoding="utf-8")
    table = page.partition("<!-- table -->")[2].partition("<!-- /table -->")[0].strip()
    assert table == docs_table(), "write what docs_table() returns between the two marks"


def test_files_that_rose_init_writes_are_its_own() -> None:
    for name, text in examples().items():
        assert (EXAMPLES / name).read_text() == text, "run scripts/examples"


@pytest.mark.parametrize(
    ("script", "module", "model"),
    [
        ("host.sh", "vllm.entrypoints.openai.api_server", "--model"),
        ("host-sglang.sh", "sglang.launch_server", "--model-path"),
    ],
)
def test_the_host_gets_an_environment_that_its_plugin_takes(
    tmp_path: Path, script: str, module: str, model: str, node: NodeConfig
) -> None:
    [(argv, environ)] = called(tmp_path, script, "python", "--port", "8002")
    assert argv[:2] == ["-m", module]
    assert argv[argv.index(model) + 1] == "models/host"
    assert argv[-2:] == ["--port", "8002"], "options of the caller come last"
    settings = EngineSettings.from_environ(environ)
    assert settings.role == "host"
    assert Path(settings.page_path) == tmp_path / node.host.page
    assert (settings.ttft_s, settings.tpot_s) == (
        node.host.ttft_target_s,
        node.host.tpot_target_s,
    )


def test_a_node_takes_its_file(node: NodeConfig) -> None:
    [guest] = node.replicas
    assert guest.kind == "guest"
    assert guest.device == node.host.device, "they share a GPU"


def test_a_node_that_finds_its_hosts_takes_its_file(keyed: Path) -> None:
    config = NodeConfig.load(keyed / "node-discover.json")
    host = HostConfig(page=Path("a.page"), name="a", device="GPU-0a")
    [guest] = config.with_host(host, 1).replicas
    assert (guest.id, guest.gpus, guest.port) == ("guest-1", ("GPU-0a",), 8101)


def test_scheduler_and_gateway_take_their_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rose.cli.main import main

    calls = {argv[0]: argv for argv, _ in called(tmp_path, "gateway.sh", "rose", calls=2)}
    assert set(calls) == {"scheduler", "gateway"}
    for argv in calls.values():
        with pytest.raises(SystemExit) as ended:
            main([argv[0], "--help"])
        assert ended.value.code == 0
        offered = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert {word for word in argv if word.startswith("--")} <= offered


def test_all_of_them_mean_the_same_scheduler_and_gateway(node: NodeConfig) -> None:
    gateway = (EXAMPLES / "gateway.sh").read_text()
    trainer = (EXAMPLES / "trainer.py").read_text()
    scheduler_port = node.scheduler.rpartition(":")[2]
    assert f"--port {scheduler_port}" in gateway
    assert f"--scheduler {node.scheduler}" in gateway
    assert f'"{node.scheduler}"' in trainer
    [gateway_port] = re.findall(r"http://127\.0\.0\.1:(\d+)", trainer)
    assert f"--port {gateway_port}" in gateway


def test_the_trainers_step_changes_weights_and_leaves_the_old_ones_alone() -> None:
    step = runpy.run_path(str(EXAMPLES / "trainer.py"), run_name="example")["optimizer_step"]
    old = {"w": TensorBits("w", "bfloat16", (20, 10), np.zeros(200, np.uint16))}
    new = step(old)
    assert old["w"].bits.sum() == 0
    assert new["w"].bits.sum() == 100


@pytest.mark.parametrize(
    ("begun", "first"), [(Begun(0), 0), (Begun(4, resumed=4), 4), (Begun(7), 8)]
)
async def test_the_trainer_asks_for_each_version_that_it_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: Begun, first: int
) -> None:
    train = runpy.run_path(str(EXAMPLES / "trainer.py"), run_name="example")["train"]
    # They take no arguments that the real ones do not.
    client, publisher = create_autospec(RolloutClient), create_autospec(WeightPublisher)
    weights = {"w": TensorBits("w", "bfloat16", (20, 10), np.zeros(200, np.uint16))}
    publisher.return_value.begun = begun
    publisher.return_value.restore.return_value = weights
    for name, stand_in in {
        "RolloutClient": client,
        "WeightPublisher": publisher,
        "read_model_dir": lambda _: weights,
    }.items():
        monkeypatch.setitem(train.__globals__, name, stand_in)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    SigningKey.generate().save(tmp_path / "run/trainer.key")
    await train(Path("models/policy"))
    turns = client.return_value.__aenter__.return_value.generate.await_args_list
    published = publisher.return_value.publish.await_args_list
    asked = [first, first + 1, first + 2]
    assert [turn.kwargs["min_version"] for turn in turns] == asked
    assert [call.args[:2] for call in published] == [(version + 1, version) for version in asked]
    assert publisher.return_value.publish_anew.await_count == (first == 8)
    assert published[0].args[3] is published[1].args[2], "each step begins where the last ended"


# ---- the job of Ray, which Kueue starts ----


@pytest.fixture
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / "ray_job.yaml").read_text())
    return loaded


def test_the_ray_job_is_one_that_kueue_starts_and_kuberay_ends(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert job["spec"]["suspend"]
    assert job["spec"]["shutdownAfterJobFinishes"]
    for file in re.findall(r"examples/\S+", job["spec"]["entrypoint"]):
        assert (EXAMPLES.parent / file).is_file()


def test_the_ray_job_tells_the_trainer_settings_that_exist(job: dict[str, Any]) -> None:
    environ = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    names = {*environ, *(each["name"] for each in worker["env"])}
    assert {name for name in names if name.startswith(PREFIX)} <= SETTINGS
    TrainerSettings.from_env(
        environ, checkpoint=EXAMPLES, replicas=int(environ["ROSE_REPLICAS"]), host="10.0.0.1"
    )
    mounts = {mount["name"] for mount in worker["volumeMounts"]}
    assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_the_pool_and_the_trainer_fit_the_gpus_of_the_ray_job(job: dict[str, Any]) -> None:
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * int(worker["resources"]["limits"]["nvidia.com/gpu"])
    entrypoint = job["spec"]["entrypoint"]
    replicas = int(entrypoint.split()[2])
    of_trainer = [int(n) for n in re.findall(r"trainer\.n\w+=(\d+)", entrypoint)]
    assert replicas + of_trainer[0] * of_trainer[1] <= gpus
