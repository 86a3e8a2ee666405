"""From label to attached: vLLM without ROSE in its environment, started by a changed pod."""

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_model import save_tiny_model

from rose.addresses import free_port
from rose.cli.main import main
from rose.controller.host_webhook import PLUGIN_FOLDER, HostPods, answered
from rose.node import NodeConfig, NodeDaemon
from rose.node.discovery import look
from rose.operate.fleet import fleet_of
from rose.rpc import rose_pb2
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from tests.fakes.memory_store import InMemoryStore
from tests.harness.engine_image import engine_image, ran
from tests.harness.training_runs import RunCluster
from tests.harness.waiting import until
from tests.harness.weight_peers import KEY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_S, WITHIN_S = 480.0, 30.0
# Fields of the pod, by their paths.
FIELDS = {"metadata.namespace": "serving", "metadata.name": "chat-0"}
NAME = "serving.chat-0"
# One core, and few bytes, as all engines of tests.
SMALL = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
SCHEDULER = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config.scheduler import SchedulerConfig
print(SchedulerConfig.get_scheduler_cls.__wrapped__.__module__)
import executor.vllm.host.scheduler
print(executor.__file__)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_image(tmp_path_factory.mktemp("image"))


def changed(shared: Path, *args: str) -> dict[str, Any]:
    """The spec of a labelled pod, as the webhook's patch leaves it."""
    engine = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": [*args]}
    targets = {"rose.dev/slo-ttft-s": "0.5", "rose.dev/slo-tpot-s": "0.15"}
    pod = {"metadata": {"annotations": targets}, "spec": {"containers": [engine]}}
    settings = HostPods("rose", folder=str(shared), group=os.getgid())
    response = answered({"request": {"uid": "1", "object": pod}}, settings)["response"]
    patch = json.loads(base64.b64decode(response["patch"]))
    return pod["spec"] | {each["path"].removeprefix("/spec/"): each["value"] for each in patch}


def environment(spec: dict[str, Any], plugin: Path) -> dict[str, str]:
    """The environment of the container, after its init container has run; mounts are folders."""
    (init,) = spec["initContainers"]
    words = [word.replace(PLUGIN_FOLDER, str(plugin)) for word in init["command"]]
    assert words[0] == "rose"
    assert main(words[1:]) == 0
    env: dict[str, str] = {}
    for each in spec["containers"][0]["env"]:
        said = each.get("value") or FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
        # A value may name variables before it.
        env[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], said)
    return env | {"PYTHONPATH": env["PYTHONPATH"].replace(PLUGIN_FOLDER, str(plugin))}


async def attached(shared: Path, folder: Path) -> list[tuple[str, list[str]]]:
    """The nodes that a scheduler shows, with their hosts, once a node of this folder has joined."""
    cluster = RunCluster(folder / "cluster", InMemoryStore(), free_port(), KEY)
    async with cluster.scheduler(), make_channel(f"127.0.0.1:{cluster.port}") as channel:
        said = {
            "node": "n0",
            "scheduler": f"127.0.0.1:{cluster.port}",
            "run_dir": folder / "run-dir",
            "log_dir": folder / "logs",
            "discover": {"folder": shared, "page_group": str(os.getgid())},
            "replicas": [],
            "unsigned": True,
        }
        daemon = NodeDaemon(NodeConfig.model_validate(said))
        running = asyncio.create_task(daemon.run())

        async def hosts() -> list[tuple[str, list[str]]]:
            snapshot = await SchedulerStub(channel).Snapshot(rose_pb2.SnapshotRequest(), timeout=5)
            nodes = fleet_of(snapshot).nodes
            return [(each.name, [host.name for host in each.hosts]) for each in nodes if each.hosts]

        try:
            async with asyncio.timeout(WITHIN_S):
                while not (found := await hosts()):  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.1)
        finally:
            daemon.stop()
            await running
        return found


def test_vllms_own_loader_takes_the_plugin_from_the_folder(python: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    env = environment(changed(tmp_path), plugin)
    assert "No module named 'executor'" in ran(python, "import executor").stderr
    done = ran(python, SCHEDULER, **env, **SMALL)
    assert done.stdout.splitlines()[-2:] == [
        "vllm.config.scheduler",
        f"{plugin}/executor/__init__.py",
    ], done.stderr[-2000:]


def test_a_changed_pod_is_a_host_of_a_node_that_is_attached(python: Path, tmp_path: Path) -> None:
    shared, model, log = tmp_path / "run", tmp_path / "model", tmp_path / "engine.log"
    shared.mkdir()
    save_tiny_model(model, dtype="float32")
    words = f"--model={model} --port={free_port()} --host=127.0.0.1 --dtype=float32"
    words += f" --kv-cache-memory-bytes={64 << 20} --max-model-len=128 --skip-tokenizer-init"
    words += " --enforce-eager"
    spec = changed(shared, *words.split())
    env = environment(spec, tmp_path / "plugin")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **SMALL, **env}
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*command, *spec["containers"][0]["args"]],
            env=env,
            cwd=tmp_path,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        until(
            lambda: look(shared, str(os.getgid())).hosts or child.poll() is not None,
            START_S,
            "a node finds it",
            every_s=0.5,
        )
        assert child.poll() is None, log.read_text()[-3000:]
        (found,) = look(shared, str(os.getgid())).hosts.values()
        assert (found.name, found.said.ttft_s, found.said.tpot_s) == (NAME, 0.5, 0.15)
        assert found.said.model == str(model)
        assert found.said.engine.startswith("vLLM")
        assert asyncio.run(attached(shared, tmp_path)) == [("n0", [NAME])]
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
