"""An engine process: settings from its environment, its step log, and the versions of vLLM."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from executor.engine_settings import EngineSettings
from executor.engine_surfaces import VERSIONS, Support, missing
from executor.errors import ExecutorError, PageError
from executor.step_log import (
    ARRIVAL,
    HEADER,
    RECORD,
    STEP,
    STEP_LOG,
    StepLog,
    StepRecord,
    read_step_log,
    used_bytes,
)
from executor.vllm.compat import (
    TESTED,
    capped,
    check_version,
    client_request_id,
    ended_requests,
    waiting_requests,
)
from executor.vllm.surfaces import GUEST, HOST, LENDING, WORKER


def settings(**environ: str) -> EngineSettings:
    return EngineSettings.from_environ(environ)


def test_settings_of_an_engine_come_from_its_environment() -> None:
    assert settings() == EngineSettings("", "", 0.0, 0.0, 1.5), "nothing is asked for"
    host = settings(
        ROSE_ROLE="host",
        ROSE_CONTROL_PAGE="page",
        ROSE_SLO_TTFT_S="0.5",
        ROSE_SLO_TPOT_S="0.15",
        ROSE_ORPHAN_S="1",
    )
    assert host == EngineSettings("host", "page", 0.5, 0.15, 1.0), "and it lends only when told to"
    told = settings(
        ROSE_HOST_LEVEL="lend",
        ROSE_HOST_RESERVE="0.5",
        ROSE_KV_BACKEND="cuda",
        ROSE_PAGE_SOCKET="/run/pages",
    )
    assert (host.level, host.kv_backend, host.page_socket) == ("observe", "auto", "")
    assert (told.level, told.reserve) == ("lend", 0.5)
    assert (told.kv_backend, told.page_socket) == ("cuda", "/run/pages")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ROSE_HOST_LEVEL": "give"}, "give observe or lend"),
        ({"ROSE_KV_BACKEND": "gpu"}, "ROSE_KV_BACKEND is 'gpu'; give auto or madvise or cuda"),
        (
            {"ROSE_KV_BACKEND": "kvcached"},
            "kvcached: 0.1.6 is tested by its authors up to vLLM 0.24",
        ),
        ({"ROSE_HOST_RESERVE": "0"}, "ROSE_HOST_RESERVE is 0; give a share"),
        ({"ROSE_HOST_RESERVE": "nan"}, "ROSE_HOST_RESERVE is nan; give a share"),
        ({"ROSE_HOST_RESERVE": "half"}, "ROSE_HOST_RESERVE is half; give a share"),
        ({"ROSE_ROLE": "guest"}, "set ROSE_CONTROL_PAGE"),
        ({"ROSE_SLO_TTFT_S": "fast"}, "ROSE_SLO_TTFT_S is 'fast'; give seconds"),
        ({"ROSE_SLO_TPOT_S": "-1"}, "not negative"),
        ({"ROSE_ORPHAN_S": "0"}, "ROSE_ORPHAN_S is 0"),
    ],
)
def test_senseless_settings_say_what_to_do(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ExecutorError, match=message):
        EngineSettings.from_environ(environ)


def test_records_come_back_as_written_before_anybody_closes_the_log(tmp_path: Path) -> None:
    cpu_ns = iter((100, 160, 200))
    log = StepLog(tmp_path / "log", capacity=8, thread_ns=lambda: next(cpu_ns))
    log.begin()
    log.step(10, 90, tokens=7, sequences=3, sampled=2)
    log.step(90, 120, tokens=5, sequences=3)
    log.arrival(95, 96, prompt_tokens=40)
    raw = (tmp_path / "log").read_bytes()
    expected = [
        StepRecord(STEP, 10, 90, 60, 7, 3, 2),
        StepRecord(STEP, 90, 120, 40, 5, 3, 0),
        StepRecord(ARRIVAL, 95, 96, 0, 40, 1, 0),
    ]
    assert read_step_log(raw) == expected
    cut = raw[: used_bytes(raw[: HEADER.size])]
    assert len(cut) == HEADER.size + 3 * RECORD.size
    assert read_step_log(cut) == expected


def test_a_full_log_takes_no_more(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log", capacity=2)
    for moment in range(5):
        log.arrival(moment, moment, 1)
    assert [r.begin_ns for r in read_step_log((tmp_path / "log").read_bytes())] == [0, 1]


def test_only_a_named_folder_gets_a_log_and_no_log_is_overwritten(tmp_path: Path) -> None:
    assert StepLog.from_environ({}, "host") is None
    environ = {STEP_LOG: str(tmp_path)}
    assert StepLog.from_environ(environ, "host") is not None
    assert len(list(tmp_path.glob("steps-host-*.bin"))) == 1
    with pytest.raises(PageError, match="step log"):
        StepLog.from_environ(environ, "host")


@pytest.mark.parametrize("raw", [b"", b"x" * 64, HEADER.pack(b"ROSESTEP", 1, 9, 2)])
def test_what_is_no_whole_log_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="step log"):
        read_step_log(raw)


def test_an_engine_on_a_full_disk_goes_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert StepLog.from_environ({"ROSE_STEP_LOG": str(tmp_path)}, "host") is None
    assert list(tmp_path.iterdir()) == []
    assert "logs no steps" in caplog.text


def test_nobody_who_waits_or_was_ended_is_overlooked() -> None:
    older = SimpleNamespace(waiting=["a"], skipped_waiting=["b"])
    newer = SimpleNamespace(waiting=["a"], kv_holding_waiting=["b"])
    assert waiting_requests(older) == waiting_requests(newer) == ["b", "a"]
    request = SimpleNamespace(client_index=3, request_id="r")
    assert ended_requests([request]) == ended_requests([("r", 3)]) == [(3, "r")]


@pytest.mark.parametrize(
    ("engine_id", "client_id"),
    [
        ("cmpl-load-17-0", "load-17"),
        ("cmpl-load-17-0-1a2b3c4d", "load-17"),
        ("cmpl-load-17-0-12345678", "load-17"),
        ("cmpl-load-12345678-0", "load-12345678"),
        ("cmpl-a-0-0", "a-0"),
        ("cmpl-a-2", "a-2"),
        ("chatcmpl-5d0f1c9e-0a52-4f6e-9d6a-0123456789ab", "5d0f1c9e-0a52-4f6e-9d6a-0123456789ab"),
        ("something-else", "something-else"),
        ("", ""),
    ],
)
def test_the_engines_wrapping_is_taken_off(engine_id: str, client_id: str) -> None:
    assert client_request_id(engine_id) == client_id


@pytest.mark.parametrize("version", ["0.24.0", "0.34.0", "1.0", "dev"])
def test_a_version_outside_of_the_window_is_one_clear_line(version: str) -> None:
    with pytest.raises(ExecutorError, match=rf"vLLM 0\.25\.0 .* this is {version}; install one of"):
        check_version(GUEST, version)


@pytest.mark.parametrize(
    ("version", "support"),
    [
        (None, Support.TESTED),
        *((known, Support.TESTED) for known in TESTED),
        (f"{TESTED[-1]}+cu130", Support.TESTED),
        ("0.33.0", Support.PROBED),
        ("0.32.1.dev5+g0", Support.PROBED),
    ],
)
def test_versions_of_the_window_are_tested_or_probed(
    version: str | None, support: Support, caplog: pytest.LogCaptureFixture
) -> None:
    assert check_version((*LENDING, *GUEST, *WORKER), version) is support
    assert ("is not tested with ROSE" in caplog.text) == (support is Support.PROBED)


def test_probed_versions_are_refused_where_only_tested_ones_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VERSIONS, "tested")
    check_version(HOST, TESTED[0])
    with pytest.raises(
        ExecutorError, match=r"not tested with vLLM 0\.33\.0; .*ROSE_ENGINE_VERSIONS"
    ):
        check_version(HOST, "0.33.0")


def test_a_version_that_lacks_a_name_says_which() -> None:
    with pytest.raises(
        ExecutorError, match=r"vLLM 0\.33\.0 has no Scheduler\.gone or away; install one"
    ):
        check_version(["v1.core.sched.scheduler:Scheduler[running, gone|away]"], "0.33.0")


ENGINE = """
from engine.core.base import Base
try:
    class Pool(Base):
        size: int
        def __init__(self, blocks):
            self.blocks = blocks
        async def take(self, n, *, cold=False): ...
except ImportError:
    pass
"""


@pytest.mark.parametrize(
    ("surface", "lacks"),
    [
        ("core.pool:Pool(blocks)[size, blocks, take]", []),
        ("core.pool:Pool.take(n, cold)", []),
        ("core.pool:Pool.take(m)", ["parameter m of Pool.take"]),
        ("core.pool:Pool[gone|size, away]", ["Pool.away"]),
        ("core.pool:Pool.give", ["Pool.give in core.pool"]),
        ("core.pool:Pool.kept(by)", []),
        ("core.pool:Pool[base, size]", []),
        ("core.gone:Pool", ["Pool in core.gone"]),
        ("core:pool_of", []),
    ],
)
def test_a_surface_is_looked_up_in_the_source(
    tmp_path: Path, surface: str, lacks: list[str]
) -> None:
    root = tmp_path / "engine"
    (root / "core").mkdir(parents=True)
    (root / "core/pool.py").write_text(ENGINE)
    (root / "core/base.py").write_text("class Base:\n    def kept(self, by): self.base = by\n")
    (root / "core/__init__.py").write_text("if True:\n    def pool_of(): ...\n")
    assert missing(root, [surface]) == lacks


@pytest.mark.parametrize(
    ("running_slots", "cap", "within"),
    # 0.25 asserts that no more run than its number of slots.
    [("max_num_running_reqs", 64, (64, 3)), ("max_num_active_reqs", 1024, (512, 2))],
)
def test_a_cap_is_lifted_again_whatever_happens(
    running_slots: str, cap: int, within: tuple[int, int]
) -> None:
    full = {"max_num_scheduled_tokens": 512, "max_num_running_reqs": 16, running_slots: 12}
    scheduler = SimpleNamespace(**full, running=["a", "b", "c"])
    seen: list[tuple[int, int]] = []

    def fail() -> None:
        with capped(scheduler, tokens=cap, sequences=2):
            seen.append((scheduler.max_num_scheduled_tokens, getattr(scheduler, running_slots)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [within]
    assert {name: getattr(scheduler, name) for name in full} == full
