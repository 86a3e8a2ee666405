"""A host: its process, its requests and its load, with the plugin and without it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from executor import ControlPage, HostState, LatencyRecord, SeatState, Veto
from executor.control_page.host_description import HostDescription
from rose.logs.eventlog import JsonlLog
from rose.node import host as host_watch
from rose.node.config import HostConfig
from rose.node.host import STALE_S, Host, HostLoad, HostProcess, HostScrape, watch
from rose.process.procfs import ProcessIdentity, pid_namespace
from tests.harness.waiting import PATIENCE_S, HandClock, until_async
from tests.harness.web_server import served

# ---- without the plugin ----


def page(ttft: tuple[int, int, int], tpot: tuple[int, int, int], running: int = 0) -> str:
    """Cumulative counts at 0.25 s, 0.5 s and in all (TTFT); 0.1, 0.15 and in all (TPOT)."""

    def histogram(name: str, bounds: tuple[str, ...], counts: tuple[int, ...]) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        for bound, count in zip(bounds, counts, strict=True):
            yield f'{name}_bucket{{le="{bound}",model_name="m"}} {count}'
        yield f'{name}_sum{{model_name="m"}} {counts[-1] * 0.1}'
        yield f'{name}_count{{model_name="m"}} {counts[-1]}'

    return "\n".join(
        [
            *histogram("vllm:time_to_first_token_seconds", ("0.25", "0.5", "+Inf"), ttft),
            *histogram("vllm:request_time_per_output_token_seconds", ("0.1", "0.15", "+Inf"), tpot),
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{model_name="m"}} {running}',
            "# TYPE vllm:num_requests_waiting gauge",
            'vllm:num_requests_waiting{model_name="m"} 0',
            "",
        ]
    )


Counts = tuple[tuple[int, int, int], tuple[int, int, int]]


@pytest.mark.parametrize(
    ("ttft_s", "pages", "counted"),
    [
        # No request of before the first scrape; then 2 missed TTFT and 2 TPOT: 4 at worst.
        (0.5, [((0, 0, 9), (0, 0, 9)), ((8, 8, 19), (7, 8, 19))], (6, 4)),
        # Another 3 missed both: 3 at most.
        (0.5, [((0,) * 3, (0,) * 3), ((8, 8, 10), (7, 8, 10)), ((8, 8, 13), (7, 8, 13))], (6, 7)),
        # A target between two buckets is judged by the lower one.
        (0.4, [((0, 0, 0), (0, 0, 0)), ((3, 10, 10), (10, 10, 10))], (3, 7)),
        # A host that was restarted counts anew.
        (0.5, [((90, 90, 90), (90, 90, 90)), ((5, 5, 5), (5, 5, 5))], (5, 0)),
    ],
)
def test_requests_count_by_what_their_host_says_of_both_targets(
    ttft_s: float, pages: list[Counts], counted: tuple[int, int]
) -> None:
    scrape = HostScrape(ttft_s, 0.15)
    for second, counts in enumerate(pages):
        scrape.take(page(*counts), float(second))
        assert second or (scrape.good, scrape.bad) == (0, 0)
    assert (scrape.good, scrape.bad) == counted


def test_the_busy_share_is_that_of_scrapes_which_found_work_and_old_ones_say_nothing() -> None:
    scrape = HostScrape(0.5, 0.15)
    assert scrape.busy_share(0.0) is None
    for second in range(10):
        scrape.take(page((0, 0, 0), (0, 0, 0), running=2 * (second < 3)), float(second))
    assert scrape.busy_share(9.0) == pytest.approx(0.3)
    assert scrape.running(9.0) == (0, 0)
    assert scrape.summary(9.0).window_requests == 0
    assert scrape.busy_share(9.0 + STALE_S) is None
    assert scrape.running(9.0 + STALE_S) is None


def test_what_is_no_exposition_is_a_line_and_counts_nothing() -> None:
    scrape = HostScrape(0.5, 0.15)
    scrape.take("<html>", 0.0)
    assert "no known engine" in scrape.trouble
    scrape.take(page((0, 0, 0), (0, 0, 0)), 1.0)
    assert not scrape.trouble


async def test_a_host_is_asked_again_after_it_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose.node.host.EVERY_S", 0.01)
    asked = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            return web.Response(status=503)
        return web.Response(text=page((asked, asked, asked), (asked, asked, asked)))

    scrape = HostScrape(0.5, 0.15)
    async with served(metrics) as url, aiohttp.ClientSession() as http:
        watching = asyncio.create_task(watch(f"{url}/metrics", scrape, http))
        await until_async(lambda: scrape.good, PATIENCE_S, "an answer")
        watching.cancel()
    assert not scrape.bad


# ---- its process ----


def seat_of(pid: int) -> SeatState:
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    return SeatState(pid, identity.started, pid_namespace(), 1, 1)


@pytest.fixture
def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.communicate()


def test_nothing_is_known_against_a_host_without_a_number() -> None:
    assert HostProcess(None).doubt(None) is None
    assert HostProcess(None).doubt(seat_of(os.getpid())) is None


def test_the_named_process_or_a_child_of_it_may_write(child: "subprocess.Popen[bytes]") -> None:
    host = HostProcess(os.getpid())
    assert host.doubt(seat_of(os.getpid())) is None
    assert host.doubt(seat_of(child.pid)) is None, "an engine core is a child"
    assert HostProcess(child.pid).doubt(seat_of(os.getpid())) == "host_foreign"
    end(child)


def test_a_host_that_ended_stays_dead_whoever_gets_its_number(
    child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    host, seat = HostProcess(child.pid), seat_of(child.pid)
    end(child)
    assert host.doubt(None) == "host_dead"
    later = ProcessIdentity(child.pid, seat.started + 1, "boot")
    monkeypatch.setattr(
        host_watch.ProcessIdentity, "of", staticmethod(lambda pid: replace(later, pid=pid))
    )
    assert host.doubt(None) == "host_dead"


def test_a_lock_that_a_child_of_a_dead_host_holds_is_worth_nothing(
    child: "subprocess.Popen[bytes]",
) -> None:
    seat = seat_of(child.pid)
    end(child)
    assert HostProcess(None).doubt(seat) == "host_dead"
    assert HostProcess(None).doubt(replace(seat_of(os.getpid()), started=1)) == "host_dead"


def test_a_process_of_another_user_is_no_error() -> None:
    """Process 1 is another user's wherever this is not run by root."""
    assert HostProcess(1).doubt(None) is None


@pytest.mark.parametrize("change", [{"pid_namespace": 1}, {"started": 0}])
def test_numbers_of_another_namespace_say_nothing(change: dict[str, int]) -> None:
    seat = replace(SeatState(2**22, 5, pid_namespace(), 1, 1), **change)
    assert HostProcess(None).doubt(seat) is None


# ---- requests and load ----


def test_requests_count_by_both_targets(tmp_path: Path) -> None:
    page, log = ControlPage.ensure(tmp_path / "page"), JsonlLog(tmp_path / "latencies")
    config = HostConfig(page=page.path, ttft_target_s=0.5, tpot_target_s=0.1)
    host = Host(config, page, log, page.take_guard())
    lane = page.take_lane()
    # The last two: one token, and a prompt that another host computed.
    for ttft_s, tpot_s in ((0.5, 0.1), (0.6, 0.01), (0.1, 0.2), (0.1, 0.0), (0.0, 0.1)):
        lane.append(LatencyRecord(0, int(ttft_s * 1e9), int(tpot_s * 1e9), 0, 7, 1, "r"))
    lane.close()
    host.look()
    assert host.requests == (3, 2)
    told = host.telemetry("n0")
    assert (told.prompt_tokens, told.output_tokens) == (35, 5)
    host.close()
    log.close()


def test_figures_have_what_the_present_host_says_of_its_engine(tmp_path: Path) -> None:
    page, log = ControlPage.ensure(tmp_path / "page"), JsonlLog(tmp_path / "latencies")
    host = Host(HostConfig(page=page.path), page, log, page.take_guard())
    assert host.figures().engine == ("", ""), "none is there"
    seats = [page.take_host(core=core, cores=2) for core in range(2)]
    HostDescription(
        "m", 0.5, 0.1, (), seats[0].taken_ns, "vLLM 0.33.0", "probed", ("lending: x",)
    ).write(page.path)
    for running, seat in enumerate(seats, 1):
        seat.write(HostState(running=running))
    figures = host.figures()
    assert (figures.engine, figures.lacks) == (("vLLM 0.33.0", "probed"), ("lending: x",))
    assert figures.state is not None
    assert figures.state.running == 3, "of both engine cores"
    seats[1].close()
    assert host.figures().engine == ("", ""), "one of its cores ended"
    veto = Veto(page.path)
    veto.renew()
    assert host.figures().engine == ("", "refused")
    veto.close()
    seats[0].close()
    host.close()
    log.close()


def test_the_busy_share_is_of_the_last_second_and_unknown_after_a_restart() -> None:
    clock = HandClock()
    load = HostLoad(clock.ns)
    assert load.busy_share(0) is None
    clock.now_s += 1.0
    assert load.busy_share(400_000_000) == pytest.approx(0.4)
    clock.now_s += 0.5
    assert load.busy_share(900_000_000) == pytest.approx(0.4), "too soon"
    clock.now_s += 0.5
    assert load.busy_share(1_400_000_000) == pytest.approx(1.0)
    clock.now_s += 1.0
    assert load.busy_share(10) is None
    assert load.busy_share(None) is None
