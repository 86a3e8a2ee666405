"""`rose doctor` on a GPU: a line each, which says what to do; nothing where there is none."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor import ControlPage
from rose.cli.machine.doctor import Diagnosis, Severity, gpu_checks
from rose.node import HostConfig, NodeConfig
from rose.node.guest import memory_gauges
from rose.node.guest.memory_gauges import Gpus
from rose.nvml import CardError, CardReader, Client
from tests.fakes.cuda.nvml import StandInReader, card, usage
from tests.harness.seated_host import SeatedHost
from tests.unit.node.node_bench import node_of_one

GIB = 1 << 30


def node(tmp_path: Path, **changes: Any) -> NodeConfig:
    host = HostConfig(page=tmp_path / "page", pid=os.getpid())
    return node_of_one(tmp_path, host, **{"id": "g0", "device": 0} | changes)


def found(config: NodeConfig, open_reader: Callable[[], CardReader]) -> dict[str, Diagnosis]:
    findings = list(gpu_checks(config, Gpus(open_reader)))
    for finding in findings:
        assert "\n" not in str(finding)
        assert finding.do or finding.level is Severity.OK
    return {finding.subject: finding for finding in findings}


def reader(*cards: Any, **looks: Any) -> StandInReader:
    return StandInReader(*(cards or (card(),)), looks=[usage(**looks)])


@pytest.fixture(autouse=True)
def no_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    return tmp_path / "mps"


@pytest.fixture
def equipped(tmp_path: Path) -> Path:
    """An interpreter that finds a package named as cuda-bindings is."""
    package = tmp_path / "cuda" / "bindings"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def test_a_card_that_is_well_is_all_ok(tmp_path: Path, equipped: Path) -> None:
    config = node(tmp_path, kv_backend="cuda", engine_python=str(equipped))
    told = found(config, reader)
    assert {finding.level for finding in told.values()} == {Severity.OK}
    assert told["gpu 0"].what == "Stand-in GPU, driver 580.00, CUDA 13.0, GPU-stand-in"
    assert told["gpu 0 load"].what == "140.0 of 141.0 GiB free"
    assert told["g0 mps"].what == "off"


def test_each_gpu_of_host_and_guest_is_looked_at(tmp_path: Path) -> None:
    cards = [card(index=index, uuid=f"GPU-{index}") for index in range(3)]
    host = {"page": tmp_path / "page", "devices": (0, 1, 2)}
    ranks = {"device": None, "devices": ("GPU-1", 2), "tensor_parallel": 2, "cores": (0, 1)}
    config = node(tmp_path, **ranks).model_copy(update={"host": HostConfig(**host)})
    told = found(config, lambda: reader(*cards))
    looked = [f"gpu {name}" for name in ("GPU-1", 2, 0, 1)]
    assert {"gpu", *looked, *(f"{name} load" for name in looked)} <= told.keys()
    assert told["g0 core"].what == (
        "it is pinned to core 0, 1: its launches wait for that core alone"
    )


def test_a_host_on_another_gpu_than_its_file_names_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: True)
    cards = [card(index=index, uuid=f"GPU-{index}") for index in range(2)]
    page = ControlPage.create(tmp_path / "page")
    seated = SeatedHost(page)
    seated.tell()
    host = HostConfig(page=page.path, device=0)
    config = node(tmp_path).model_copy(update={"host": host})
    busy = reader(*cards)
    busy.listed = (Client(os.getpid(), GIB),)
    finding = found(config, lambda: busy)["gpu"]
    assert finding.level is Severity.WRONG
    assert finding.what == (
        f"the host (process {os.getpid()}) computes on GPU 1 GPU-1, and 0 is named as its own"
    )
    seated.close()
    page.close()


def test_a_node_without_a_gpu_asks_no_driver(tmp_path: Path) -> None:
    def absent() -> CardReader:
        raise AssertionError("asked")

    assert found(node(tmp_path, device=None), absent) == {}


def no_driver() -> CardReader:
    raise CardError("no NVIDIA driver is here (libnvidia-ml.so.1 cannot be opened); run elsewhere")


@pytest.mark.parametrize(
    ("open_reader", "told"),
    [
        (no_driver, "no NVIDIA driver is here"),
        (lambda: reader(card(compute_mode="exclusive process")), "lets one process in"),
    ],
)
def test_a_card_that_cannot_be_used_is_wrong(
    tmp_path: Path, open_reader: Callable[[], CardReader], told: str
) -> None:
    all_of_it = found(node(tmp_path), open_reader)
    assert all_of_it["gpu"].level is Severity.WRONG
    assert told in str(all_of_it["gpu"])
    wrongs = [finding for finding in all_of_it.values() if finding.level is Severity.WRONG]
    assert len(wrongs) == 1, "said once"


@pytest.mark.parametrize(
    ("changes", "open_reader", "subject", "told", "do"),
    [
        ({}, lambda: reader(card(persistence=False)), "gpu 0", "persistence off", ""),
        (
            # A container hides them.
            {},
            lambda: reader(used_bytes=60 * GIB),
            "gpu 0 load",
            "none of its processes is seen from here",
            "process namespace",
        ),
        ({}, lambda: reader(slowed=("power cap",)), "gpu 0 load", "slowed by power cap", ""),
        ({}, reader, "g0 gives back", "kv_backend is auto", ""),
        ({"core": 3}, reader, "g0 core", "pinned to core 3", ""),
    ],
)
def test_a_card_that_works_with_something_to_know_is_a_note(
    tmp_path: Path,
    changes: dict[str, Any],
    open_reader: Callable[[], CardReader],
    subject: str,
    told: str,
    do: str,
) -> None:
    finding = found(node(tmp_path, **changes), open_reader)[subject]
    assert finding.level is Severity.NOTE
    assert told in finding.what
    assert do in finding.do


def test_another_process_on_the_card_is_named_and_the_host_is_none(tmp_path: Path) -> None:
    busy = reader()
    busy.listed = (Client(os.getpid(), 60 * GIB), Client(2**22 + 1, GIB), Client(2**22 + 2, GIB))
    finding = found(node(tmp_path), lambda: busy)["gpu 0 load"]
    assert finding.level is Severity.NOTE
    assert "another process is on it (pid 4194305, 4194306)" in finding.what
    busy.listed = (Client(os.getpid(), 60 * GIB),)
    assert found(node(tmp_path), lambda: busy)["gpu 0 load"].level is Severity.OK


def test_a_card_that_stops_answering_does_not_end_the_doctor(tmp_path: Path) -> None:
    mute = reader()
    mute.listed = None
    told = found(node(tmp_path), lambda: mute)
    assert told["gpu 0 load"].level is Severity.WRONG
    assert "g0 mps" in told


def test_mps_is_wrong_where_it_is_wanted_and_a_note_where_it_is_there(
    tmp_path: Path, no_mps: Path
) -> None:
    config = node(tmp_path, mps_priority="low")
    assert found(config, reader)["g0 mps"].level is Severity.WRONG
    no_mps.mkdir()
    os.mkfifo(no_mps / "control")
    finding = found(config, reader)["g0 mps"]
    assert finding.level is Severity.NOTE
    assert "a fatal fault of one client ends every client" in finding.do
    finding = found(node(tmp_path), reader)["g0 mps"]
    assert (finding.level, "no client of it" in finding.what) == (Severity.NOTE, True)


def test_missing_cuda_bindings_are_wrong(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    config = node(tmp_path, kv_backend="cuda", engine_python=str(bare))
    finding = found(config, reader)["g0 gives back"]
    assert finding.level is Severity.WRONG
    assert "has no cuda-bindings" in finding.what
    assert "rose-rollout[cuda]" in finding.do
