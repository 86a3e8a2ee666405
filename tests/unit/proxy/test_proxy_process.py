"""The proxy's process beside a daemon: it says when it listens, and its end is no secret."""

import asyncio
from pathlib import Path

import psutil
import pytest

from rose.addresses import free_port
from rose.errors import UnavailableError
from rose.node import NodeConfig
from rose.node.proxy_process import ProxyProcess, proxied_ports, proxy_spec
from rose.security import Role
from tests.harness.certificates import Certificates
from tests.harness.waiting import PATIENCE_S


def node(folder: Path, port: int, **more: object) -> NodeConfig:
    replica = {"id": "d=0", "kind": "dedicated", "model_dir": "m", "port": 9_000}
    said = {
        "node": "n0",
        "scheduler": "127.0.0.1:1",
        "run_dir": folder,
        "log_dir": folder,
        "unsigned": True,
        "replicas": [replica],
        "proxy": {"host": "127.0.0.1", "port": port},
    }
    return NodeConfig.model_validate(said | more)


async def test_it_says_when_it_listens_and_its_death_is_an_error_with_its_last_words(
    tmp_path: Path,
) -> None:
    said: list[bool] = []
    changed = asyncio.Event()
    proxy = ProxyProcess(node(tmp_path, free_port()), lambda: (said.append(True), changed.set()))
    running = asyncio.create_task(proxy.run())
    async with asyncio.timeout(PATIENCE_S):
        await changed.wait()
    assert proxy.listens
    children = psutil.Process().children()
    [process] = [each for each in children if "rose.proxy.main" in each.cmdline()]
    assert process.nice() >= 5, "behind the guard"
    process.kill()
    with pytest.raises(UnavailableError, match="listening on 127"):
        await running
    assert not proxy.listens
    assert len(said) == 2
    assert not process.is_running()


def test_names_ports_and_certificates_reach_its_command_line(tmp_path: Path) -> None:
    files = Certificates(tmp_path).of(Role.NODE, "n0")
    paths = dict(zip(("ca", "certificate", "key"), map(str, files.paths), strict=True))
    config = node(tmp_path, 7_410, certificates=paths)
    assert proxied_ports(config) == {"d=0": 9_000}
    argv = proxy_spec(config).argv
    assert "--replica=9000=d=0" in argv
    assert f"--key={paths['key']}" in argv
    assert "--insecure" not in argv
