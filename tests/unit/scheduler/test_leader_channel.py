"""Clients find the scheduler that leads by any address of a list, and follow it."""

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from rose.addresses import free_port
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.operate.client import SchedulerClient
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.leader_channel import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    SEARCH_PAUSE_S,
    SKIPS,
    LeaderChannel,
    LeaderFinder,
)
from rose.rpc.rose_pb2_grpc import SchedulerServicer
from rose.scheduler.standby import LeaderHandlers


class Leading(SchedulerServicer):
    """Answers, and refuses what an operator asks for."""

    async def RegisterJob(
        self, request: pb.RegisterJobRequest, context: object
    ) -> pb.RegisterJobReply:
        return pb.RegisterJobReply(latest_version=7)

    async def Revoke(
        self, request: pb.RevokeRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> pb.RevokeReply:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it has no lease")
        raise AssertionError


class Process:
    """One scheduler: a standby that names `leader`, until it leads."""

    def __init__(self) -> None:
        self.leader = ""
        self.handlers = LeaderHandlers(lambda: self.leader)
        self.server = make_server()
        self.server.add_generic_rpc_handlers((self.handlers,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def lead(self) -> None:
        self.handlers.lead(Leading())  # type: ignore[abstract]


@pytest.fixture
async def two() -> AsyncIterator[tuple[Process, Process]]:
    both = Process(), Process()
    for each in both:
        await each.server.start()
    yield both
    for each in both:
        await each.server.stop(0)


async def register(channel: LeaderChannel, timeout_s: float = 10.0) -> int:
    request = pb.RegisterJobRequest(job="j")
    reply = await channel.call(
        lambda stub, left_s: stub.RegisterJob(request, timeout=left_s), timeout_s
    )
    return reply.latest_version


async def test_a_leader_that_is_not_in_the_list_is_found_by_a_standbys_word(
    two: tuple[Process, Process],
) -> None:
    standby, leader = two
    standby.leader = leader.address
    leader.lead()
    async with LeaderChannel(standby.address) as channel:
        assert await register(channel) == 7
        assert channel.address == leader.address


async def test_one_that_is_gone_is_passed_over_and_a_new_leader_is_waited_for(
    two: tuple[Process, Process],
) -> None:
    one, other = two
    gone = f"127.0.0.1:{free_port()}"
    one.leader = other.leader = gone
    async with LeaderChannel(f"{gone},{one.address},{other.address}") as channel:
        asked = asyncio.create_task(register(channel))
        await asyncio.sleep(0)
        other.lead()
        assert await asked == 7
        await other.server.stop(0)
        one.lead()
        assert await register(channel) == 7
        assert channel.address == one.address


async def test_a_machine_that_takes_no_connection_is_passed_over(
    two: tuple[Process, Process],
) -> None:
    """Its address answers nothing at all: neither yes nor no."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    two[0].lead()
    async with LeaderChannel(f"127.0.0.1:{silent.getsockname()[1]},{two[0].address}") as channel:
        assert await register(channel) == 7
    silent.close()


async def test_without_a_leader_a_call_ends_with_the_time_that_it_has(
    two: tuple[Process, Process],
) -> None:
    async with LeaderChannel(f"{two[0].address},{two[1].address}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="standby"):
            await register(channel, 0.2)
    async with LeaderChannel(f"127.0.0.1:{free_port()}") as channel:
        with pytest.raises(UnavailableError, match="no scheduler answers"):
            await register(channel, 0.2)


async def test_an_operators_command_follows_the_leader_and_is_not_repeated(
    two: tuple[Process, Process],
) -> None:
    standby, leader = two
    standby.leader = leader.address
    leader.lead()
    client = SchedulerClient(f"127.0.0.1:{free_port()},{standby.address}")
    with pytest.raises(RefusedError, match="it has no lease"):
        await asyncio.to_thread(client.revoke, "g0", "operator")


async def test_an_operators_command_without_a_leader_ends_with_a_line(
    two: tuple[Process, Process],
) -> None:
    client = SchedulerClient(f"{two[0].address},{two[1].address}", timeout_s=0.3)
    with pytest.raises(UnavailableError, match=r"as the leader|knows of no leader"):
        await asyncio.to_thread(client.revoke, "g0", "operator")


def test_each_address_is_asked_once_before_a_pause_and_pauses_stay_short_for_a_while() -> None:
    finder = LeaderFinder("a:1,b:1")
    asked, pauses = [], []
    for _ in range(6):
        asked.append(finder.address)
        finder.missed("dead:1" if finder.address == "b:1" else "")
        pauses.append(finder.pause_s)
    assert asked == ["a:1", "b:1", "dead:1", "a:1", "b:1", "dead:1"]
    assert pauses == [0, 0, FIRST_PAUSE_S, 0, 0, 2 * FIRST_PAUSE_S]
    longest = []
    for _ in range(200):
        finder.missed()
        longest.append(finder.pause_s)
    assert SEARCH_PAUSE_S in longest
    assert longest[-2:].count(0.0) >= 1
    assert max(longest) == MAX_PAUSE_S
    finder.answered()
    assert finder.pause_s == 0


def test_a_leader_named_by_a_standby_is_left_for_the_other_and_not_for_itself() -> None:
    finder = LeaderFinder("a:1,b:1,c:1")
    finder.missed()
    finder.missed("a:1")
    finder.answered()
    finder.missed()
    assert finder.address == "b:1"


def test_one_that_fell_silent_is_not_asked_again_at_once_though_a_standby_names_it() -> None:
    finder = LeaderFinder("hangs:1,standby:1")
    finder.missed(silent=True)
    asked = []
    for _ in range(SKIPS + 2):
        asked.append(finder.address)
        finder.missed("hangs:1" if finder.address == "standby:1" else "")
    assert asked == [*["standby:1"] * (SKIPS + 1), "hangs:1"], "and it is not forgotten"


def test_the_next_leader_is_believed_when_it_names_one_that_was_silent_before() -> None:
    finder = LeaderFinder("hung:1,standby:1")
    finder.missed(silent=True)
    finder.answered()
    finder.missed("hung:1")
    assert finder.address == "hung:1"


def test_an_only_scheduler_is_asked_again_though_it_fell_silent() -> None:
    finder = LeaderFinder("a:1")
    finder.missed(silent=True)
    assert finder.address == "a:1"


async def test_the_connection_to_one_that_fell_silent_is_given_up(
    two: tuple[Process, Process],
) -> None:
    """A process that is stopped keeps its connections: they say nothing about its life."""
    hangs, standby = two
    hangs.lead()
    standby.leader = hangs.address
    async with LeaderChannel(f"{hangs.address},{standby.address}") as channel:
        before = await channel.connected()
        channel.missed(TimeoutError())
        assert channel.address == standby.address
        await channel.connected()
        assert before.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_an_only_scheduler_is_asked_again_after_a_pause() -> None:
    finder = LeaderFinder("a:1")
    finder.missed()
    assert (finder.address, finder.pause_s) == ("a:1", FIRST_PAUSE_S)


def test_a_hint_that_is_no_address_is_none() -> None:
    finder = LeaderFinder("a:1,b:1")
    finder.missed("http://x/\n")
    assert finder.address == "b:1"


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:70000", "a:1,,b:1", "http://a:1", "a:1;b:1"])
def test_what_is_no_list_of_addresses_is_refused_with_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        LeaderFinder(text)


def test_addresses_of_ipv6_are_in_brackets() -> None:
    assert LeaderFinder("[::1]:7400, h:1").addresses == ("[::1]:7400", "h:1")
