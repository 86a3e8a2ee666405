"""Whatever a peer says or sends ends one fetch or one request, never the process that hears it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from rose.addresses import free_port
from rose.weight_distribution import Credentials, VersionServer
from tests.harness.waiting import PATIENCE_S
from weight_transfer import (
    ChunkRef,
    ChunkStore,
    Manifest,
    SignatureError,
    SigningKey,
    TensorBits,
    VerifyKey,
    VersionPublisher,
)
from weight_transfer.catalog import ReadLeases
from weight_transfer.errors import FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, PublisherClient, fetch_version
from weight_transfer.fetch import fetcher as fetcher_module
from weight_transfer.serve import Signer

KEY = SigningKey.from_hex("08" * 32)
NO_ADDRESSES = (
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
)


def tensors(step: int) -> dict[str, TensorBits]:
    bits = np.arange(64 * 64, dtype="<u2")
    bits[::5] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


class Publishing:
    """A publisher's store, and its server."""

    def __init__(self, root: Path) -> None:
        self.now_s = time.time()
        self.store = ChunkStore(root)
        self.publisher = VersionPublisher(
            self.store, "job", "trainer", KEY, chunk_bytes=1_024, clock=lambda: self.now_s
        )
        self.publisher.publish_base(1, tensors(1))
        self.server = VersionServer(
            self.store, free_port(), leases=ReadLeases(0.0), signer=Signer("job", KEY)
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr("weight_transfer.fetch.download.RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(fetcher_module, "KNOWN_WITHIN_S", 0.2)


@pytest.fixture
async def publishing(tmp_path: Path) -> AsyncIterator[Publishing]:
    publishing = Publishing(tmp_path / "origin")
    await publishing.server.start()
    yield publishing
    await publishing.server.close()


@contextlib.asynccontextmanager
async def fetcher_at(folder: Path) -> AsyncIterator[ChunkFetcher]:
    async with aiohttp.ClientSession() as session:
        fetcher = ChunkFetcher(session, DownloadLimits(ChunkStore(folder), Caps()))
        yield fetcher
        await fetcher.close()
        fetcher.receiving.close()


@pytest.mark.parametrize("url", NO_ADDRESSES)
async def test_an_address_that_nobody_can_reach_fails_one_fetch(url: str, tmp_path: Path) -> None:
    async with fetcher_at(tmp_path) as fetcher:
        key = KEY.verify_key
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


@contextlib.asynccontextmanager
async def following_many(
    publishing: Publishing, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ChunkFetcher]:
    """A fetcher that follows a job of eight versions and keeps the manifests of three."""
    monkeypatch.setattr(fetcher_module, "KNOWN_VERSIONS", 3)
    for version in range(2, 9):
        publishing.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))
    async with fetcher_at(folder) as fetcher:
        fetcher.follow("job", publishing.server.url, KEY.verify_key)
        yield fetcher


async def test_chunks_of_a_version_come_however_many_others_are_asked_for(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base over a slow link, while neighbours ask a relay for more versions than it keeps."""
    async with following_many(publishing, tmp_path / "node", monkeypatch) as fetcher:
        url = publishing.server.url
        with fetcher.keeping("job", 1, base=True):
            manifest, _ = await fetcher.manifest("job", 1, url, KEY.verify_key, base=True)
            first, *rest = manifest.chunks
            await fetcher.obtain(first)
            for version in range(2, 9):
                assert await fetcher.known_manifest(f"manifests/{version}")
            for ref in rest:
                await fetcher.obtain(ref)
        assert await fetcher.known_manifest("manifests/8")
        store = fetcher.receiving.store
        for ref in manifest.chunks:
            (store.chunks_dir / ref.id).unlink()
        for version in range(2, 9):
            assert await fetcher.known_manifest(f"manifests/{version}")
        with pytest.raises(FetchError, match="no manifest that is known here"):
            await fetcher.obtain(first)


async def test_a_version_that_is_fetched_stays_known_until_it_is_here(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following_many(publishing, tmp_path / "node", monkeypatch) as fetcher:
        url = publishing.server.url
        obtain, asked = fetcher.obtain, iter([range(2, 9)])

        async def crowded(ref: ChunkRef, on_reject: Callable[[str], None]) -> int:
            for version in next(asked, ()):
                assert await fetcher.known_manifest(f"manifests/{version}")
            return await obtain(ref, on_reject)

        monkeypatch.setattr(fetcher, "obtain", crowded)
        fetched = await fetch_version(
            fetcher, url, "job", 1, KEY.verify_key, lambda _: None, set(), base=True
        )
        store = fetcher.receiving.store
        assert all(store.has(ref.id) for ref in fetched.manifest.chunks)


async def test_a_neighbour_that_sends_another_manifest_is_passed_over(
    publishing: Publishing, tmp_path: Path
) -> None:
    """Only the publisher's own word that a version is not signed ends the matter."""
    forged = Publishing(tmp_path / "forged")
    stranger = SigningKey.generate()
    manifest = forged.store.get_manifest(1, base=True).signed(stranger)
    forged.store.manifest_path(1, base=True).write_bytes(manifest.to_bytes())
    await forged.server.start()
    async with fetcher_at(tmp_path / "node") as fetcher:
        fetcher.enrol([forged.server.url])
        url = publishing.server.url
        found, _ = await fetcher.manifest("job", 1, url, KEY.verify_key, base=True)
        assert found == publishing.store.get_manifest(1, base=True)
        with pytest.raises(SignatureError):
            await fetcher.manifest("job", 1, forged.server.url, KEY.verify_key, base=True)
    await forged.server.close()


async def test_what_nobody_expected_of_a_peer_ends_one_fetch(
    publishing: Publishing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fetcher_at(tmp_path) as fetcher:
        url, key = publishing.server.url, KEY.verify_key

        def broken(raw: bytes, verify_key: VerifyKey | None = None) -> Manifest:
            raise RuntimeError("two\nlines")

        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "from_bytes", broken)
            with pytest.raises(FetchError, match="RuntimeError"):
                await fetcher.manifest("job", 1, url, key, base=True)
        assert await fetcher.manifest("job", 1, url, key, base=True), "and the next one goes well"


async def test_a_version_that_was_signed_anew_reaches_a_node_through_a_relay(
    publishing: Publishing, tmp_path: Path
) -> None:
    """A day without a new version: a replica that starts now gets to the newest all the same."""
    publishing.now_s -= 3 * 24 * 3600.0
    publishing.publisher.publish(2, 1, tensors(1), tensors(2))
    url, key = publishing.server.url, KEY.verify_key
    async with fetcher_at(tmp_path / "relay") as relay:
        relay.follow("job", url, key)
        server = VersionServer(relay.receiving.store, free_port(), fetcher=relay)
        await server.start()
        held = await fetch_version(
            relay, url, "job", 2, key, lambda _: None, set(), on_the_way=True
        )
        assert time.time() > held.manifest.expires_s
        publishing.now_s = time.time()
        assert publishing.publisher.renew() == (2,)
        async with fetcher_at(tmp_path / "node") as node:
            node.enrol([server.url])
            fetched = await fetch_version(node, url, "job", 2, key, lambda _: None, set())
            assert fetched.manifest.expires_s > time.time()
        await server.close()


SAID = {
    "another token": b"Bearer other",
    "no UTF-8": b"Bearer \xff\xfe",
    "no ASCII": "Bearer ü".encode(),
    "nothing": b"",
}


async def answer_to(port: int, request: bytes) -> bytes:
    """The first line of what a server answers to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(PATIENCE_S):
        line = await reader.readline()
    writer.close()
    return line


@pytest.mark.parametrize("shown", SAID.values(), ids=SAID)
async def test_a_token_that_is_no_text_is_a_wrong_one(shown: bytes, tmp_path: Path) -> None:
    port = free_port()
    server = VersionServer(ChunkStore(tmp_path), port, credentials=Credentials("tok"))
    await server.start()
    request = b"GET /catalog HTTP/1.1\r\nHost: localhost\r\nAuthorization: %s\r\n\r\n" % shown
    assert b" 401 " in await answer_to(port, request)
    await server.close()


@pytest.mark.parametrize(
    "path",
    ["manifests/1%0a", "manifests/\u0661", "chunks/" + "a" * 64 + "%0a", "chunks/..%2f..%2fx"],
)
async def test_paths_that_name_nothing_are_not_found(path: str, publishing: Publishing) -> None:
    port = int(publishing.server.url.rsplit(":", 1)[1])
    request = f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    assert (await answer_to(port, request))[9:12] in (b"400", b"404")


async def test_what_is_no_http_is_answered_and_leaves_no_traceback(
    publishing: Publishing, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(publishing.server.url.rsplit(":", 1)[1])
    request = b"GET /catalog HTTP/1.1\r\nname without colon\r\n\r\n"
    assert (await answer_to(port, request))[9:12] == b"400"
    assert not caplog.records
