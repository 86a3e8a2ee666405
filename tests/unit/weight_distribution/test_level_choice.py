"""The level of a version follows the speed at which readers take what is sent, in virtual time."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from bench.weights.codec import adam_step, rate_for
from rose.addresses import free_port
from rose.rpc import rose_pb2 as pb
from rose.weight_distribution import VersionServer, WeightPublisher
from weight_transfer import ChunkStore, SigningKey, TensorBits
from weight_transfer.fetch.fetcher import SMALL_BYTES
from weight_transfer.format.delta_codec import Level
from weight_transfer.publish.level import (
    BURST_BYTES,
    FRESH_S,
    MOST_PEERS,
    PAUSE_S,
    LinkMeter,
    level_for,
)

MIB = 1 << 20
ModelStep = tuple[dict[str, TensorBits], dict[str, TensorBits]]


def burst(meter: LinkMeter, peer: str, began_s: float, rate: float, chunks: int = 16) -> float:
    """A reader that takes chunks of 1 MiB one after the other; returns when it has the last."""
    now_s = began_s
    for _ in range(chunks):
        meter.began(peer, now_s)
        now_s += MIB / rate
        meter.ended(peer, MIB, now_s)
    return now_s


def test_bursts_that_are_long_enough_say_what_the_link_carries() -> None:
    meter = LinkMeter()
    assert meter.bytes_per_s(0.0) is None
    burst(meter, "node", 0.0, 1e12, chunks=BURST_BYTES // MIB - 1)
    assert meter.bytes_per_s(0.0) is None, "what fits into buffers says nothing"
    ended_s = burst(meter, "node", 100 * PAUSE_S, 4e6)
    assert meter.bytes_per_s(ended_s) == pytest.approx(4e6)
    ended_s = burst(meter, "node", ended_s + 100 * PAUSE_S, 8e6)
    assert meter.bytes_per_s(ended_s) == pytest.approx(8e6), "pauses do not count"


def test_chunks_that_cross_at_once_are_not_slower_than_the_link() -> None:
    meter = LinkMeter()
    for _ in range(4):
        meter.began("node", 0.0)
    for _ in range(4):
        meter.ended("node", 4 * MIB, 2.0)
    assert meter.bytes_per_s(2.0) == 8 * MIB


def test_of_many_readers_the_middle_one_counts_and_none_of_long_ago() -> None:
    meter = LinkMeter()
    for peer, rate in (("a", 1e6), ("b", 2e6), ("c", 1e9)):
        ended_s = burst(meter, peer, 0.0, rate)
    ended_s = burst(meter, "late", 100.0, 5e6)
    assert meter.bytes_per_s(ended_s) == pytest.approx(3.5e6)
    assert meter.bytes_per_s(ended_s + FRESH_S) == pytest.approx(5e6)
    assert meter.bytes_per_s(ended_s + FRESH_S + 1.0) is None


def test_an_answer_that_broke_off_and_a_flood_of_peers_leave_the_rest_as_it_is() -> None:
    meter = LinkMeter()
    meter.ended("nobody", BURST_BYTES, 1.0)
    ended_s = burst(meter, "node", 0.0, 4e6)
    meter.began("node", ended_s)
    meter.ended("node", 0, ended_s)
    assert meter.bytes_per_s(ended_s) == pytest.approx(4e6)
    for number in range(2 * MOST_PEERS):
        meter.began(f"peer-{number}", ended_s)
    assert len(meter) == MOST_PEERS


@pytest.fixture(scope="module")
def step() -> ModelStep:
    """Return a step in which the largest tensor does not change, so the sample is another one."""
    made = adam_step(256, 1024, rate_for(0.02), seed=1)
    still = TensorBits("still", "bfloat16", (512, 1024), np.zeros(512 * 1024, "<u2"))
    return {"still": still, "w": made.old}, {"still": still, "w": made.new}


def ticking() -> Iterator[float]:
    """Each look at the clock is later than the one before by more: compact encodes for longer."""
    return itertools.accumulate(itertools.count(0.001, 0.001))


@pytest.mark.parametrize(
    ("choice", "link_bytes_s", "level"),
    [
        ("auto", None, Level.FAST),
        ("auto", 1e6, Level.COMPACT),
        ("auto", 1e12, Level.FAST),
        ("fast", 1e6, Level.FAST),
        ("compact", 1e12, Level.COMPACT),
        ("compact", None, Level.COMPACT),
    ],
)
def test_a_slow_link_gets_few_bytes_a_fast_one_little_work_and_an_unknown_one_too(
    step: ModelStep,
    choice: str,
    link_bytes_s: float | None,
    level: Level,
) -> None:
    seconds = ticking()
    assert level_for(choice, link_bytes_s, *step, lambda: next(seconds)) is level  # type: ignore[arg-type]


def test_where_nothing_changes_nothing_is_tried_and_a_level_that_is_none_is_refused(
    step: ModelStep,
) -> None:
    assert level_for("auto", 1e6, step[0], step[0]) is Level.FAST
    with pytest.raises(ValueError, match="smallest"):
        level_for("smallest", None, *step)  # type: ignore[arg-type]


async def test_a_publisher_encodes_for_the_link_that_its_server_saw(
    tmp_path: Path,
    step: ModelStep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = WeightPublisher("job", "127.0.0.1:1", tmp_path, free_port(), SigningKey.generate())
    announced = []

    async def announce(ask: object, timeout_s: float) -> pb.RegisterJobReply:
        announced.append(ask)
        return pb.RegisterJobReply()

    monkeypatch.setattr(publisher._scheduler, "call", announce)
    await publisher.start()
    announced.clear()
    old, new = step
    unknown = await publisher.publish(1, 0, old, new)
    monkeypatch.setattr(VersionServer, "link_bytes_s", 1000.0)
    slow = await publisher.publish(2, 1, new, old)
    assert (unknown.level, slow.level) == (Level.FAST, Level.COMPACT)
    assert slow.wire_bytes < unknown.wire_bytes
    codecs = [
        {chunk.codec for chunk in ChunkStore(tmp_path).get_manifest(version).chunks}
        for version in (1, 2)
    ]
    assert codecs == [{"sparse"}, {"compact"}]
    assert len(announced) == 2
    await publisher.close()


async def test_what_readers_take_of_a_server_is_measured(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    name = store.put(bytes(4 * MIB))
    small = [store.put(bytes([index]) * SMALL_BYTES) for index in range(64)]
    server = VersionServer(store, free_port())
    meter = server._meter = Mock(wraps=LinkMeter())
    await server.start()
    assert server.link_bytes_s is None
    url, part = f"{server.url}/chunks/{name}", {"Range": f"bytes={MIB}-"}
    async with aiohttp.ClientSession() as session:
        for headers, size in (({}, 4 * MIB), (part, 3 * MIB)):
            async with session.get(url, headers=headers) as answer:
                assert len(await answer.read()) == size
        async with session.get(f"{server.url}/chunks/{'0' * 64}") as answer:
            assert answer.status == web.HTTPNotFound.status_code
        # Its answer has no body, so nothing is to be measured.
        async with session.head(url) as answer:
            assert answer.status == web.HTTPMethodNotAllowed.status_code
        assert server.link_bytes_s is None
        async with session.post(f"{server.url}/chunks", data=msgspec.json.encode(small)) as answer:
            assert len(await answer.read()) == 4 * MIB
    assert server.link_bytes_s is not None
    sizes = [size for (_, size, _), _ in meter.ended.call_args_list]
    assert (meter.began.call_count, sizes) == (3, [4 * MIB, 3 * MIB, 4 * MIB])
    await server.close()
