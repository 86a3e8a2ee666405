"""A stand-alone relay: a folder, an origin, fixed members; who waits in its line hears so."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from prometheus_client import generate_latest

from rose.cli.main import main as rose
from rose.errors import ConfigError
from rose.weight_distribution import Relay, VersionServer
from rose.weight_distribution.relay import FollowedJob, followed_jobs
from rose.weight_distribution.relay_metrics import RelayMetrics
from weight_transfer import ChunkStore, Manifest, SigningKey, TensorBits, VersionPublisher
from weight_transfer import serve as forwarding
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version
from weight_transfer.fetch.limits import MOST_PEERS, READER_S, Answer, Asked, Source, Traffic
from weight_transfer.fetch.relay_order import Route, order

KEY = SigningKey.generate()


def published(
    root: Path, chunk_bytes: int = 100_000, job: str = "job", key: SigningKey = KEY
) -> tuple[ChunkStore, Manifest]:
    rng = np.random.default_rng(len(job))
    old, new = (
        {"w": TensorBits("w", "bfloat16", (400, 500), rng.integers(0, 1 << 16, 200_000, "<u2"))}
        for _ in range(2)
    )
    store = ChunkStore(root)
    return store, VersionPublisher(store, job, "trainer", key, chunk_bytes).publish(1, 0, old, new)


async def test_relays_with_fixed_members_share_the_origin(
    tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    store, manifest = published(tmp_path / "origin")
    origin = VersionServer(store, unused_tcp_port_factory())
    await origin.start()
    ports = [unused_tcp_port_factory() for _ in range(2)]
    members = [f"http://127.0.0.1:{port}" for port in ports]
    relays = [
        Relay(
            tmp_path / str(port),
            [FollowedJob("job", origin.url, KEY.verify_key)],
            "127.0.0.1",
            port,
            members,
        )
        for port in ports
    ]
    async with relays[0], relays[1], aiohttp.ClientSession() as session:
        assert [relay.url for relay in relays] == members
        fetcher = ChunkFetcher(
            session, DownloadLimits(ChunkStore(tmp_path / "node"), Caps()), "", members
        )
        fetched = await fetch_version(
            fetcher, origin.url, "job", 1, KEY.verify_key, lambda _: None, set()
        )
        assert fetched.wire_bytes == manifest.wire_bytes + len(manifest.to_bytes())
        for relay in relays:
            mine = {r.id for r in manifest.chunks if order(members, r.id)[0] == relay.url}
            held = {path.name for path in relay.fetcher.receiving.store.chunks_dir.iterdir()}
            assert held == mine, "each fetched its share, and nothing else"
    await origin.close()


async def test_a_relay_counts_what_crosses_it(
    tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    store, manifest = published(tmp_path / "origin")
    origin = VersionServer(store, unused_tcp_port_factory())
    await origin.start()
    port = unused_tcp_port_factory()
    relay = Relay(
        tmp_path / "relay",
        [FollowedJob("job", origin.url, KEY.verify_key)],
        "127.0.0.1",
        port,
    )
    async with relay, aiohttp.ClientSession() as session:
        for reader in ("one", "two"):
            limits = DownloadLimits(ChunkStore(tmp_path / reader), Caps())
            fetcher = ChunkFetcher(session, limits, "", [relay.url])
            await fetch_version(
                fetcher, origin.url, "job", 1, KEY.verify_key, lambda _: None, set()
            )
        async with session.get(f"{relay.url}/chunks/{'0' * 64}") as answer:
            assert answer.status == 404
    await origin.close()
    traffic = relay.fetcher.receiving.traffic
    assert traffic.fetched_bytes == {Source.PUBLISHER: manifest.wire_bytes}
    assert traffic.served_bytes == 2 * manifest.wire_bytes
    assert traffic.answers[Asked.CHUNK, Answer.SENT] == 2 * len(manifest.chunks)
    assert traffic.answers[Asked.CHUNK, Answer.MISSING] == 1
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
    assert traffic.answers[Asked.MANIFEST, Answer.FAILED] == 1


async def test_a_relay_serves_the_version_of_the_job_that_is_asked_for(
    tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    jobs = {"grpo": SigningKey.generate(), "a/b ä": SigningKey.generate()}
    origins, manifests = [], {}
    for number, (job, key) in enumerate(jobs.items()):
        store, manifests[job] = published(tmp_path / f"origin-{number}", job=job, key=key)
        origins.append(VersionServer(store, unused_tcp_port_factory()))
        await origins[-1].start()
    follows = [
        FollowedJob(job, origin.url, key.verify_key)
        for origin, (job, key) in zip(origins, jobs.items(), strict=True)
    ]
    port = unused_tcp_port_factory()
    members = [f"http://127.0.0.1:{port}"]
    first, *others = follows
    relay = Relay(
        tmp_path / "relay",
        [*others, first],
        "127.0.0.1",
        port,
        members,
    )
    async with relay, aiohttp.ClientSession() as session:
        receiving = DownloadLimits(ChunkStore(tmp_path / "node"), Caps())
        fetcher = ChunkFetcher(session, receiving, "", members)
        for _ in range(2):  # once from the relay's memory, once from its folder as well
            for each in follows:
                # An object that the relay lacks would come from here, where nothing listens.
                fetched = await fetch_version(
                    fetcher,
                    "http://127.0.0.1:9",
                    each.job,
                    1,
                    each.verify_key,
                    lambda _: None,
                    set(),
                )
                assert fetched.manifest.job == each.job
                assert fetched.manifest.chunks == manifests[each.job].chunks
            fetcher = ChunkFetcher(session, receiving, "", members)
        async with session.get(f"{members[0]}/manifests/1?job=nobodys") as answer:
            assert answer.status == 404
            assert "of job 'nobodys'" in await answer.text()
    for origin in origins:
        await origin.close()


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
    tmp_path: Path,
    unused_tcp_port_factory: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "IN_LINE_S", 0.05)
    store, manifest = published(tmp_path / "origin")
    origin = VersionServer(store, unused_tcp_port_factory())
    await origin.start()
    ref, port = manifest.chunks[0], unused_tcp_port_factory()
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        relay = ChunkFetcher(
            session, DownloadLimits(ChunkStore(tmp_path / "relay"), Caps()), url, [url]
        )
        server = VersionServer(relay.receiving.store, port, fetcher=relay)
        await server.start()
        await relay.manifest("job", 1, origin.url, None)
        node = ChunkFetcher(
            session, DownloadLimits(ChunkStore(tmp_path / "node"), Caps()), "", [url]
        )
        await node.manifest("job", 1, "http://127.0.0.1:9", None)
        for _ in range(4):
            await relay._gate.acquire()  # Four others cross the slow link.
        waiting = asyncio.create_task(node.obtain(ref))
        async with session.get(f"{url}/chunks/{ref.id}") as answer:
            assert answer.status == 202
        assert not waiting.done()
        for _ in range(4):
            relay._gate.release()
        assert await waiting == ref.encoded_bytes
        for fetcher in (relay, node):
            await fetcher.close()
            fetcher.receiving.close()
        await server.close()
    await origin.close()


def test_a_route_asks_up_first_then_the_two_below_then_the_origin() -> None:
    members = [f"http://node-{n}" for n in range(6)]
    ranked = order(members, "x")
    route = Route.of("x", ranked[2], members, "http://origin")
    assert route.before == tuple(ranked[:2])
    assert route.holders == tuple(ranked[3:5])
    assert route.sources == (*ranked[:2], *ranked[3:5], "http://origin")
    assert Route.of("x", "", members, "o").before == tuple(ranked), "it passes nothing on"
    assert Route.of("x", ranked[0], [], "o").sources == ("o",)


def test_the_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["relay", "--store", str(tmp_path), "--origin", "http://o", "--job", "j"]
    assert rose(words) == 2
    assert "--port" in capsys.readouterr().err
    assert rose([*words, "--port", "1"]) == 2
    assert "--verify-key is missing" in capsys.readouterr().err
    words.append("--unsigned")
    assert rose([*words, "--port", "1", "--host", "0.0.0.0"]) == 2
    assert "reached from other machines" in capsys.readouterr().err
    ca = tmp_path / "ca.pem"
    assert rose([*words, "--port", "1", "--ca", str(ca)]) == 2
    assert "all three or none" in capsys.readouterr().err
    pair = ["--certificate", str(ca), "--key", str(ca)]
    assert rose([*words, "--port", "1", "--ca", str(ca), *pair]) == 2
    assert "ca.pem is missing" in capsys.readouterr().err


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path, unused_tcp_port: int) -> None:
    words = ["--store", str(tmp_path), "--origin", "http://127.0.0.1:9", "--job", "j"]
    words.append("--unsigned")
    process = subprocess.Popen(
        [sys.executable, "-m", "rose.cli", "relay", *words, "--port", str(unused_tcp_port)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    assert f"listening on http://127.0.0.1:{unused_tcp_port}" in process.stderr.readline()
    process.terminate()
    assert process.wait(10) == 0
    process.stderr.close()


async def test_a_relay_that_knows_nothing_yet_serves_a_late_joiner(
    tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """A restart forgets every manifest: the caller names the one that it means."""
    store, manifest = published(tmp_path / "origin")
    origin = VersionServer(store, unused_tcp_port_factory())
    await origin.start()
    port = unused_tcp_port_factory()
    async with (
        Relay(
            tmp_path / "relay", [FollowedJob("job", origin.url, None)], "127.0.0.1", port
        ) as relay,
        aiohttp.ClientSession() as session,
    ):
        name = manifest.chunks[0].id
        async with session.get(
            f"{relay.url}/chunks/{name}", headers={"Rose-Manifest": "manifests/1"}
        ) as answer:
            assert await answer.read() == store.get(name)
        for path in ("manifests/1", "../manifests/1"):
            name = "00" * 32
            async with session.get(
                f"{relay.url}/chunks/{name}", headers={"Rose-Manifest": path}
            ) as answer:
                assert answer.status == 404
    await origin.close()
