"""`rose doctor`: every ailment is one plain line that says what to do; it never faints."""

import asyncio
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor import ControlPage, HostState, Veto
from executor.control_page.host_description import HostDescription
from rose.addresses import free_port
from rose.cli.machine.doctor import (
    Diagnosis,
    Severity,
    _proxy,
    check_memory,
    checked,
    diagnose,
    host_checks,
)
from rose.cli.main import main as rose
from rose.engines import EngineKind
from rose.engines.launch import BrokenPlugin, broken_plugins
from tests.unit.node.host.found_hosts import FolderHost
from tests.unit.node.node_bench import NodeBench


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NodeBench]:
    monkeypatch.setattr("rose.cli.machine.doctor.SCHEDULER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("rose.cli.machine.doctor.check_memory", lambda *_: None)
    # The real ones take seconds to import each time.
    monkeypatch.setattr("rose.cli.machine.doctor.broken_plugins", lambda *_: [])
    bench = NodeBench(tmp_path, "guest")
    for name in ("run", "logs"):
        (tmp_path / name).mkdir(exist_ok=True)
    await bench.start()
    yield bench
    await bench.close()


async def findings(bench: NodeBench) -> dict[str, Diagnosis]:
    return {f.subject: f for f in await asyncio.to_thread(lambda: list(diagnose(bench.config)))}


async def wrongs(bench: NodeBench) -> dict[str, str]:
    found = (await findings(bench)).values()
    assert all(finding.do for finding in found if finding.level is not Severity.OK)
    return {f.subject: str(f) for f in found if f.level is Severity.WRONG}


async def test_a_node_without_a_daemon_is_well_but_for_that(bench: NodeBench) -> None:
    assert await wrongs(bench) == {}
    found = await findings(bench)
    assert found["daemon"].level is Severity.NOTE
    assert {"page", "host", "scheduler", "r0", "placement", "clock", "disk"} <= found.keys()


async def test_whether_gateways_of_other_machines_reach_its_replicas_is_said(
    bench: NodeBench,
) -> None:
    assert "on this machine" in _proxy(bench.config).what
    bench.settings["scheduler"] = "127.0.0.1:1,scheduler-0.rose:7400"
    found = _proxy(bench.config)
    assert found.level is Severity.NOTE
    assert "do not reach" in found.what
    bench.settings["proxy"] = {"host": "127.0.0.1", "port": free_port()}
    assert _proxy(bench.config).level is Severity.OK


async def test_a_node_at_work_is_well(bench: NodeBench) -> None:
    bench.spawn()
    await bench.until_noted("lease_taken")
    assert await wrongs(bench) == {}
    found = await findings(bench)
    assert found["grant heartbeat"].what == "run: leased (a job has leased it)"
    assert found["r0"].what.startswith("runs on port")


async def test_a_stopped_daemon_is_named(bench: NodeBench) -> None:
    daemon = bench.spawn()
    await bench.until_noted("lease_taken")
    daemon.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.2)
    assert "silent for" in (await wrongs(bench))["grant heartbeat"]


async def test_everything_that_can_be_wrong_is(bench: NodeBench) -> None:
    await bench.server.stop(0)
    bench.config.kill_file.touch()
    bench.host.tell(running=1, heartbeat_ns=time.monotonic_ns() - 10**11)
    settings = bench.settings
    settings["host"]["pid"] = 2**22 + 1
    settings["cgroup"] = str(bench.folder / "no-cgroup")
    settings["receiver"] = {"disk_bytes": 1 << 60}
    settings["metrics_port"] = free_port()
    settings["proxy"] = {"host": "127.0.0.1", "port": free_port()}
    taken = settings["replicas"][0]["port"], settings["metrics_port"], settings["proxy"]["port"]
    with ExitStack() as stack:
        for port in taken:
            busy = stack.enter_context(socket.socket())
            busy.bind(("127.0.0.1", port))
            busy.listen()
        found = await wrongs(bench)
    for subject, hint in {
        "host": "start the host",
        "host heartbeat": "silent for 100 s",
        "kill switch": "rose unkill",
        "scheduler": "start `rose scheduler`",
        "r0": "choose another port",
        "metrics": "choose another port",
        "proxy": "choose another port",
        "placement": "delegate a cgroup v2 folder",
        "disk": "lower `receiver.disk_bytes`",
    }.items():
        assert hint in found[subject], found


@pytest.mark.parametrize(
    ("offset", "raw", "hint"),
    [
        (8, struct.pack("=I", 99), "run the same ROSE version"),
        (0, b"SOMETHNG", "choose another path"),
        (32, b"another boot id!", "delete it"),
    ],
)
async def test_a_page_that_is_not_ours_is_named(
    bench: NodeBench, offset: int, raw: bytes, hint: str
) -> None:
    fd = os.open(bench.page.path, os.O_RDWR)
    os.pwrite(fd, raw, offset)
    os.close(fd)
    assert hint in (await wrongs(bench))["page"]


async def test_a_model_that_is_missing_or_does_not_fit_is_named(
    bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.cli.machine.doctor.check_memory", check_memory)
    bench.settings["replicas"][0]["kv_bytes"] = 1 << 50
    assert "GiB of free memory" in (await wrongs(bench))["r0"]
    bench.settings["replicas"][0]["model_dir"] = str(bench.folder / "nowhere")
    assert "Hugging Face" in (await wrongs(bench))["r0"]


def installed(folder: Path, name: str, plugin: str, target: str) -> None:
    """Leave in a folder what an installation of a plugin of vLLM's does."""
    info = folder / f"{name}.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin} = {target}\n")


def test_plugins_that_an_interpreter_cannot_import_are_told_from_those_that_it_can(
    tmp_path: Path,
) -> None:
    installed(tmp_path, "stale", "gone", "a_module.that_is_gone:register")
    installed(tmp_path, "partly", "renamed", "its_plugin:was_renamed")
    installed(tmp_path, "noisy", "well", "its_plugin:register")
    (tmp_path / "its_plugin.py").write_text("def register(): 1 / 0\nprint('loaded')\n")
    # One without vLLM and ROSE: to import their plugins takes seconds.
    python = str(Path(sys.base_prefix, "bin", "python3"))
    found = broken_plugins(python, {"PYTHONPATH": str(tmp_path)})
    mine = {each.distribution: each for each in found if each.folder == str(tmp_path)}
    assert mine.keys() == {"stale", "partly"}
    assert mine["stale"] == BrokenPlugin(
        "gone",
        "a_module.that_is_gone",
        "stale",
        str(tmp_path),
        "ModuleNotFoundError: No module named 'a_module'",
    )
    assert mine["partly"].why.startswith("AttributeError: ")


async def test_a_plugin_that_does_not_load_is_named_with_who_brought_it(
    bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await findings(bench))["plugins"].level is Severity.OK
    broken = BrokenPlugin("gone", "a.module", "stale-dist", "/site", "ImportError: no")
    monkeypatch.setattr("rose.cli.machine.doctor.broken_plugins", lambda *_: [broken, broken])
    line = (await wrongs(bench))["plugins"]
    assert "stale-dist names the plugin gone of vLLM, and a.module cannot be imported" in line
    assert ", and 1 more; install stale-dist again" in line
    assert line.endswith("delete its stale *.egg-info in /site")


def test_a_check_that_breaks_is_a_finding() -> None:
    def breaks() -> Diagnosis:
        raise OSError(5, "Input/output error")

    assert "cannot be checked (OSError" in str(checked("disk", breaks))


@pytest.mark.parametrize("text", [None, "{", '{"node": 1}', "\x00", "\udcff"])
def test_a_file_that_cannot_be_used_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = tmp_path / "node.json"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    assert rose(["doctor", "--config", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


async def test_exit_codes_and_the_last_line(
    bench: NodeBench, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bench.folder / "node.json"
    path.write_text(json.dumps(bench.settings))
    argv = ["doctor", "--config", str(path)]
    assert await asyncio.to_thread(rose, argv) == 0
    assert capsys.readouterr().out.endswith(" checks, 0 wrong\n")
    bench.config.kill_file.touch()
    assert await asyncio.to_thread(rose, argv) == 1
    out = capsys.readouterr().out
    assert "WRONG  kill switch: " in out
    assert "Traceback" not in out


async def test_a_run_folder_on_a_disk_is_named(
    bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "kill switch" not in await wrongs(bench)
    monkeypatch.setattr("rose.cli.machine.doctor.on_disk", lambda folder: True)
    assert "put run_dir beside the page" in (await wrongs(bench))["kill switch"]


async def test_a_page_without_a_host_and_one_with_an_unpublished_engine_are_named(
    bench: NodeBench,
) -> None:
    assert "for uid" in (await findings(bench))["page"].what
    veto = Veto(bench.page.path)
    veto.renew()
    assert "cannot publish" in (await wrongs(bench))["host seat"]
    veto.close()
    bench.host.close()
    found = await wrongs(bench)
    assert "no process publishes" in found["host seat"]
    assert "start it again if the page was deleted" in found["host seat"]
    assert "VLLM_PLUGINS, where it is set, names rose_host" in found["host seat"]


@pytest.mark.parametrize(
    ("said", "level", "what"),
    [
        (("vLLM 0.32.0", "tested", ()), Severity.OK, "vLLM 0.32.0 is tested"),
        (("vLLM 0.33.0", "probed", ()), Severity.NOTE, "vLLM 0.33.0 is probed"),
        (("vLLM 0.32.0", "tested", ("lending: x",)), Severity.NOTE, "is tested; lending: x"),
        (("", "", ()), None, ""),
    ],
)
async def test_the_support_of_the_hosts_engine_is_said(
    bench: NodeBench, said: tuple[Any, ...], level: Severity | None, what: str
) -> None:
    described = HostDescription("m", 0.5, 0.1, (), bench.host.seat.taken_ns, *said)
    described.write(bench.page.path)
    found = (await findings(bench)).get("host engine")
    assert (found and found.level) is level
    assert what in str(found)
    replace(described, seated_ns=1).write(bench.page.path)
    assert "host engine" not in await findings(bench), "of an earlier life"


async def test_a_host_that_lacks_an_engine_core_is_named(bench: NodeBench) -> None:
    bench.host.close()
    seat = bench.page.take_host(core=0, cores=2)
    assert "engine core 1 of 2 does not publish" in (await wrongs(bench))["host seat"]
    other = bench.page.take_host(core=1, cores=2)
    for each in (seat, other):
        # Alone, since other checks may wait for a core until the heartbeats are old.
        each.write(HostState())
        each.beat()
    assert bench.config.host is not None
    found = {f.subject: f for f in host_checks(bench.config.host, daemon_runs=False)}
    assert {found["host seat"].level, found["host heartbeat"].level} == {Severity.OK}
    for each in (seat, other):
        each.close()


async def test_advice_is_that_of_the_hosts_engine(bench: NodeBench) -> None:
    host = bench.config.host
    assert host is not None
    sglang = host.model_copy(update={"engine": EngineKind.SGLANG})
    config = bench.config.model_copy(update={"host": sglang})
    bench.host.close()
    found = {f.subject: f for f in await asyncio.to_thread(lambda: list(diagnose(config)))}
    assert "SGLANG_PLUGINS" in str(found["host seat"])


async def test_a_host_that_another_process_started_is_named(bench: NodeBench) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "60")
    bench.settings["host"]["pid"] = other.pid
    found = await wrongs(bench)
    other.kill()
    await other.wait()
    assert "host_foreign" in found["host seat"]


async def test_hosts_in_a_folder_are_looked_at_one_by_one(bench: NodeBench, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    bench.settings.pop("host")
    bench.settings["discover"] = {"folder": str(folder)}
    assert (await findings(bench))["hosts"].level is Severity.NOTE, "none is there"
    hosts = [FolderHost(folder, name) for name in ("a", "b")]
    with ControlPage.create(folder / "c.page") as page:
        seat = page.take_host()
        said = await wrongs(bench)
        assert "ROSE_HOST_DIR" in said["host 'c'"], "it describes itself nowhere"
        seat.close()
    found = await findings(bench)
    assert found["a host seat"].level is found["b clock"].level is Severity.OK
    assert not {"host", "a host", "r0"} & found.keys()
    bench.settings["replicas"][0]["device"] = "host"
    assert "names no GPU" in (await wrongs(bench))["a guest"]
    for host in hosts:
        host.close()
