"""Bad weights are one line in the node's log; the old version stays, and the next try works."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import aiohttp.web
import numpy as np
import pytest
from node_bench import tensors

from rose.contract.weights import UpdateApplied
from rose.errors import RefusedError
from rose.logs.eventlog import EventLog, JsonlLog
from rose.node import weight_updates
from rose.node.replica_client import ReplicaClient
from rose.node.weight_updates import (
    MAX_APPLY_FAILURES,
    AnnouncedVersions,
    KnownVersion,
    Updates,
    WeightSource,
)
from rose.weight_distribution import VersionServer
from tests.harness.waiting import PATIENCE_S, until_async
from tests.harness.web_server import served
from weight_transfer import (
    ChunkStore,
    Manifest,
    OnUpdate,
    Receiver,
    SigningKey,
    TensorBits,
    VersionPublisher,
    WeightError,
    WrongBaseError,
)
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, PublisherClient
from weight_transfer.fetch import download as download_module
from weight_transfer.fetch import fetcher as fetcher_module
from weight_transfer.format.signing import SIGNATURE_BYTES
from weight_transfer.serve import Signer

KEY = SigningKey.generate()
REPORT: dict[str, Any] = {
    "version": 2,
    "digest_ok": True,
    "probe_ok": True,
    "probe_max_abs_diff": 0.0,
    "pause_s": 0.1,
    "apply_s": 0.1,
    "wire_bytes": 1,
    "changed_elements": 1,
}


class ReceivingEngine:
    """Stands in for a replica's client: a real receiver behind it."""

    def __init__(self) -> None:
        self.receiver = Receiver(tensors(0))

    async def apply(
        self, manifests: list[Path], chunks: Path, on_update: OnUpdate
    ) -> UpdateApplied:
        read = [Manifest.from_bytes(path.read_bytes()) for path in manifests]
        self.on_update = on_update
        store = ChunkStore(chunks.parent)
        bodies = {ref.id: store.get(ref.id) for each in read for ref in each.chunks}
        try:
            staged = self.receiver.decode_chain(read, bodies, KEY.verify_key, 0.0)
        except WrongBaseError:
            raise
        except WeightError as error:
            raise RefusedError(str(error)) from error
        self.receiver.commit(staged)
        return UpdateApplied(**REPORT | {"version": staged.version})


class UpdatesCase:
    """One replica's updates over a real publisher."""

    def __init__(self, folder: Path, port: int, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.origin = ChunkStore(folder / "origin")
        self.server = VersionServer(self.origin, port, signer=Signer("job", KEY))
        self.engine = ReceivingEngine()
        self.chain = AnnouncedVersions()
        self.receiving = DownloadLimits(ChunkStore(folder / "node"), Caps())
        self.whys: list[str] = []
        self.foreign: list[str] = []
        self.logs = ExitStack()
        source = WeightSource(
            session,
            ChunkFetcher(session, self.receiving),
            self.chain,
            KEY.verify_key,
            PublisherClient(session, "n0", KEY.verify_key),
        )
        self.updates = Updates(
            "r0",
            "dedicated",
            self.engine,  # type: ignore[arg-type]
            source,
            self.logs.enter_context(JsonlLog(folder / "activations.jsonl")),
            EventLog(folder, "n0"),
            self,
        )

    def activated(self, job: str, version: int) -> None:
        pass

    def unproven(self, version: int, why: str) -> None:
        self.whys.append(why)

    def start_anew(self, why: str) -> None:
        self.foreign.append(why)

    def publish(self, version: int, key: SigningKey = KEY, lifetime_s: float = 60.0) -> None:
        publisher = VersionPublisher(self.origin, "job", "trainer", key, 1_024, lifetime_s)
        publisher.publish(version, version - 1, tensors(version - 1), tensors(version))

    def release(self, version: int, **publishing: Any) -> None:
        self.publish(version, **publishing)
        self.announce(version)

    def announce(self, version: int) -> None:
        self.chain.add(KnownVersion("job", version, version - 1, self.server.url))
        self.updates.wake()

    async def active(self, version: int) -> None:
        await until_async(lambda: self.updates.version == version, PATIENCE_S, f"at {version}")
        held = self.engine.receiver.tensors["w"].bits
        assert np.array_equal(held, tensors(version)["w"].bits)

    async def noted(self, event: str) -> str:
        def found() -> list[str]:
            lines = map(json.loads, (self.folder / "events-n0.jsonl").read_text().splitlines())
            return [each["message"] for each in lines if each["event"] == event]

        await until_async(found, PATIENCE_S, event)
        return found()[-1]


@pytest.fixture
async def case(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[UpdatesCase]:
    monkeypatch.setattr(weight_updates, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(weight_updates, "MAX_PAUSE_S", 0.05)
    for module in (fetcher_module, download_module):
        monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)
    async with aiohttp.ClientSession() as session:
        case = UpdatesCase(tmp_path, unused_tcp_port, session)
        await case.server.start()
        case.updates.engine_up(0)
        running = asyncio.create_task(case.updates.run())
        case.publish(1)
        case.announce(1)
        await case.active(1)
        yield case
        assert not running.done(), "nothing bad ends the node"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        case.receiving.close()
        case.logs.close()
        await case.server.close()


def unsigned(manifest: bytes) -> bytes:
    return manifest[:8] + bytes(SIGNATURE_BYTES) + manifest[8 + SIGNATURE_BYTES :]


@pytest.mark.parametrize(
    ("publishing", "change", "event", "said"),
    [
        pytest.param(
            {"lifetime_s": 0.0},
            None,
            "version_not_fetched",
            "version 2 of job expired; publish a newer one",
            id="expired",
        ),
        pytest.param(
            {"key": SigningKey.generate()},
            None,
            "signature_refused",
            "signature does not match",
            id="of another key",
        ),
        pytest.param({}, unsigned, "signature_refused", "there is no signature", id="unsigned"),
    ],
)
async def test_a_manifest_that_must_not_be_used_leaves_the_old_version(
    case: UpdatesCase,
    publishing: dict[str, Any],
    change: Callable[[bytes], bytes] | None,
    event: str,
    said: str,
) -> None:
    case.publish(2, **publishing)
    path = case.origin.manifest_path(2)
    if change is not None:
        path.write_bytes(change(path.read_bytes()))
    case.announce(2)
    assert said in await case.noted(event)
    assert case.updates.version == 1
    assert case.updates.late.startswith("version 2: ")
    assert said in case.updates.late
    path.unlink()
    case.publish(2)
    await case.active(2)
    assert case.updates.late == ""
    assert case.whys == []


async def test_a_full_disk_is_said_and_what_came_is_kept(
    case: UpdatesCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, room = download_module.Download._write, 20

    def write(self: download_module.Download, block: bytes) -> None:
        if len(block) <= room:
            whole(self, block)
            return
        assert self._file
        self._file.write(block[:room])  # As a file system does: what fits is there.
        self._file.flush()
        raise full

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(download_module.Download, "_write", write)
    kept = Mock(side_effect=full)
    monkeypatch.setattr(ChunkStore, "keep", kept)
    case.release(2)
    said = await case.noted("version_not_fetched")
    assert "No space left on device" in said
    assert "make room" in said
    assert kept.called
    assert case.updates.version == 1
    monkeypatch.undo()
    await case.active(2)
    assert case.whys == []


async def test_a_version_that_comes_after_its_jobs_lease_is_not_applied(
    case: UpdatesCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased: list[str] = ["job"]
    applied_under: list[str] = []
    fetch, apply = weight_updates.fetch_update, case.engine.apply
    lost = asyncio.Event()

    def lease(job: str) -> None:
        leased.append(job)
        case.updates.serve(job, 2)

    async def fetch_slowly(*args: Any) -> Any:
        fetched = await fetch(*args)
        if not lost.is_set():
            lost.set()
            lease("other")
        return fetched

    async def applied(*args: Any) -> UpdateApplied:
        applied_under.append(leased[-1])
        return await apply(*args)

    monkeypatch.setattr(weight_updates, "fetch_update", fetch_slowly)
    monkeypatch.setattr(case.engine, "apply", applied)
    case.updates.serve("job", 1)
    case.release(2)
    await asyncio.wait_for(lost.wait(), PATIENCE_S)
    await asyncio.sleep(0)
    lease("job")
    await case.active(2)
    assert applied_under == ["job"]


async def test_weights_that_a_leased_engine_refuses_as_anothers_are_no_fault_of_it(
    case: UpdatesCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    apply = case.engine.apply

    async def refused(*args: Any) -> UpdateApplied:
        nonlocal tries
        tries += 1
        if tries > MAX_APPLY_FAILURES + 1:
            return await apply(*args)
        case.updates.serve("other", 5)
        asyncio.get_running_loop().call_later(0.01, case.updates.serve, "job", 2)
        raise RefusedError("leased to other: no weights of job are taken")

    monkeypatch.setattr(case.engine, "apply", refused)
    case.updates.serve("job", 1)
    case.release(2)
    await case.active(2)
    assert "leased to other" in await case.noted("update_late")
    assert case.whys == []


def of_another(version: int) -> Receiver:
    """Return a receiver at a version whose weights are not those of the job."""
    return Receiver({"w": TensorBits("w", "bfloat16", (64, 64), np.ones(4_096, "<u2"))}, version)


async def test_a_wrong_base_is_healed_by_a_base(case: UpdatesCase) -> None:
    case.publish(2)
    case.publish(3)
    case.engine.receiver = of_another(1)
    VersionPublisher(case.origin, "job", "trainer", KEY).publish_base(2, tensors(2))
    case.announce(3)
    await case.noted("wrong_base")
    await case.active(3)
    assert case.whys == []


def flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


@pytest.mark.parametrize("where", ["chunk", "part"])
async def test_a_bit_that_flips_on_the_nodes_disk_is_named_and_healed(
    case: UpdatesCase, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Begun chunks are not small ones.
    monkeypatch.setattr(fetcher_module, "SMALL_BYTES", 0)
    case.publish(2)
    ref = case.origin.get_manifest(2).chunks[0]
    body = flipped(case.origin.get(ref.id))
    store = case.receiving.store
    if where == "chunk":
        (store.chunks_dir / ref.id).write_bytes(body)
    else:
        store.part_path(ref.id).write_bytes(body[:-5])
    case.announce(2)
    await case.active(2)
    lines = (case.folder / "events-n0.jsonl").read_text()
    assert "chunk_rejected" in lines
    assert ref.id in lines
    assert store.sound(ref.id)


async def test_a_bit_that_flips_in_a_relay_is_named_and_dropped_there_too(
    case: UpdatesCase, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """The node says its doubt, the relay looks at its own copy."""
    case.publish(2)
    refs = case.origin.get_manifest(2).chunks
    async with aiohttp.ClientSession() as session:
        port = unused_tcp_port_factory()
        receiving = DownloadLimits(ChunkStore(case.folder / "relay"), Caps())
        url = f"http://127.0.0.1:{port}"
        fetcher = ChunkFetcher(session, receiving, url, [url])
        server = VersionServer(receiving.store, port, fetcher=fetcher)
        await server.start()
        await fetcher.manifest("job", 2, case.server.url, KEY.verify_key)
        damaged = refs[0]
        await asyncio.gather(*(fetcher.obtain(ref) for ref in refs))
        path = receiving.store.chunks_dir / damaged.id
        path.write_bytes(flipped(path.read_bytes()))
        node = ChunkFetcher(session, case.receiving, "", [url])
        await node.manifest("job", 2, case.server.url, KEY.verify_key)
        rejected: list[str] = []
        for ref in refs:
            await node.obtain(ref, rejected.append)
        assert rejected == [damaged.id]
        assert all(case.receiving.store.sound(ref.id) for ref in refs)
        assert not receiving.store.has(damaged.id)
        await fetcher.obtain(damaged)
        assert receiving.store.sound(damaged.id)
        await fetcher.close()
        await server.close()
        receiving.close()


Answering = Callable[[int, bytes, dict[str, Any]], Awaitable[list[str]]]


@pytest.fixture
async def replica(case: UpdatesCase) -> AsyncIterator[Answering]:
    """Puts a replica behind the updates that answers each apply with the same bytes, and its state
    with these fields; a status of 0 is no answer. Gives the paths that it was asked for."""
    asked: list[str] = []
    async with AsyncExitStack() as stack:

        async def answering(status: int, body: bytes, state: dict[str, Any]) -> list[str]:
            async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
                asked.append(request.path.rsplit("/", 1)[1])
                if asked[-1] == "state":
                    idle = {"epoch": 1, "running": 0, "waiting": 0, "tokens_total": 0}
                    return aiohttp.web.json_response(idle | {"admitting": False} | state)
                if status == 0:
                    assert request.transport is not None
                    request.transport.abort()
                return aiohttp.web.Response(status=status or 200, body=body)

            url = await stack.enter_async_context(served(answer))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            case.updates._client = ReplicaClient(session, url)
            return asked

        yield answering


UNPROVEN = {"error": {"type": "unproven", "message": "version 2 broke off"}, "version": None}


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (422, UNPROVEN | {"digest_ok": False, "probe_ok": False}),
        (200, REPORT | {"digest_ok": False}),
        (200, REPORT | {"probe_ok": "yes"}),
        (200, REPORT | {"version": 7}),
        (200, []),
    ],
    ids=["broke off", "no digest", "no proof", "another version", "no report"],
)
async def test_a_replica_in_doubt_is_quarantined_at_its_first_word(
    case: UpdatesCase, replica: Answering, status: int, answer: object
) -> None:
    asked = await replica(status, json.dumps(answer).encode(), {})
    case.release(2)
    await case.noted("quarantined")
    assert asked == ["apply"], "not asked again"
    assert len(case.whys) == 1
    assert case.updates.version == 0


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (422, b'{"error":{"type":"bad_version","message":"x"}}'),
        (500, b"[" * 5_000),
        (503, b'{"error":{"type":"x","message":"\xff"}}'),
    ],
)
async def test_a_refusal_is_tried_three_times(
    case: UpdatesCase, replica: Answering, status: int, body: bytes
) -> None:
    asked = await replica(status, body, {})
    case.release(2)
    await case.noted("quarantined")
    assert asked == ["apply"] * 3


async def test_an_adapter_that_does_not_fit_is_said_once_and_costs_no_engine(
    case: UpdatesCase, replica: Answering
) -> None:
    body = b'{"error":{"type":"unfit_adapter","message":"r is 32, and lora.max_rank 16"}}'
    asked = await replica(422, body, {})
    case.release(2)
    assert "r is 32, and lora.max_rank 16" in await case.noted("version_refused")
    assert "r is 32" in case.updates.late
    case.updates.wake()
    case.release(3)
    await until_async(lambda: len(asked) == 2, PATIENCE_S, "the next version is tried")
    assert (case.whys, case.updates.version) == ([], 1)


async def test_a_busy_host_is_no_refusal(case: UpdatesCase, replica: Answering) -> None:
    asked = await replica(503, b'{"error":{"type":"host_busy","message":"ask again"}}', {})
    case.release(2)
    assert "ask again" in await case.noted("host_busy")
    often = 2 * weight_updates.MAX_APPLY_FAILURES
    await until_async(lambda: len(asked) >= often, PATIENCE_S, "it is asked again")
    assert case.whys == []
    assert case.updates.version == 1


@pytest.mark.parametrize(("proven", "held"), [(True, 2), (True, 1), (False, 1)])
async def test_an_update_whose_end_nobody_heard_is_asked_after(
    case: UpdatesCase, replica: Answering, proven: bool, held: int
) -> None:
    asked = await replica(0, b"", {"policy_version": held, "proven": proven})
    case.release(2)
    if proven and held == 2:
        await until_async(lambda: case.updates.version == 2, PATIENCE_S, "at 2")
        assert asked == ["apply", "state"]
        assert case.whys == []
        return
    await case.noted("quarantined")
    assert asked == (["apply", "state"] if not proven else [*["apply", "state"] * 2, "apply"])


@pytest.mark.parametrize("url", ["http://" + "a" * 64 + "/", "http://a..b", "http://[::1"])
async def test_an_address_that_no_client_can_connect_to_costs_one_update(
    case: UpdatesCase, url: str
) -> None:
    case.publish(2)
    case.chain.add(KnownVersion("job", 2, 1, url))
    case.updates.wake()
    log = case.folder / "events-n0.jsonl"
    await until_async(lambda: "message" in log.read_text(), PATIENCE_S, "a line")
    assert case.updates.version == 1
    case.announce(2)
    await case.active(2)


async def test_an_update_that_breaks_in_a_way_nobody_thought_of_is_tried_again(
    case: UpdatesCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, broken = case.engine.apply, [ValueError("unheard of"), KeyError("x")]

    async def breaks(*args: Any) -> UpdateApplied:
        if broken:
            raise broken.pop()
        return await apply(*args)

    monkeypatch.setattr(case.engine, "apply", breaks)
    case.release(2)
    assert "Error" in await case.noted("update_broken")
    await case.active(2)


async def test_another_jobs_version_is_never_taken_for_the_replicas_own(case: UpdatesCase) -> None:
    """The version has the same number and parent, at an address that serves both."""
    case.release(2)
    await case.active(2)
    case.chain.add(KnownVersion("other", 3, 2, case.server.url))
    case.updates.serve("other", 3)
    # Its catalog is of another job, and so is every manifest there.
    assert "job" in await case.noted("version_not_fetched")
    assert (case.updates.job, case.updates.version) == ("job", 2)
    assert case.updates.late
    case.updates.serve("job", 2)
    assert case.updates.late == "", "it was late for the other job alone"
    case.release(3)
    await case.active(3)


async def test_a_job_without_any_version_needs_a_new_engine(case: UpdatesCase) -> None:
    case.updates.serve("other", 0)
    await until_async(lambda: case.foreign, PATIENCE_S, "a new engine")
    assert case.foreign[0] == "job other is at version 0"
    assert case.whys == []


async def test_a_wrong_base_without_a_newer_one_ends_the_engine(
    case: UpdatesCase, replica: Answering
) -> None:
    wrong = {"error": {"type": "wrong_base", "message": "other weights are active"}}
    await replica(409, json.dumps(wrong).encode(), {})
    case.release(2)
    assert "publish a base" in await case.noted("quarantined")
    assert case.whys
