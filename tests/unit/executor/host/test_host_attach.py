"""A host that cannot publish serves on, and no guest runs by what an earlier life of it said."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kv_cases import HostRig, host_of

import executor.control_page.page
import executor.vllm.host.scheduler
from executor import ControlPage, Grant, GrantController, GrantMode, GuardConfig, Yield, decide
from executor.errors import ExecutorError
from executor.grant_controller import Observation, Write
from executor.guest.gate_client import FIRST_MODEL
from executor.host.plugin import HostPlugin, LatencyWriter
from executor.step_decision import GateLimits, Run
from executor.vllm.host.latency_logger import HostLatencyLogger
from executor.vllm.host.plugin import ENGINE_CORES

__all__ = ["host_of"]
Rigs = Callable[..., HostRig]
SECOND = 10**9


@pytest.fixture
def first(host_of: Rigs, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostRig]:
    """A life that served a request and is idle; it need not have been there for long."""
    monkeypatch.setattr(executor.control_page.page, "SETTLE_NS", 0)
    rig = host_of(level="observe")
    rig.add("a", [1, 2, 3], 4)
    rig.run_until_idle()
    yield rig
    rig.scheduler.shutdown()


def verdict(page: ControlPage) -> Run | Yield:
    """Return the verdicts of guard and gate on the page."""
    view, now_ns = page.host_view(), time.monotonic_ns()
    seen = Observation(view, lease_epoch=1)
    granted, *_ = GrantController(GuardConfig(512, 64)).step(seen, now_ns)
    assert isinstance(granted, Write)
    grant = granted.grant
    allowed = Grant(GrantMode.RUN, 512, 64, expiry_ns=now_ns + SECOND // 2, heartbeat_ns=now_ns)
    gate = decide(view, allowed, FIRST_MODEL, now_ns, GateLimits())
    assert isinstance(gate, Run) == (grant.mode is GrantMode.RUN), "guard and gate agree"
    return gate


def test_a_guest_runs_beside_an_idle_host(first: HostRig) -> None:
    assert verdict(first.page) == Run(512, 64)


def test_a_host_is_believed_from_the_start_and_until_it_shuts_down(first: HostRig) -> None:
    first.add("b", [1, 2, 3], 4)
    first.turn()
    state = first.page.host.read()
    assert state is not None
    assert not state.idle
    first.scheduler.shutdown()
    assert verdict(first.page) == Yield("no_host")


REFUSALS = {
    "untested version": {},
    "level": {"ROSE_HOST_LEVEL": "lent"},
    "target": {"ROSE_SLO_TTFT_S": "0,5"},
    "group": {"ROSE_PAGE_GROUP": "no-such-group"},
}


@pytest.mark.parametrize("lives_on", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_life_that_cannot_attach_lets_no_guest_run(
    first: HostRig,
    host_of: Rigs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusal: str,
    *,
    lives_on: bool,
) -> None:
    """Also while the life before it has not ended yet."""
    if not lives_on:
        first.scheduler.shutdown()

    def untested() -> None:
        raise ExecutorError("ROSE is not tested with vLLM 0.33.0")

    if refusal == "untested version":
        monkeypatch.setattr(executor.vllm.host.scheduler, "check_version", untested)
    level = REFUSALS[refusal].get("ROSE_HOST_LEVEL", "observe")
    for name, value in REFUSALS[refusal].items():
        monkeypatch.setitem(os.environ, name, value)
    second = host_of(level=level)
    for number in range(8):
        second.add(f"b{number}", [1, 2, 3, 4], 200)
    second.turn()
    assert second.scheduler.get_request_counts()[0] == 8, "it serves"
    assert verdict(first.page) == Yield("host_veto" if lives_on else "no_host")
    assert caplog.text.count("it serves on without ROSE") == 1
    second.scheduler.shutdown()
    assert verdict(first.page) == (Run(512, 64) if lives_on else Yield("no_host"))


def test_a_host_whose_page_is_on_a_disk_touches_nothing_there_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "host")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    monkeypatch.setattr(executor.control_page.page, "file_system_type", lambda _: 0xEF53)
    parts = dict.fromkeys(HostPlugin.__abstractmethods__, lambda _: None)
    plugin = type("Plugin", (HostPlugin,), parts | {"log": logging.getLogger("host")})()
    beats = threading.active_count()
    plugin.attach()
    assert (plugin.observer, threading.active_count()) == (None, beats), "the stock engine"
    assert caplog.text.count("is on a disk") == 1
    assert not list(tmp_path.iterdir())


def test_a_second_engine_core_of_a_page_vetoes_guests_for_as_long_as_it_lives(
    first: HostRig,
    host_of: Rigs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = host_of(level="observe")
    assert "give each server a page" in caplog.text
    assert verdict(first.page) == Yield("host_veto")
    second.scheduler.shutdown()
    assert verdict(first.page) == Run(512, 64)


@pytest.mark.parametrize(
    ("index", "size", "started", "elastic"),
    [
        pytest.param(0, 2, None, False, id="a mixture of experts, over processes of others"),
        pytest.param(1, 1, None, False, id="a dense model, of which nothing else is known"),
        pytest.param(1, 1, (1, 2), False, id="the other core is on another machine, or Ray's"),
        pytest.param(0, 2, (2, 2), True, id="cores come and go"),
        pytest.param(0, 1, (17, 17), False, id="more cores than the page has seats"),
    ],
)
def test_an_engine_core_whose_fellows_cannot_be_known_is_refused(
    first: HostRig,
    caplog: pytest.LogCaptureFixture,
    index: int,
    size: int,
    started: tuple[int, int] | None,
    elastic: bool,
) -> None:
    first.scheduler.shutdown()
    parallel = first.scheduler.vllm_config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_index = size, index
    parallel.enable_elastic_ep = elastic
    if started:
        setattr(parallel, ENGINE_CORES, started)
    first.scheduler.attach()
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    assert "its own page" in caplog.text or "a page each" in caplog.text
    assert verdict(first.page) == Yield("no_host")
    assert first.page.host_view().vetoed


def test_a_guest_runs_beside_a_data_parallel_host_once_all_its_cores_are_idle(
    first: HostRig, host_of: Rigs
) -> None:
    first.scheduler.shutdown()
    second = host_of(level="observe")
    for number, rig in enumerate((first, second)):
        rig.scheduler.shutdown()
        parallel = rig.scheduler.vllm_config.parallel_config
        parallel.data_parallel_size, parallel.data_parallel_index = 1, number
        setattr(parallel, ENGINE_CORES, (2, 2))
    assert verdict(first.page) == Yield("no_host")
    first.scheduler.attach()
    assert verdict(first.page) == Yield("no_host"), "one of two"
    second.scheduler.attach()
    assert verdict(first.page) == Run(512, 64)
    second.add("b", [1, 2, 3], 4)
    state = first.page.host_view().believed(time.monotonic_ns())
    assert state is not None
    assert (state.waiting, state.idle) == (1, False)
    second.run_until_idle()
    assert verdict(first.page) == Run(512, 64)
    second.scheduler.shutdown()
    assert verdict(first.page) == Yield("no_host")


def test_a_plugin_that_breaks_later_leaves_a_busy_host(
    first: HostRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(first.scheduler.observer, "arrived", broken)
    first.add("b", [1, 2, 3], 4)
    state = first.page.host.read()
    assert state is not None
    assert not state.idle
    assert verdict(first.page) == Yield("host_veto")
    first.run_until_idle()
    assert len(first.outputs["b"]) == 4


def iteration(*tokens: int) -> Any:
    """Return vLLM's statistics of requests that finished with so many tokens."""
    times = {"e2e_latency": 1.0, "decode_time": 0.5, "mean_time_per_output_token": 0.1}
    finished = [
        SimpleNamespace(
            request_id="cmpl-r0",
            finish_reason=None,
            num_prompt_tokens=3,
            num_generation_tokens=count,
            **times,
        )
        for count in tokens
    ]
    return SimpleNamespace(finished_requests=finished)


def others_write(_number: int) -> bool:
    return LatencyWriter(logging.getLogger("vllm.rose.latency")).open


def test_each_api_process_publishes_latencies_and_one_too_many_says_so(
    first: HostRig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        own = [HostLatencyLogger(None, engine_core) for engine_core in range(2)]
        assert sum(map(others_write, range(8))) == 7, "the engine cores' loggers have one lane"
        for each in own:
            each.record(None, iteration(2, 0))
    assert len(first.page.latency.drain().records) == 2
    assert caplog.text.count("latencies of 8 processes") == 1
    assert "Traceback" not in caplog.text
