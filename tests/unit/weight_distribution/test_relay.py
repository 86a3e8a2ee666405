"""A stand-alone relay: a folder, an origin, fixed members; which member relays an object."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from rose.addresses import free_port
from rose.cli.main import main as rose
from rose.errors import ConfigError
from rose.weight_distribution import Relay, VersionServer
from rose.weight_distribution.relay import FollowedJob, followed_jobs
from rose.weight_distribution.relay_metrics import RelayMetrics
from tests.harness.weight_peers import KEY, fetched, published, reading, serving
from weight_transfer import SigningKey
from weight_transfer import serve as serve_module
from weight_transfer.fetch.download import CORRUPT_PAUSE_S, PeerScores, Route, order
from weight_transfer.fetch.limits import (
    MOST_PEERS,
    READER_S,
    Asked,
    ChunkSource,
    ReplyKind,
    Traffic,
)

NOWHERE = "http://127.0.0.1:9"


def relay_in(folder: Path, *jobs: FollowedJob, members: tuple[str, ...] = ()) -> Relay:
    """Return a relay at the first member's address, or at any."""
    port = int(members[0].rsplit(":", 1)[1]) if members else free_port()
    return Relay(folder / str(port), jobs, "127.0.0.1", port, members)


async def test_relays_with_fixed_members_share_the_origin(tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "origin")
    one, other = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    async with AsyncExitStack() as stack:
        origin = await stack.enter_async_context(serving(store))
        job = FollowedJob("job", origin.url, KEY.verify_key)
        relays = [
            await stack.enter_async_context(relay_in(tmp_path, job, members=members))
            for members in ((one, other), (other, one))
        ]
        assert [relay.url for relay in relays] == [one, other]
        fetcher = await stack.enter_async_context(reading(tmp_path / "node", [one, other]))
        found = await fetched(fetcher, origin.url)
        assert found.wire_bytes == manifest.wire_bytes + len(manifest.to_bytes())
        for relay in relays:
            mine = {r.id for r in manifest.chunks if order([one, other], r.id)[0] == relay.url}
            held = {path.name for path in relay.fetcher.receiving.store.chunks_dir.iterdir()}
            assert held == mine, "each fetched its share, and nothing else"


async def test_a_relay_counts_what_crosses_it(tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "origin")
    async with (
        serving(store) as origin,
        relay_in(tmp_path, FollowedJob("job", origin.url, KEY.verify_key)) as relay,
        aiohttp.ClientSession() as session,
    ):
        for reader in ("one", "two"):
            async with reading(tmp_path / reader, [relay.url]) as fetcher:
                await fetched(fetcher, origin.url)
        async with session.get(f"{relay.url}/chunks/{'0' * 64}") as answer:
            assert answer.status == 404
    traffic = relay.fetcher.receiving.traffic
    assert traffic.fetched_bytes == {ChunkSource.PUBLISHER: manifest.wire_bytes}
    assert traffic.served_bytes == 2 * manifest.wire_bytes
    assert traffic.answers[Asked.CHUNK, ReplyKind.SENT] == 2 * len(manifest.chunks)
    assert traffic.answers[Asked.CHUNK, ReplyKind.MISSING] == 1
    metrics = RelayMetrics(traffic, relay.fetcher.versions, None, lambda: 2)
    metrics.look()
    text = generate_latest(metrics.registry).decode()
    assert 'rose_relay_held_versions{job="job"} 1.0' in text
    assert 'rose_relay_newest_version{job="job"} 1.0' in text
    assert "rose_relay_readers 1.0" in text
    assert "rose_weights_damaged_files_total 2.0" in text


def test_readers_are_those_of_the_last_minute_and_bounded() -> None:
    now_s = 0.0
    traffic = Traffic(lambda: now_s)
    for number in range(MOST_PEERS + 3):
        traffic.answered(Asked.CHUNK, 200, f"peer-{number}")
    assert traffic.readers() == MOST_PEERS
    now_s = READER_S + 1
    traffic.answered(Asked.MANIFEST, 500, "peer")
    assert traffic.readers() == 1
    assert traffic.answers[Asked.MANIFEST, ReplyKind.FAILED] == 1


async def test_a_relay_serves_the_version_of_the_job_that_is_asked_for(tmp_path: Path) -> None:
    keys = {"grpo": SigningKey.generate(), "a/b ä": SigningKey.generate()}
    manifests, follows = {}, []
    async with AsyncExitStack() as stack:
        for number, (job, key) in enumerate(keys.items()):
            store, manifests[job] = published(tmp_path / f"origin-{number}", job=job, key=key)
            origin = await stack.enter_async_context(serving(store))
            follows.append(FollowedJob(job, origin.url, key.verify_key))
        relay = await stack.enter_async_context(relay_in(tmp_path, *follows[::-1]))
        for _ in range(2):  # once from the relay's memory, once from its folder as well
            async with reading(tmp_path / "node", [relay.url]) as fetcher:
                for job, key in keys.items():
                    # An object that the relay lacks would come from where nothing listens.
                    found = await fetched(fetcher, NOWHERE, job=job, key=key)
                    assert found.manifest.job == job
                    assert found.manifest.chunks == manifests[job].chunks
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.get(f"{relay.url}/manifests/1?job=nobodys") as answer:
            assert answer.status == 404
            assert "of job 'nobodys'" in await answer.text()


def test_each_job_of_a_relay_has_its_origin_and_its_key() -> None:
    key = KEY.verify_key.hex
    both = followed_jobs(["a", "b"], ["http://a/", "http://b"], [key])
    assert [(each.job, each.origin) for each in both] == [("a", "http://a"), ("b", "http://b")]
    assert all(each.verify_key is not None for each in both)
    for jobs, origins, keys in (
        (["a", "b"], ["http://a"], []),
        (["a", "a"], ["http://a", "http://a"], []),
        (["a"], ["http://a"], [key, key]),
    ):
        with pytest.raises(ConfigError, match=r"give (each|one)"):
            followed_jobs(jobs, origins, keys)


async def test_who_waits_in_line_is_neither_refused_nor_sent_to_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "IN_LINE_S", 0.05)
    store, manifest = published(tmp_path / "origin")
    ref, url = manifest.chunks[0], f"http://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        origin = await stack.enter_async_context(serving(store))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        relay = await stack.enter_async_context(reading(tmp_path / "relay", [url], me=url))
        node = await stack.enter_async_context(reading(tmp_path / "node", [url]))
        server = VersionServer(relay.receiving.store, int(url.rsplit(":", 1)[1]), fetcher=relay)
        await stack.enter_async_context(serving(server))
        await relay.manifest("job", 1, origin.url, None)
        await node.manifest("job", 1, NOWHERE, None)
        for _ in range(4):
            await relay._gate.acquire()  # Four others cross the slow link.
        waiting = asyncio.create_task(node.obtain(ref))
        async with session.get(f"{url}/chunks/{ref.id}") as answer:
            assert answer.status == 202
        assert not waiting.done()
        for _ in range(4):
            relay._gate.release()
        assert await waiting == ref.encoded_bytes


def test_a_route_asks_up_first_then_the_two_below_then_the_origin() -> None:
    members = [f"http://node-{n}" for n in range(6)]
    ranked = order(members, "x")
    route = Route.of("x", ranked[2], members, "http://origin")
    assert route.before == tuple(ranked[:2])
    assert route.holders == tuple(ranked[3:5])
    assert route.sources == (*ranked[:2], *ranked[3:5], "http://origin")
    assert Route.of("x", "", members, "o").before == tuple(ranked), "it passes nothing on"
    assert Route.of("x", ranked[0], [], "o").sources == ("o",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "--port"),
        ("--port 1", "--verify-key is missing"),
        ("--port 1 --unsigned --host 0.0.0.0", "reached from other machines"),
        ("--port 1 --unsigned --ca ca.pem", "all three or none"),
        ("--port 1 --unsigned --ca ca.pem --certificate c --key c", "ca.pem is missing"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    command = ["relay", "--store", str(tmp_path), "--origin", "http://o", "--job", "j"]
    assert rose([*command, *options.split()]) == 2
    assert words in capsys.readouterr().err


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path, unused_tcp_port: int) -> None:
    words = ["--store", str(tmp_path), "--origin", "http://127.0.0.1:9", "--job", "j"]
    words.append("--unsigned")
    process = subprocess.Popen(
        [sys.executable, "-m", "rose.cli", "relay", *words, "--port", str(unused_tcp_port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"ROSE_LOG_FORMAT": "json"},
    )
    assert process.stdout
    said = json.loads(process.stdout.readline())
    assert said["message"] == f"listening on http://127.0.0.1:{unused_tcp_port}"
    assert (said["level"], said["component"]) == ("info", "relay")
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


async def test_a_relay_that_knows_nothing_yet_serves_a_late_joiner(tmp_path: Path) -> None:
    """A restart forgets every manifest: the caller names the one that it means."""
    store, manifest = published(tmp_path / "origin")
    name = manifest.chunks[0].id
    async with (
        serving(store) as origin,
        relay_in(tmp_path, FollowedJob("job", origin.url, None)) as relay,
        aiohttp.ClientSession() as session,
    ):
        for chunk, path, status in (
            (name, "manifests/1", 200),
            ("00" * 32, "manifests/1", 404),
            ("00" * 32, "../manifests/1", 404),
        ):
            headers = {"Rose-Manifest": path}
            async with session.get(f"{relay.url}/chunks/{chunk}", headers=headers) as answer:
                assert answer.status == status
                assert status != 200 or await answer.read() == store.get(name)


MEMBERS = [f"http://node-{n}:1" for n in range(8)]


@given(st.sets(st.sampled_from(MEMBERS), min_size=2), st.text(max_size=9), st.data())
def test_a_member_that_goes_moves_nothing_of_the_others(
    members: set[str], name: str, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(members)))
    before = order(members, name)
    assert order(members - {gone}, name) == [member for member in before if member != gone]


def test_objects_spread_evenly() -> None:
    firsts = [order(MEMBERS, f"chunk-{n}")[0] for n in range(4_000)]
    counts = [firsts.count(member) for member in MEMBERS]
    assert min(counts) > 400
    assert max(counts) < 600


def test_who_failed_is_asked_last_for_a_while_and_longer_each_time() -> None:
    scores = PeerScores()
    scores.failed("a", 10.0)
    assert scores.ordered(["a", "b"], 10.1) == ["b", "a"]
    assert scores.ordered(["a", "b"], 10.6) == ["a", "b"]
    scores.failed("a", 10.6)
    assert scores.ordered(["a", "b"], 11.5) == ["b", "a"]
    scores.served("a", 100, 1.0, 10.6)
    scores.failed("a", 20.0)
    assert scores.ordered(["a", "b"], 20.6) == ["a", "b"], "forgiven once it served"
    scores.corrupt("a", 30.0)
    assert scores.ordered(["a", "b"], 30.0 + CORRUPT_PAUSE_S - 1) == ["b", "a"], "wrong bytes"
    assert scores.ordered(["a"], 31.0) == ["a"], "better than nobody"


def test_slow_is_said_only_beside_an_origin_that_is_fast_meanwhile() -> None:
    scores = PeerScores()
    assert not scores.dawdles("a", 1.0, "origin", 0.0)
    scores.served("b", 1_000_000, 1.0, 1.0)
    assert not scores.dawdles("a", 1.0, "origin", 0.0), "b may have had what a waits for"
    scores.served("origin", 1_000_000, 1.0, 2.0)
    assert scores.dawdles("a", 50_000, "origin", 1.0)
    assert not scores.dawdles("a", 500_000, "origin", 1.0)
    assert not scores.dawdles("a", 50_000, "origin", 2.0), "then nobody else was on the link"
    scores.served("origin", 1_000_000, 10.0, 3.0)
    assert not scores.dawdles("a", 50_000, "origin", 1.0), "many share it now"
    assert not scores.dawdles("origin", 1.0, "origin", 1.0), "nobody is behind it"
    scores.served("origin", 1_000, 1e-6, 9.0)
    assert not scores.dawdles("a", 50_000, "origin", 8.0), "a buffer on the way took that"
