"""A version arrives whole or not at all; whatever a peer sends ends one fetch or one request."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import AsyncMock

import aiohttp
import msgspec
import pytest

from bench.demo.faulty_trainer import CorruptServer
from rose.addresses import free_port
from rose.weight_distribution import Credentials, VersionServer
from tests.harness.waiting import PATIENCE_S
from tests.harness.weight_peers import (
    KEY,
    fetched,
    published,
    reading,
    serving,
    tensors,
)
from weight_transfer import (
    ChunkRef,
    ChunkStore,
    Manifest,
    SignatureError,
    SigningKey,
    VerifyKey,
    VersionPublisher,
    WeightError,
)
from weight_transfer import serve as serve_module
from weight_transfer.catalog import ReadLeases
from weight_transfer.errors import FetchError
from weight_transfer.fetch import ChunkFetcher, PublisherClient
from weight_transfer.fetch import fetcher as fetcher_module
from weight_transfer.fetch.download import Download
from weight_transfer.fetch.limits import Asked, ReplyKind
from weight_transfer.serve import Signer


async def test_a_corrupted_chunk_is_noticed_and_fetched_again(tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "from")
    server, rejected = CorruptServer(store, free_port()), list[str]()
    server.every = 2
    async with serving(server), reading(tmp_path / "to") as fetcher:
        found = await fetched(fetcher, server.url, rejected=rejected)
        assert rejected, "the control corrupts some chunks"
        assert all(fetcher.receiving.store.has(ref.id) for ref in manifest.chunks)
    assert found.wire_bytes > manifest.wire_bytes


async def test_small_chunks_come_with_one_request_and_two_replicas_share_it(tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "from")
    assert len(manifest.chunks) > 3
    async with serving(store) as server, reading(tmp_path / "to") as fetcher:
        first, second = await asyncio.gather(*(fetched(fetcher, server.url) for _ in range(2)))
        once = manifest.wire_bytes + store.manifest_path(1).stat().st_size
        assert first.wire_bytes + second.wire_bytes == once
        assert server._traffic.answers[Asked.CHUNK, ReplyKind.SENT] == 1
        assert server._traffic.served_bytes == manifest.wire_bytes
        assert all(fetcher.receiving.store.get(ref.id) for ref in manifest.chunks)


@pytest.mark.parametrize("lack", ["the route", "a chunk"])
async def test_small_chunks_come_alone_where_they_do_not_come_together(
    tmp_path: Path, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = published(tmp_path / "from")
    if lack == "the route":
        monkeypatch.setattr(serve_module, "MOST_BODY_BYTES", 1)
    else:
        missing = manifest.chunks[0].id
        (store.chunks_dir / missing).unlink()
    async with serving(store) as server, reading(tmp_path / "to") as fetcher:
        if lack == "the route":
            await fetched(fetcher, server.url)
        else:
            with pytest.raises(FetchError, match=missing):
                await fetched(fetcher, server.url)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no JSON", 400),
        (b'["../manifests/1.manifest"]', 400),
        (msgspec.json.encode(["0" * 64] * (fetcher_module.MOST_TOGETHER + 1)), 400),
        (msgspec.json.encode(["0" * 64]), 404),
        (b'"' + b"0" * (1 << 15) + b'"', 413),
    ],
)
async def test_chunks_together_are_asked_for_by_name(
    tmp_path: Path, body: bytes, status: int
) -> None:
    store, _ = published(tmp_path)
    async with (
        serving(store) as server,
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/chunks", data=body) as reply,
    ):
        assert reply.status == status


async def test_a_long_chunk_is_not_sent_together(tmp_path: Path) -> None:
    store, _ = published(tmp_path)
    names = [store.put(bytes(fetcher_module.SMALL_BYTES + more)) for more in (0, 1)]
    async with serving(store) as server, aiohttp.ClientSession() as session:
        for name, status in zip(names, (200, 404), strict=True):
            async with session.post(f"{server.url}/chunks", json=[name]) as reply:
                assert reply.status == status


class JoblessStore(ChunkStore):
    """Store that serves whichever version has the number."""

    def manifest_bytes(self, job: str, version: int, *, base: bool = False) -> bytes | None:
        return super().manifest_bytes("", version, base=base)


class LongStore(ChunkStore):
    """Store whose chunks are longer than their manifests say."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for path in self.chunks_dir.iterdir():
            path.write_bytes(path.read_bytes() + bytes(1 << 20))


@pytest.mark.parametrize(
    ("store", "asked", "kind", "said"),
    [
        (ChunkStore, {"key": SigningKey.generate()}, SignatureError, "does not match key"),
        (ChunkStore, {"version": 9}, FetchError, "cannot be fetched"),
        (ChunkStore, {"job": "mine"}, FetchError, "HTTP 404"),
        (JoblessStore, {"job": "mine"}, FetchError, "version 1 of mine, was given one of job"),
        (LongStore, {}, FetchError, "sends more than"),
    ],
    ids=["another trainer", "not there", "another job", "a server without jobs", "too long"],
)
async def test_another_version_than_was_asked_for_is_refused_in_one_line(
    tmp_path: Path, store: type[ChunkStore], asked: dict, kind: type[WeightError], said: str
) -> None:
    published(tmp_path / "from")
    async with serving(store(tmp_path / "from")) as server, reading(tmp_path / "to") as fetcher:
        with pytest.raises(kind, match=said) as refused:
            await fetched(fetcher, server.url, **asked)
    assert "\n" not in str(refused.value)


class Publishing:
    """A publisher of a base, and its server, which is to be started."""

    def __init__(self, root: Path) -> None:
        self.now_s = time.time()
        self.store = ChunkStore(root)
        self.publisher = VersionPublisher(
            self.store, "job", "trainer", KEY, chunk_bytes=1_024, clock=lambda: self.now_s
        )
        self.publisher.publish_base(1, tensors(1))
        signer = Signer("job", KEY)
        self.server = VersionServer(self.store, free_port(), leases=ReadLeases(0.0), signer=signer)


@pytest.fixture
async def publishing(tmp_path: Path) -> AsyncIterator[Publishing]:
    publishing = Publishing(tmp_path / "origin")
    async with serving(publishing.server):
        yield publishing


@pytest.mark.parametrize(
    "url",
    [
        "http://" + "a" * 64 + "/",
        "http://a..b",
        "http://.",
        "http://[::1",
        "http://host:99999",
        "http://",
        "",
        "x",
        "unix:///tmp/x",
        "http://\ufffd",
        "http://127.0.0.1:1/\x00",
        "http://%zz",
    ],
)
async def test_an_address_that_nobody_can_reach_fails_one_fetch(url: str, tmp_path: Path) -> None:
    key = KEY.verify_key
    async with reading(tmp_path) as fetcher:
        with pytest.raises(FetchError, match="cannot be fetched") as said:
            await fetcher.manifest("job", 1, url, key)
        assert "\n" not in str(said.value)
        fetcher.enrol([url])
        with pytest.raises(FetchError, match="cannot be fetched"):
            await fetcher.manifest("job", 1, "http://127.0.0.1:9", key)
    async with aiohttp.ClientSession() as session:
        reader = PublisherClient(session, "node", key)
        with pytest.raises(FetchError):
            await reader.catalog(url, "job")
        async with reader.lease(url, "r0", 1):
            pass


@pytest.fixture
async def following_many(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ChunkFetcher]:
    """A fetcher that follows a job of eight versions and keeps the manifests of three."""
    monkeypatch.setattr(fetcher_module, "KNOWN_VERSIONS", 3)
    for version in range(2, 9):
        publishing.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))
    async with reading(tmp_path / "node") as fetcher:
        fetcher.follow("job", publishing.server.url, KEY.verify_key)
        yield fetcher


async def ask_for_others(fetcher: ChunkFetcher) -> None:
    for version in range(2, 9):
        assert await fetcher.known_manifest(f"manifests/{version}")


async def test_chunks_of_a_version_come_however_many_others_are_asked_for(
    publishing: Publishing, following_many: ChunkFetcher
) -> None:
    """A base over a slow link, while neighbours ask a relay for more versions than it keeps."""
    fetcher, store = following_many, following_many.receiving.store
    with fetcher.keeping("job", 1, base=True):
        url = publishing.server.url
        manifest, _ = await fetcher.manifest("job", 1, url, KEY.verify_key, base=True)
        first, *rest = manifest.chunks
        await fetcher.obtain(first)
        await ask_for_others(fetcher)
        for ref in rest:
            await fetcher.obtain(ref)
    assert await fetcher.known_manifest("manifests/8")
    for ref in manifest.chunks:
        (store.chunks_dir / ref.id).unlink()
    await ask_for_others(fetcher)
    with pytest.raises(FetchError, match="no manifest that is known here"):
        await fetcher.obtain(first)


async def test_a_version_that_is_fetched_stays_known_until_it_is_here(
    publishing: Publishing, following_many: ChunkFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain, asked = following_many.obtain, list[ChunkRef]()

    async def crowded(ref: ChunkRef, on_reject: Callable[[str], None]) -> int:
        asked.append(ref)
        if len(asked) == 1:
            await ask_for_others(following_many)
        return await obtain(ref, on_reject)

    monkeypatch.setattr(following_many, "obtain", crowded)
    found = await fetched(following_many, publishing.server.url, base=True)
    assert all(following_many.receiving.store.has(ref.id) for ref in found.manifest.chunks)


async def test_a_neighbour_that_sends_another_manifest_is_passed_over(
    publishing: Publishing, tmp_path: Path
) -> None:
    """Only the publisher's own word that a version is not signed ends the matter."""
    forged = Publishing(tmp_path / "forged")
    manifest = forged.store.get_manifest(1, base=True).signed(SigningKey.generate())
    forged.store.manifest_path(1, base=True).write_bytes(manifest.to_bytes())
    async with serving(forged.server), reading(tmp_path / "node", [forged.server.url]) as fetcher:
        url = publishing.server.url
        found, _ = await fetcher.manifest("job", 1, url, KEY.verify_key, base=True)
        assert found == publishing.store.get_manifest(1, base=True)
        with pytest.raises(SignatureError):
            await fetcher.manifest("job", 1, forged.server.url, KEY.verify_key, base=True)


async def test_what_nobody_expected_of_a_peer_ends_one_fetch(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(raw: bytes, verify_key: VerifyKey | None = None) -> Manifest:
        raise RuntimeError("two\nlines")

    async with reading(tmp_path / "node") as fetcher:
        url, key = publishing.server.url, KEY.verify_key
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "from_bytes", broken)
            with pytest.raises(FetchError, match="RuntimeError"):
                await fetcher.manifest("job", 1, url, key, base=True)
        manifest, _ = await fetcher.manifest("job", 1, url, key, base=True)
        ref = manifest.chunks[0]
        with monkeypatch.context() as patch:
            patch.setattr(Download, "run", AsyncMock(side_effect=RuntimeError("two\nlines")))
            with pytest.raises(FetchError, match="RuntimeError"):
                await fetcher.obtain(ref)
        assert await fetcher.obtain(ref) == ref.encoded_bytes, "the next one goes well"


async def test_a_version_that_was_signed_anew_reaches_a_node_through_a_relay(
    publishing: Publishing, tmp_path: Path
) -> None:
    """A day without a new version: a replica that starts now gets to the newest all the same."""
    publishing.now_s -= 3 * 24 * 3600.0
    publishing.publisher.publish(2, 1, tensors(1), tensors(2))
    url = publishing.server.url
    async with (
        reading(tmp_path / "relay") as relay,
        serving(relay.receiving.store, fetcher=relay) as server,
        reading(tmp_path / "node", [server.url]) as node,
    ):
        relay.follow("job", url, KEY.verify_key)
        held = await fetched(relay, url, 2, on_the_way=True)
        assert time.time() > held.manifest.expires_s
        publishing.now_s = time.time()
        assert publishing.publisher.renew() == (2,)
        assert (await fetched(node, url, 2)).manifest.expires_s > time.time()


async def answer_to(server: VersionServer, request: bytes) -> bytes:
    """Return the first line of the answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.url.rsplit(":", 1)[1])
    writer.write(request)
    async with asyncio.timeout(PATIENCE_S):
        line = await reader.readline()
    writer.close()
    return line


@pytest.mark.parametrize("shown", [b"Bearer other", b"Bearer \xff\xfe", "Bearer ü".encode(), b""])
async def test_a_token_that_is_no_text_is_a_wrong_one(shown: bytes, tmp_path: Path) -> None:
    request = b"GET /catalog HTTP/1.1\r\nHost: localhost\r\nAuthorization: %s\r\n\r\n" % shown
    async with serving(ChunkStore(tmp_path), credentials=Credentials("tok")) as server:
        assert b" 401 " in await answer_to(server, request)


@pytest.mark.parametrize(
    "path",
    ["manifests/1%0a", "manifests/\u0661", "chunks/" + "a" * 64 + "%0a", "chunks/..%2f..%2fx"],
)
async def test_paths_that_name_nothing_are_not_found(path: str, publishing: Publishing) -> None:
    request = f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    assert (await answer_to(publishing.server, request))[9:12] in (b"400", b"404")


async def test_what_is_no_http_is_answered_and_leaves_no_traceback(
    publishing: Publishing, caplog: pytest.LogCaptureFixture
) -> None:
    request = b"GET /catalog HTTP/1.1\r\nname without colon\r\n\r\n"
    assert (await answer_to(publishing.server, request))[9:12] == b"400"
    assert not caplog.records
