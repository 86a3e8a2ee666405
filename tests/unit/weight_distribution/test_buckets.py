"""Versions come through a bucket as they come from a publisher: signed, resumed, collected."""

import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientTimeout

from bench.common.s3_server import BUCKET, S3Server, rclone
from rose.addresses import free_port
from rose.errors import ConfigError, NotAnnouncedError, RunFencedError, RunHeldError
from rose.weight_distribution import Credentials
from tests.fakes.memory_store import InMemoryStore
from tests.harness.training_runs import RunCluster
from tests.harness.weight_peers import KEY, fetched, published, publisher, tensors
from weight_transfer import ChunkStore, Manifest, SigningKey
from weight_transfer import bucket as bucket_module
from weight_transfer.bucket import Bucket
from weight_transfer.catalog import LONGEST_TTL_S, MOST_OF_A_PEER, ReadLeases
from weight_transfer.errors import BucketError, FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, PublisherClient
from weight_transfer.fetch.download import whole_reply
from weight_transfer.fetch.fetcher import SMALL_BYTES, encode_names
from weight_transfer.publish.bucket_copy import BucketCopy


class Place:
    """A bucket that tests write to: its URL, the folder that has its objects, and its server."""

    def __init__(self, url: str, folder: Path, server: S3Server | None = None) -> None:
        self.url, self.folder, self.server = url, folder, server

    @property
    def paths(self) -> set[str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)) for path in files}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if rclone() is None:
        pytest.skip("no rclone here, which is the S3 server of these tests")
    server = S3Server(tmp_path / "s3", free_port())
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.start()
    yield Place(f"s3://{BUCKET}/runs/job", server.folder / BUCKET / "runs/job", server)
    server.kill()


@pytest.fixture(params=["s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        found: Place = request.getfixturevalue("s3")
        return found
    return Place(f"file://{tmp_path}/share", tmp_path / "share")


@asynccontextmanager
async def reading_from(
    url: str, folder: Path
) -> AsyncIterator[tuple[ChunkFetcher, PublisherClient]]:
    """Have the fetcher and the client of a node that may read from one bucket."""
    session = Credentials().sources([url])
    fetcher = ChunkFetcher(session, DownloadLimits(ChunkStore(folder), Caps()))
    try:
        yield fetcher, PublisherClient(session, "node", KEY.verify_key)
    finally:
        await fetcher.close()
        fetcher.receiving.close()
        await session.close()


@pytest.fixture
def cluster(tmp_path: Path) -> RunCluster:
    return RunCluster(tmp_path / "runs", InMemoryStore(), free_port(), KEY)


def copy_of(store: ChunkStore, place: Place, job: str = "job", key: SigningKey = KEY) -> BucketCopy:
    return BucketCopy(store, place.url, job, key)


async def test_a_version_is_read_from_the_bucket_by_its_own_signature(
    place: Place, tmp_path: Path
) -> None:
    store, manifest = published(tmp_path / "root")
    publisher(tmp_path / "root").publish_base(1, tensors(1))
    copy = copy_of(store, place)
    await copy.start()
    await copy.publish()
    assert place.paths == {
        "catalog",
        "manifests/1",
        "manifests/1.base",
        *(f"chunks/{path.name}" for path in store.chunks_dir.iterdir()),
    }
    async with reading_from(place.url, tmp_path / "node") as (fetcher, client):
        assert await client.catalog(place.url, "job") == store.catalog()
        found = await fetched(fetcher, place.url)
        assert found.manifest == manifest
        assert found.wire_bytes == manifest.wire_bytes + manifest.size
        await fetched(fetcher, place.url, base=True)
        stranger = SigningKey.generate()
        with pytest.raises(Exception, match="sign"):
            await fetched(fetcher, place.url, key=stranger, job="job2")


async def test_chunks_are_copied_while_others_are_encoded(place: Place, tmp_path: Path) -> None:
    root = publisher(tmp_path / "root")
    copy = copy_of(root.store, place)
    await copy.start()
    seen: list[set[str]] = []

    def encode() -> Manifest:
        chunk = root.store.put(b"encoded first")
        end_s = time.monotonic() + 20
        while f"chunks/{chunk}" not in place.paths and time.monotonic() < end_s:
            time.sleep(0.01)
        seen.append(place.paths)
        return root.publish_base(1, tensors(1))

    manifest = await copy.during(encode)
    (paths,) = seen
    assert len(paths) == 1, "a chunk, and nothing that lists it"
    await copy.publish()
    assert {f"chunks/{ref.id}" for ref in manifest.chunks} < place.paths


async def test_a_bucket_that_fails_stops_no_encoding(tmp_path: Path) -> None:
    root, share = publisher(tmp_path / "root"), tmp_path / "share"
    copy = BucketCopy(root.store, f"file://{share}", "job", KEY)
    (share / "chunks").write_bytes(b"no folder")
    root.store.put(b"encoded before")
    assert (await copy.during(partial(root.publish_base, 1, tensors(1)))).version == 1
    with pytest.raises(BucketError, match="chunks"):
        await copy.publish()


async def test_a_chunk_that_broke_off_is_read_from_there(place: Place, tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "root")
    copy = copy_of(store, place)
    await copy.publish()
    chunk = max(manifest.chunks, key=lambda ref: ref.encoded_bytes)
    node = ChunkStore(tmp_path / "node")
    half = chunk.encoded_bytes // 2
    node.part_path(chunk.id).write_bytes(store.get(chunk.id)[:half])
    for ref in manifest.chunks:
        if ref.id != chunk.id:
            node.put(store.get(ref.id))
    async with reading_from(place.url, tmp_path / "node") as (fetcher, _):
        found = await fetched(fetcher, place.url)
    # rclone answers a range with status 200, so the chunk is read from its beginning.
    here = half if place.server is None else 0
    assert found.wire_bytes == chunk.encoded_bytes - here + manifest.size


async def test_a_damaged_object_is_refused_and_the_bucket_is_not_trusted(
    place: Place, tmp_path: Path
) -> None:
    store, manifest = published(tmp_path / "root")
    await copy_of(store, place).publish()
    victim = place.folder / "chunks" / manifest.chunks[0].id
    victim.write_bytes(bytes(victim.stat().st_size))
    rejected: list[str] = []
    async with reading_from(place.url, tmp_path / "node") as (fetcher, _):
        with pytest.raises(FetchError, match=victim.name):
            await fetched(fetcher, place.url, rejected=rejected)
    assert victim.name in rejected


async def test_what_a_reader_leases_stays_and_the_rest_is_collected(
    place: Place, tmp_path: Path
) -> None:
    publishing = publisher(tmp_path / "root")
    for version in range(1, 5):
        publishing.publish(version, version - 1, tensors(version - 1), tensors(version))
    publishing.publish_base(4, tensors(4))
    store = publishing.store
    copy = copy_of(store, place)
    await copy.start()
    await copy.publish()
    leases = ReadLeases(0.0)
    async with (
        reading_from(place.url, tmp_path / "node") as (_, client),
        client.lease(place.url, "r0", 2),
        client.lease(place.url, "r1", 1),
    ):
        (old,) = (place.folder / "leases/1").iterdir()
        (new,) = (place.folder / "leases/2").iterdir()
        (place.folder / "leases/junk").write_bytes(b"of nobody")
        before = place.folder / "leases/3" / new.name
        before.parent.mkdir()
        before.write_bytes(b"")
        for path, ago_s in ((old, LONGEST_TTL_S + 60), (before, 30)):
            os.utime(path, (time.time() - ago_s, time.time() - ago_s))
        if place.server:  # It has read the time already.
            place.server.kill()
            place.server.start()
        await copy.lease_to(leases)
    now_s = time.monotonic()
    assert [pin.version for pin in leases.live(now_s)] == [2]
    assert not old.exists()
    collected = {path.name for path in store.chunks_dir.iterdir()}
    store.collect(leases.live(now_s), now_s)
    collected -= {path.name for path in store.chunks_dir.iterdir()}
    (place.folder / "chunks" / min(collected)).unlink()  # Somebody else's deed.
    await copy.prune()
    assert {path for path in place.paths if path.startswith("manifests")} == {
        "manifests/3",
        "manifests/4",
        "manifests/4.base",
    }
    chunks = {path for path in place.paths if path.startswith("chunks")}
    assert chunks == {f"chunks/{path.name}" for path in store.chunks_dir.iterdir()}
    async with reading_from(place.url, tmp_path / "late") as (fetcher, _):
        await fetched(fetcher, place.url, 4, base=True)


async def test_each_reader_of_a_bucket_has_its_lease(tmp_path: Path) -> None:
    share = tmp_path / "share"
    (share / "leases/1").mkdir(parents=True)
    for reader in range(MOST_OF_A_PEER + 5):
        (share / "leases/1" / str(reader)).write_bytes(b"")
    leases = ReadLeases(0.0)
    copy = BucketCopy(ChunkStore(tmp_path / "root"), f"file://{share}", "job", KEY)
    await copy.lease_to(leases)
    assert len(leases.live(time.monotonic())) == MOST_OF_A_PEER + 5


async def test_the_catalog_lists_what_the_bucket_has(place: Place, tmp_path: Path) -> None:
    root = publisher(tmp_path / "root")
    root.publish(1, 0, tensors(0), tensors(1))
    copy = copy_of(root.store, place)
    real = copy._files

    def files() -> dict[str, tuple[Path, int]]:
        found = real()
        root.publish_base(1, tensors(1))  # By the retention, while chunks are copied.
        return found

    copy._files = files  # type: ignore[method-assign]
    await copy.publish()
    async with reading_from(place.url, tmp_path / "node") as (_, client):
        listed = await client.catalog(place.url, "job")
    assert (dict(listed.bases), [each.version for each in listed.deltas]) == ({}, [1])


async def test_a_trainer_that_is_fenced_while_it_copies_lists_nothing(tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "root")
    place = Place(f"file://{tmp_path}/share", tmp_path / "share")

    def check() -> None:
        if place.paths:
            raise RunFencedError("another trainer has the job")

    copy = BucketCopy(store, place.url, "job", KEY, check)
    with pytest.raises(RunFencedError):
        await copy.publish()
    assert place.paths == {f"chunks/{ref.id}" for ref in manifest.chunks}


async def test_a_large_object_under_a_small_chunks_name_is_not_read_whole(tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "root")
    place = Place(f"file://{tmp_path}/share", tmp_path / "share")
    await copy_of(store, place).publish()
    name = manifest.chunks[0].id
    (place.folder / "chunks" / name).write_bytes(bytes(SMALL_BYTES + 1))
    session = Credentials().sources([place.url])
    with pytest.raises(OSError, match="has more than"):
        await whole_reply(
            session, f"{place.url}/chunks", ClientTimeout(9), 1 << 30, asked=encode_names([name])
        )
    await session.close()


async def test_a_copy_goes_on_where_the_store_was_lost(s3: Place, tmp_path: Path) -> None:
    store, manifest = published(tmp_path / "root")
    copy, server = copy_of(store, s3), s3.server
    assert server
    puts, real = 0, copy._bucket.put

    async def dying(path: str, body: bytes | Path, within_s: float = 0.0) -> None:
        nonlocal puts
        puts += 1
        if puts == 4:
            server.kill()
        await real(path, body)

    copy._bucket.put = dying  # type: ignore[method-assign]
    with pytest.raises(BucketError, match=s3.url) as lost:
        await copy.publish()
    assert "\n" not in str(lost.value)
    assert not {path for path in s3.paths if not path.startswith("chunks/")}, "it lists the whole"
    server.start()
    before, puts = len(s3.paths), 4
    again = copy_of(store, s3)
    await again.start()
    written: list[str] = []
    real_again = again._bucket.put

    async def counted(path: str, body: bytes | Path, within_s: float = 0.0) -> None:
        written.append(path)
        await real_again(path, body)

    again._bucket.put = counted  # type: ignore[method-assign]
    await again.publish()
    assert len(written) == len({ref.id for ref in manifest.chunks}) - before + 2
    async with reading_from(s3.url, tmp_path / "node") as (fetcher, _):
        await fetched(fetcher, s3.url)


async def test_a_trainer_announces_the_bucket_once_it_has_the_version(
    s3: Place, tmp_path: Path, cluster: RunCluster
) -> None:
    server = s3.server
    assert server
    async with cluster.scheduler(), cluster.trainer(bucket=s3.url) as trainer:
        await trainer.publish_anew(1, tensors(1))
        await trainer.settle()
        server.kill()
        with pytest.raises(NotAnnouncedError, match=f"version 2: {s3.url} does not take"):
            await trainer.publish(2, 1, tensors(1), tensors(2))
        assert [(each.version, each.url) for each in cluster.chain] == [(1, s3.url)]
        server.start()
        await trainer.announce_late()
        assert [(each.version, each.url) for each in cluster.chain] == [(1, s3.url), (2, s3.url)]
    async with reading_from(s3.url, tmp_path / "node") as (fetcher, _):
        key = cluster.key
        await fetched(fetcher, s3.url, base=True, job="grpo", key=key)
        await fetched(fetcher, s3.url, 2, job="grpo", key=key)


async def test_a_trainer_without_the_job_leaves_the_bucket_as_it_is(
    place: Place, tmp_path: Path, cluster: RunCluster
) -> None:
    async with cluster.scheduler(), cluster.trainer("old", bucket=place.url) as trainer:
        await trainer.publish_anew(1, tensors(1))
        await trainer.settle()
        listed = (place.folder / "catalog").read_bytes()
        waiting = cluster.trainer("other", bucket=place.url)
        with pytest.raises(RunHeldError):
            await waiting.start()
        assert (place.folder / "catalog").read_bytes() == listed
        async with cluster.trainer("new", bucket=place.url, take_over=True):
            with pytest.raises(RunFencedError):
                await trainer.publish(2, 1, tensors(1), tensors(2))
            (place.folder / "catalog").write_bytes(listed)
            await trainer._retention.renew()
            assert (place.folder / "catalog").read_bytes() == listed


async def test_what_no_bucket_gives_is_one_line(place: Place, tmp_path: Path) -> None:
    store, _ = published(tmp_path / "root")
    await copy_of(store, place).publish()
    with pytest.raises(BucketError, match="catalog of another job or key"):
        await copy_of(store, place, job="other").check()
    async with reading_from(f"{place.url}/deeper", tmp_path / "node") as (fetcher, client):
        for url in (f"{place.url}x", place.url):
            with pytest.raises(FetchError, match=r"transport\.buckets"):
                await fetched(fetcher, url)
        with pytest.raises(FetchError, match="404"):
            await client.catalog(f"{place.url}/deeper", "job")


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3://b", "s3://b/../c", "ftp://b/c", "file://share", "s3://b/a b", "", "gs:/b/c"],
)
def test_a_bucket_is_named_by_its_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"no bucket; give s3://BUCKET/PATH"):
        Credentials().sources([url])


async def test_a_server_that_is_silent_is_told_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_module, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        bucket = Bucket(f"s3://{BUCKET}/job")
        calls = (
            lambda: bucket.put("a", b"", 0.2),
            lambda: bucket.delete(["a"]),
            lambda: bucket.objects("chunks"),
        )
        for call in calls:
            with pytest.raises(BucketError, match="it does not answer"):
                await call()


async def test_a_server_that_is_away_is_told_within_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = S3Server(tmp_path / "s3", free_port())
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BucketError, match="does not give catalog") as away:
        await Bucket(f"s3://{BUCKET}/job").read("catalog", 1)
    assert "\n" not in str(away.value)
