"""A host that nodes find in a folder: its page has a name of its own, and says whose it is."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from kv_cases import HostRig, host_of, host_rig

from executor import ControlPage, ExecutorError, HostSeat, PageError
from executor.control_page.host_description import (
    MOST_BYTES,
    HostDescription,
    host_name,
    path_of,
)
from executor.engine_settings import EngineSettings, page_path_of
from executor.errors import LendingError
from executor.vllm.host.latency_logger import HostLatencyLogger

__all__ = ["host_of"]
SAID = HostDescription(
    "chat", 0.5, 0.15, ("GPU-0a",), 7, "vLLM 0.32.0", "tested", ("lending: no KV pages",)
)


def settings(**environ: str) -> EngineSettings:
    return EngineSettings.from_environ({"ROSE_ROLE": "host", **environ})


def test_a_host_of_a_folder_has_a_page_of_its_own() -> None:
    named = settings(ROSE_HOST_DIR="/run/rose", ROSE_HOST_NAME="chat-0")
    assert (named.page_path, named.found) == ("/run/rose/chat-0.page", True)
    own = page_path_of({"ROSE_ROLE": "host", "ROSE_HOST_DIR": "d", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert host_name(Path(own)) == f"{socket.gethostname()}-0-1", "two of a machine are two"
    fixed = settings(ROSE_HOST_DIR="/run/rose", ROSE_CONTROL_PAGE="p")
    assert (fixed.page_path, fixed.found) == ("p", False)
    guest = EngineSettings.from_environ({"ROSE_HOST_DIR": "d", "ROSE_CONTROL_PAGE": "p"})
    assert not guest.found


@pytest.mark.parametrize("name", ["../page", "a/b", ".hidden", "a b", "x" * 101])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ExecutorError, match="ROSE_HOST_NAME"):
        settings(ROSE_HOST_DIR="/run/rose", ROSE_HOST_NAME=name)


def test_a_host_without_any_page_is_told_of_both_ways() -> None:
    with pytest.raises(ExecutorError, match="ROSE_HOST_DIR"):
        settings()


def test_an_engine_describes_itself_once_it_has_the_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("ROSE_HOST_DIR", str(tmp_path)),
        ("ROSE_HOST_NAME", "chat-0"),
        ("ROSE_SLO_TTFT_S", "0.4"),
        ("ROSE_PAGE_GROUP", str(os.getegid())),
    ):
        monkeypatch.setitem(os.environ, name, value)
    (tmp_path / "rig").mkdir()
    rig = host_rig(tmp_path / "rig", monkeypatch, level="observe")
    rig.scheduler.shutdown()
    monkeypatch.delitem(os.environ, "ROSE_CONTROL_PAGE")
    rig.scheduler.attach()
    path = tmp_path / "chat-0.page"
    with ControlPage.open(path, str(os.getegid())) as page:
        said, seat = HostDescription.read(path), page.seat.read()
        assert said is not None
        assert seat is not None
        assert (said.ttft_s, said.tpot_s, said.seated_ns) == (0.4, 0.0, seat.taken_ns)
        assert said.model
        assert said.devices == (), "a CPU has no UUID"
        assert (said.engine.split()[0], said.support, said.lacks) == ("vLLM", "tested", ())
        assert path.with_suffix(".json").stat().st_mode & 0o777 == 0o640
        logger = HostLatencyLogger(None)
        assert logger._writer.open, "its API process comes to the same page"
    second = host_rig(tmp_path / "rig", monkeypatch, level="observe")
    monkeypatch.delitem(os.environ, "ROSE_CONTROL_PAGE")
    second.scheduler.attach()
    assert HostDescription.read(path) == said, "one that has no seat describes nothing"
    for each in (second, rig):
        each.scheduler.shutdown()


def test_a_host_whose_page_is_swept_as_it_starts_makes_another(
    tmp_path: Path, host_of: Callable[..., HostRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, swept = ControlPage.take_host, list[Path]()

    def take_late(page: ControlPage, **of: int) -> HostSeat:
        if not swept:
            swept.append(page.path)
            page.path.unlink()
        return take(page, **of)

    monkeypatch.setattr(ControlPage, "take_host", take_late)
    rig = host_of(level="observe")
    assert swept == [tmp_path / "page"]
    with ControlPage.open(tmp_path / "page") as page:
        assert page.host_view().seated
        assert not page.host_view().vetoed
    rig.scheduler.shutdown()


def test_a_host_whose_page_is_named_describes_itself_too_if_it_can(
    tmp_path: Path, host_of: Callable[..., HostRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lends_not(*_: object) -> None:
        raise LendingError("no KV\npages")

    monkeypatch.setattr("executor.vllm.host.scheduler.lender_of", lends_not)
    rig = host_of(level="lend")
    with ControlPage.open(tmp_path / "page") as page:
        seat = page.seat.read()
        assert seat is not None
        said = HostDescription.current(page.path, seat.taken_ns)
        assert said is not None
        assert said.lacks == ("lending: no KV pages",)
        assert HostDescription.current(page.path, seat.taken_ns - 1) is None, "an earlier life"
        rig.scheduler.shutdown()
        monkeypatch.setattr(HostDescription, "write", refuses)
        rig.scheduler.attach()
        assert not page.host_view().vetoed, "it publishes all the same"
    rig.scheduler.shutdown()


def refuses(*_: object) -> None:
    raise PageError("cannot write")


@pytest.mark.parametrize(
    ("page", "beside"),
    [("chat.page", "chat.json"), ("rose.1", "rose.1.json"), ("rose", "rose.json")],
)
def test_each_page_has_a_description_of_its_own(page: str, beside: str) -> None:
    assert path_of(Path(page)) == Path(beside)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "chat-0.page"
    ControlPage.create(path).close()
    return path


def test_a_description_is_read_as_it_was_written(page: Path) -> None:
    assert HostDescription.read(page) is None
    SAID.write(page)
    SAID.write(page)
    assert HostDescription.read(page) == SAID
    beside = page.with_suffix(".json")
    assert beside.stat().st_mode & 0o777 == 0o600
    beside.write_text(json.dumps({**json.loads(beside.read_text()), "newer": 1}))
    assert HostDescription.read(page) == SAID, "a newer plugin may say more"


FIELDS = {"model": "m", "ttft_s": 0.5, "tpot_s": 0.1, "devices": [], "seated_ns": 1}
HOSTILE = {
    "torn": json.dumps(FIELDS)[:20],
    "empty": "",
    "no object": "[1]",
    "a field short": json.dumps({"model": "m"}),
    "target": json.dumps(FIELDS | {"ttft_s": -1}),
    "infinite target": json.dumps(FIELDS | {"ttft_s": float("inf")}),
    "target of text": json.dumps(FIELDS | {"tpot_s": "1"}),
    "device": json.dumps(FIELDS | {"devices": ["../../etc"]}),
    "devices": json.dumps(FIELDS | {"devices": "GPU-0"}),
    "device twice": json.dumps(FIELDS | {"devices": ["GPU-0", "GPU-1", "GPU-0"]}),
    "model": json.dumps(FIELDS | {"model": "a\nb"}),
    "engine": json.dumps(FIELDS | {"engine": ["vLLM"]}),
    "support": json.dumps(FIELDS | {"support": "x" * 254}),
    "lacks": json.dumps(FIELDS | {"lacks": "lending"}),
    "too many lacks": json.dumps(FIELDS | {"lacks": ["x"] * 17}),
    "a lack": json.dumps(FIELDS | {"lacks": ["a\x1b[2J"]}),
    "seat": json.dumps(FIELDS | {"seated_ns": None}),
    "depth": "[" * 9_000,
    "size": " " * (MOST_BYTES + 1) + json.dumps(FIELDS),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_description_that_makes_no_sense_is_refused_in_a_line(page: Path, text: str) -> None:
    beside = page.with_suffix(".json")
    beside.write_text(text)
    beside.chmod(0o600)
    with pytest.raises(PageError, match="describes no host") as error:
        HostDescription.read(page)
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


def test_only_a_file_of_the_owner_of_the_page_is_read(page: Path, tmp_path: Path) -> None:
    beside = page.with_suffix(".json")
    (tmp_path / "elsewhere").write_text(json.dumps(FIELDS))
    beside.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PageError, match="cannot be read"):
        HostDescription.read(page)
    beside.unlink()
    os.mkfifo(beside)
    with pytest.raises(PageError, match="not a regular file"):
        HostDescription.read(page)
    beside.unlink()
    SAID.write(page)
    beside.chmod(0o660)
    with pytest.raises(PageError, match="written by others"):
        HostDescription.read(page)
    if os.geteuid() == 0:
        beside.chmod(0o600)
        os.chown(beside, 12_345, -1)
        with pytest.raises(PageError, match="belongs to uid 12345"):
            HostDescription.read(page)
