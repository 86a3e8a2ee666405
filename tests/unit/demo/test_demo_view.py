import asyncio
import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from bench.demo.stack import GUEST
from bench.demo.view import Board, JobProgress, draw, plain_line, render
from bench.demo.watcher import GatewayFigures
from rose.rpc import rose_pb2

HOST = rose_pb2.HostTelemetry(ttft_p50_s=0.02, ttft_p95_s=0.25, window_requests=9)


def board(*jobs: str, state: str = "healthy") -> Board:
    """Board after one step of each job and one poll of the control plane."""
    board = Board(0.0, {job: JobProgress() for job in jobs})
    board.conductor = cast(
        Any, SimpleNamespace(arm="leased", drills=SimpleNamespace(revocations=2))
    )
    step = {"reward_mean": 0.5, "version": 2, "wire_bytes": 1, "full_bytes": 2}
    for job in jobs:
        board.stepped(job, step)
    guest = rose_pb2.GuestTelemetry(replica=GUEST, mode="freeze", reason="no_lease", state=state)
    board._update(rose_pb2.SnapshotReply(hosts=[HOST], guests=[guest]), GatewayFigures())
    return board


def page(board: Board) -> str:
    console = Console(file=(file := io.StringIO()), width=80)
    console.print(render(board))
    return file.getvalue()


@pytest.mark.parametrize("state", ["backoff", "starting", "failed"])
def test_a_guest_that_is_not_up_is_shown_by_its_state_and_not_by_its_grant(state: str) -> None:
    assert board("a").guest_mode == "freeze"
    assert board("a", state=state).guest_mode == state


def test_the_page_shows_latency_reward_and_revocations_and_fits_a_narrow_terminal() -> None:
    shown = page(board("a"))
    for text in ("p95  250.0 ms", "v2  0.50", "freeze  no_lease", "2 revocations", "1   leased"):
        assert text in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_each_of_several_jobs_is_shown_with_its_share_of_the_guest() -> None:
    shared = board("job-1", "job-2")
    shared.jobs["job-1"].guest_s, shared.jobs["job-2"].guest_s = 30, 70
    shared.guest_job = "job-2"
    assert "70% of the guest's time   has it now" in page(shared)
    assert "job-1=v2,30% job-2=v2,70%" in plain_line(shared)


async def test_without_a_terminal_each_stage_is_one_line() -> None:
    drawn = Board(0.0, {}, stage="starting engines")
    file = io.StringIO()
    drawing = asyncio.create_task(draw(drawn, Console(file=file)))
    await asyncio.sleep(0.6)
    drawing.cancel()
    assert [line.split("] ")[1] for line in file.getvalue().splitlines()] == ["starting engines"]
