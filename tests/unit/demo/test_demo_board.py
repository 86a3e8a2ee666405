"""What the live page says of the guest."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.demo.experiment.watcher import GatewayFigures, Watcher
from bench.demo.stack import GUEST
from bench.demo.view import Board, JobView
from rose.rpc import rose_pb2


def followed(guest: rose_pb2.GuestTelemetry) -> Board:
    """A board that asked once."""
    board = Board(t0_s=0.0)

    async def snapshot() -> rose_pb2.SnapshotReply:
        return rose_pb2.SnapshotReply(guests=[guest])

    async def once() -> None:
        asked = asyncio.Event()

        async def gateway() -> GatewayFigures:
            asked.set()
            return GatewayFigures()

        watcher = SimpleNamespace(snapshot=snapshot, gateway=gateway)
        following = asyncio.create_task(board.follow(cast(Watcher, cast(Any, watcher))))
        await asked.wait()
        following.cancel()

    asyncio.run(once())
    return board


@pytest.mark.parametrize("state", ["backoff", "starting", "failed"])
def test_a_guest_that_is_not_up_is_not_told_as_running(state: str) -> None:
    guest = rose_pb2.GuestTelemetry(replica=GUEST, mode="run", reason="leased", state=state)
    told = followed(guest).state()
    assert (told.guest_mode, told.guest_reason) == (state, "")


def test_a_guest_that_is_up_is_told_by_its_grant() -> None:
    guest = rose_pb2.GuestTelemetry(
        replica=GUEST, mode="freeze", reason="no_lease", state="healthy"
    )
    told = followed(guest).state()
    assert (told.guest_mode, told.guest_reason) == ("freeze", "no_lease")


def test_each_jobs_learning_is_shown_as_its_own() -> None:
    board = Board(t0_s=0.0, jobs=("a", "b"))
    for job, reward, version in (("a", 0.5, 2), ("b", 0.25, 2), ("a", 0.75, 3)):
        event = {"reward_mean": reward, "version": version, "wire_bytes": 1, "full_bytes": 2}
        board.stepped(job, event)
    assert board.state().jobs == [JobView("a", [0.5, 0.75], 3), JobView("b", [0.25], 2)]
    assert board.state().step == 3
