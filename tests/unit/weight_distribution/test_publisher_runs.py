"""A publication is durable and told; a trainer that starts again goes on, or begins anew."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rose.addresses import free_port
from rose.errors import (
    NotAnnouncedError,
    RefusedError,
    RunFencedError,
    RunHeldError,
    UnavailableError,
)
from rose.scheduler import SchedulerService
from rose.scheduler.core.messages import JobDropped
from rose.weight_distribution import WeightPublisher, runs
from rose.weight_distribution import weight_publisher as publisher
from rose.weight_distribution.runs import RunRoot
from tests.fakes.memory_store import InMemoryStore
from tests.harness.training_runs import JOB, RunCluster
from tests.harness.waiting import PATIENCE_S, until_async
from tests.harness.weight_peers import tensors
from weight_transfer import ChunkStore, SigningKey, TensorBits, VersionPublisher, WeightError


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[RunCluster, SchedulerService]]:
    cluster = RunCluster(tmp_path, InMemoryStore(), 0, SigningKey.generate())
    async with cluster.scheduler() as service:
        yield cluster, service


@pytest.fixture
def cluster(running: tuple[RunCluster, SchedulerService]) -> RunCluster:
    return running[0]


@pytest.fixture
def service(running: tuple[RunCluster, SchedulerService]) -> SchedulerService:
    return running[1]


def same(found: Mapping[str, TensorBits], wanted: Mapping[str, TensorBits]) -> bool:
    return np.array_equal(found["w"].bits, wanted["w"].bits)


async def publish(trainer: WeightPublisher, version: int) -> None:
    await trainer.publish(version, version - 1, tensors(version - 1), tensors(version))


async def trained(cluster: RunCluster, newest: int) -> None:
    """Have a trainer that publishes version 1 anew, others up to `newest`, and ends."""
    async with cluster.trainer() as trainer:
        await trainer.publish_anew(1, tensors(1))
        for version in range(2, newest + 1):
            await publish(trainer, version)


@contextmanager
def cut_off(trainer: WeightPublisher) -> Iterator[None]:
    """Keep a trainer from its scheduler."""

    async def fail(*_: object) -> None:
        raise UnavailableError("no scheduler answers")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(trainer._scheduler, "call", fail)
        yield


async def test_a_receipt_says_what_the_step_cost(cluster: RunCluster) -> None:
    async with cluster.trainer() as trainer:
        receipt = await trainer.publish(1, 0, tensors(0), tensors(1))
    assert (receipt.version, receipt.full_bytes) == (1, 2 * 64 * 64)
    assert receipt.density == pytest.approx(1 / 7, rel=0.01)
    assert receipt.wire_bytes > 0
    assert ChunkStore(cluster.folder / "root").versions() == (1,)
    assert cluster.numbers == [(1, 0)]


async def test_a_scheduler_that_restarts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RunCluster(tmp_path, InMemoryStore(), free_port(), SigningKey.generate())
    trainer = cluster.trainer()
    async with cluster.scheduler():
        await trainer.start()
    publishing = asyncio.create_task(publish(trainer, 1))
    await asyncio.sleep(0.1)
    assert not publishing.done()
    async with cluster.scheduler():
        await publishing
        assert cluster.numbers == [(1, 0)]
    monkeypatch.setattr(publisher, "ANNOUNCE_TIMEOUT_S", 0.1)
    with pytest.raises(UnavailableError, match="version 2 is published but"):
        await publish(trainer, 2)
    assert trainer._store.versions() == (1, 2)
    await trainer.close()


async def test_a_publisher_signs_its_newest_version_anew_before_that_expires(
    cluster: RunCluster,
) -> None:
    store, began_s = ChunkStore(cluster.folder / "root"), time.time()
    day_old = VersionPublisher(store, JOB, "t", cluster.key, clock=lambda: began_s - 80_000.0)
    soon_s = day_old.publish(1, 0, tensors(0), tensors(1)).expires_s
    async with cluster.trainer():
        await until_async(
            lambda: store.get_manifest(1).expires_s > soon_s, PATIENCE_S, "it is signed anew"
        )
    assert store.get_manifest(1).expires_s >= began_s + 80_000.0


async def test_a_second_training_run_on_the_same_root_goes_on_from_the_first_ones_weights(
    cluster: RunCluster,
) -> None:
    await trained(cluster, 2)
    async with cluster.trainer() as second:
        assert (second.begun.latest, second.begun.resumed) == (2, 2)
        weights = await second.restore()
        assert same(weights, tensors(2))
        with pytest.raises(RefusedError, match=r"version 1 of grpo is used up.*publish 3 anew"):
            await publish(second, 1)
        await second.publish(3, 2, weights, tensors(30))
        assert same(await second.restore(), tensors(2))
    assert cluster.numbers == [(1, 1), (2, 1), (3, 2)]
    assert cluster.chain[-1].url == second.url


async def test_a_version_that_was_never_announced_is_announced_at_the_next_start(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer() as first:
        await first.publish_anew(1, tensors(1))
        with cut_off(first):
            for version in (2, 3):
                with pytest.raises(UnavailableError, match="could not be announced"):
                    await publish(first, version)
    assert cluster.numbers == [(1, 1)]
    async with cluster.trainer() as second:
        assert (second.begun.latest, second.begun.resumed) == (3, 3)
        assert cluster.numbers == [(1, 1), (2, 1), (3, 2)]
        assert same(await second.restore(), tensors(3))


async def test_a_version_that_could_not_be_announced_is_told_with_the_next_one(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer() as trainer:
        await trainer.publish_anew(1, tensors(1))
        said = "version 2 is published but could not"
        with cut_off(trainer), pytest.raises(NotAnnouncedError, match=said):
            await publish(trainer, 2)
        await publish(trainer, 3)
        with cut_off(trainer), pytest.raises(NotAnnouncedError):
            await publish(trainer, 4)
        await trainer.announce_late()
        await trainer.announce_late()
    assert cluster.numbers == [(1, 1), (2, 1), (3, 2), (4, 3)]


async def test_a_version_that_overtakes_the_one_before_is_told_after_it(
    cluster: RunCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster.trainer() as trainer:
        await trainer.publish_anew(1, tensors(1))
        ask, may_go = trainer._scheduler.call, asyncio.Event()

        async def slow(*asked: Any) -> object:
            await may_go.wait()
            return await ask(*asked)

        monkeypatch.setattr(trainer._scheduler, "call", slow)
        publishing = []
        for version in (2, 3):
            publishing.append(asyncio.create_task(publish(trainer, version)))
            await until_async(
                lambda of=version: len(trainer._unannounced) == of - 1,  # type: ignore[misc]
                PATIENCE_S,
                "it is durable",
            )
        may_go.set()
        await asyncio.gather(*publishing)
    assert cluster.numbers == [(1, 1), (2, 1), (3, 2)]


async def test_a_new_root_begins_after_the_newest_version_and_the_old_chain_is_dropped(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer() as first:
        for version in (1, 2, 3):
            await publish(first, version)
    async with cluster.trainer("elsewhere") as second:
        assert (second.begun.latest, second.begun.resumed) == (3, None)
        with pytest.raises(RefusedError, match="publish version 4 anew"):
            await second.restore()
        with pytest.raises(RefusedError, match=r"cannot follow 3.*anew"):
            await publish(second, 4)
        receipt = await second.publish_anew(4, tensors(9))
        assert (receipt.version, receipt.full_bytes) == (4, 2 * 64 * 64)
        assert cluster.numbers == [(4, 4)]
        await second.publish(5, 4, tensors(9), tensors(10))
    async with cluster.trainer() as stale:
        assert (stale.begun.latest, stale.begun.resumed) == (5, None)
        assert "another run announced version 5" in stale.begun.why_anew


async def test_starting_anew_on_the_old_root_collects_its_chain(cluster: RunCluster) -> None:
    async with cluster.trainer() as first:
        for version in (1, 2):
            await publish(first, version)
    async with cluster.trainer() as second:
        # Nobody reads the old chain, and the times in which somebody might begin to are over.
        second._retention._leases._settled_s = 0.0
        await second.publish_anew(3, tensors(7))
        second._retention._leases._by_peer.clear()
        await second.publish(4, 3, tensors(7), tensors(8))
        await second.settle()
    store = ChunkStore(cluster.folder / "root")
    assert min(store.versions() + store.bases()) == 3, "nothing of the old chain is left"


async def test_until_there_is_a_base_the_checkpoint_is_what_a_run_is_restored_from(
    cluster: RunCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster.trainer() as first:
        await publish(first, 1)
    async with cluster.trainer() as bare:
        assert bare.begun.resumed is None
        assert "no checkpoint was named" in bare.begun.why_anew
    checkpoint = cluster.folder / "model"
    monkeypatch.setattr(publisher, "read_model_dir", lambda _: tensors(0))
    async with cluster.trainer(checkpoint=checkpoint) as second:
        assert second.begun.resumed == 1
        assert same(await second.restore(), tensors(1))
        await publish(second, 2)
    monkeypatch.setattr(publisher, "read_model_dir", lambda _: tensors(5))
    async with cluster.trainer(checkpoint=checkpoint) as other:
        with pytest.raises(WeightError, match="other weights"):
            await other.restore()


async def test_a_root_of_another_job_or_key_or_with_damage_is_not_gone_on_from(
    cluster: RunCluster,
) -> None:
    await trained(cluster, 1)
    with pytest.raises(RefusedError, match="holds versions of job grpo; give job ppo"):
        await cluster.trainer(job="ppo").start()
    for key in (SigningKey.generate(), cluster.key):
        async with cluster.trainer(key=key) as second:
            assert (second.begun.latest, second.begun.resumed) == (1, None)
            assert "version 1 cannot be gone on from" in second.begun.why_anew
        ChunkStore(cluster.folder / "root").manifest_path(1, base=True).write_bytes(b"rot")


async def test_weights_of_version_0_that_were_published_are_no_version_to_resume(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer() as first:
        await first.publish_base(0, tensors(0))
    async with cluster.trainer() as second:
        assert (second.begun.latest, second.begun.resumed) == (0, None)
        await publish(second, 1)
    async with cluster.trainer() as third:
        assert same(await third.restore(), tensors(1))


async def test_a_root_has_one_living_trainer(cluster: RunCluster) -> None:
    async with cluster.trainer(run="sweep-3") as first:
        with pytest.raises(RefusedError, match="close that one first"):
            await cluster.trainer().start()
        await publish(first, 1)
    async with cluster.trainer():
        pass


async def test_a_scheduler_that_knows_nothing_any_more_is_told_the_newest_version(
    tmp_path: Path,
) -> None:
    cluster = RunCluster(tmp_path, InMemoryStore(), 0, SigningKey.generate())
    async with cluster.scheduler():
        await trained(cluster, 3)
    cluster.store = InMemoryStore()
    async with cluster.scheduler(), cluster.trainer() as second:
        assert second.begun.resumed == 3
        assert cluster.numbers == [(3, 2)]
        await publish(second, 4)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that renew often, and that wait for others no longer than a moment."""
    monkeypatch.setattr(runs, "RENEWALS", 200)
    monkeypatch.setattr(publisher, "WAIT_S", 0.0)


@pytest.mark.usefixtures("hasty")
async def test_two_trainers_of_one_job_the_second_is_refused_or_fences_the_first(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer("a", run="sweep-3") as first:
        await publish(first, 1)
        with pytest.raises(
            RunHeldError, match=r"held by run sweep-3 on .*process \d+, since .* UTC"
        ):
            await cluster.trainer("b").start()
        async with cluster.trainer("b", take_over=True) as second:
            assert (second.begun.latest, second.begun.resumed) == (1, None)
            for fenced in (publish(first, 2), first.publish_anew(2, tensors(2)), first.end_job()):
                with pytest.raises(RunFencedError, match="has lost job grpo to"):
                    await fenced
            await second.publish_anew(2, tensors(5))
            assert cluster.numbers == [(2, 2)]
            await second.end_job()


async def test_after_a_job_was_dropped_its_root_is_not_gone_on_from(
    cluster: RunCluster, service: SchedulerService
) -> None:
    await trained(cluster, 1)
    event = JobDropped("grpo")
    for write in service._core.writes(event):
        cluster.store.write(write.key, write.value)
    service._step(event)
    async with cluster.trainer() as second:
        assert (second.begun.latest, second.begun.resumed) == (1, None)
        assert "dropped the job's versions up to 1" in second.begun.why_anew
        await second.publish_anew(2, tensors(2))
    assert cluster.numbers == [(2, 2)]


@pytest.mark.usefixtures("hasty")
async def test_a_fenced_trainer_learns_it_by_its_next_renewal(cluster: RunCluster) -> None:
    async with cluster.trainer("a") as first, cluster.trainer("b", take_over=True):
        keeper = first._keeper
        assert keeper is not None
        await until_async(lambda: bool(keeper._fenced), PATIENCE_S, "it is told")
        with pytest.raises(RunFencedError):
            keeper.check()


async def test_a_trainer_with_another_root_waits_until_a_dead_ones_hold_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RETRY_S", 0.05)
    cluster = RunCluster(tmp_path, InMemoryStore(), 0, SigningKey.generate(), run_ttl_s=0.4)
    async with cluster.scheduler():
        dead = cluster.trainer("a")
        await dead.start()
        keeper = dead._keeper
        assert keeper is not None
        assert keeper._task is not None
        keeper._task.cancel()
        async with cluster.trainer("b") as second:
            assert second.begun.resumed is None
        keeper._task = None
        await dead.close()


@pytest.mark.usefixtures("hasty")
async def test_a_trainer_goes_on_over_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    cluster = RunCluster(tmp_path, InMemoryStore(), free_port(), SigningKey.generate())
    trainer = cluster.trainer("a")
    async with cluster.scheduler():
        await trainer.start()
        await publish(trainer, 1)
    async with cluster.scheduler():
        with pytest.raises(RunHeldError):
            await cluster.trainer("b").start()
        await publish(trainer, 2)
        await trainer.close()
        async with cluster.trainer("b") as second:
            assert second.begun.latest == 2


async def test_versions_that_ranks_put_into_the_root_are_announced(cluster: RunCluster) -> None:
    async with cluster.trainer() as trainer:
        ranks = VersionPublisher(ChunkStore(cluster.folder / "root"), "grpo", "ranks", cluster.key)
        with pytest.raises(RefusedError, match=r"version 1 is not in .*; publish it there first"):
            await trainer.announce(1, 1)
        ranks.publish_base(1, tensors(1))
        await trainer.announce(1, 1)
        ranks.publish(2, 1, tensors(1), tensors(2))
        await trainer.announce(2, 1)
    async with cluster.trainer() as again:
        assert same(await again.restore(), tensors(2))
    assert cluster.numbers == [(1, 1), (2, 1)]


def test_a_root_keeps_its_runs_name_whatever_a_killed_process_left_in_the_file(
    tmp_path: Path,
) -> None:
    first = RunRoot.take(tmp_path, "a run with a long name that people chose")
    first.close()
    file = tmp_path / "run"
    file.write_bytes(file.read_bytes() + b'", "left by the one before')
    second = RunRoot.take(tmp_path)
    second.close()
    assert second.claim.run == first.claim.run
    assert second.claim.process != first.claim.process
    assert json.loads(file.read_bytes())["holder"] == second.claim.holder
    file.write_bytes(b"")
    third = RunRoot.take(tmp_path)
    third.close()
    assert third.claim.run != first.claim.run


# Without ROSE, which takes a second to import.
HOLDS = """
import fcntl, json, os, sys
file = open(sys.argv[1], "a+b")
fcntl.lockf(file, fcntl.LOCK_EX)
said = {"run": "0" * 16, "holder": f"run sweep-3 on h1, process {os.getpid()}"}
os.write(file.fileno(), json.dumps(said).encode())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_root_says_which_living_process_has_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDS, tmp_path / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        said = rf"in use by a trainer that lives, run sweep-3 on h1, process {holder.pid}; stop"
        with pytest.raises(RefusedError, match=said):
            RunRoot.take(tmp_path)
        holder.kill()
    after = RunRoot.take(tmp_path)
    after.close()
    assert after.claim.run == "0" * 16, "the same root is the same run"


@pytest.fixture
def few_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bases made only for versions that no base leads to, though these models are small."""
    monkeypatch.setattr("weight_transfer.catalog.MOST_SHARE", 100.0)


def rot(cluster: RunCluster, version: int, *, base: bool = False) -> None:
    """Overwrite the first chunk of a version by zeros, as a lost write leaves it."""
    store = ChunkStore(cluster.folder / "root")
    path = store.chunks_dir / store.get_manifest(version, base=base).chunks[0].id
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.usefixtures("few_bases")
async def test_a_rotten_version_that_was_announced_is_not_gone_on_from(cluster: RunCluster) -> None:
    await trained(cluster, 3)
    rot(cluster, 3)
    async with cluster.trainer() as second:
        assert (second.begun.latest, second.begun.resumed) == (3, None)
        assert "version 3 cannot be gone on from: chunk " in second.begun.why_anew
        with pytest.raises(RefusedError, match="publish it anew"):
            await publish(second, 4)
        await second.publish_anew(4, tensors(4))
        await publish(second, 5)


@pytest.mark.usefixtures("few_bases")
async def test_a_rotten_version_that_was_never_announced_gives_way_to_the_one_before(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer() as first:
        await first.publish_anew(1, tensors(1))
        with cut_off(first):
            for version in (2, 3, 4):
                with pytest.raises(UnavailableError):
                    await publish(first, version)
    rot(cluster, 3)
    async with cluster.trainer() as second:
        assert (second.begun.latest, second.begun.resumed) == (2, 2)
        assert same(await second.restore(), tensors(2))
        await publish(second, 3)
    assert cluster.numbers == [(1, 1), (2, 1), (3, 2)]


@pytest.mark.usefixtures("few_bases")
async def test_a_cut_manifest_neither_ends_the_catalog_nor_what_follows(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer() as first, aiohttp.ClientSession() as session:
        await first.publish_anew(1, tensors(1))
        await publish(first, 2)
        (cluster.folder / "root/manifests/2.manifest").write_bytes(b"")
        async with session.get(first.url + "/catalog") as answer:
            assert answer.status == 200
        await publish(first, 3)
        await first.settle()
        assert first._store.bases() == (1, 3), "whoever starts anew comes to version 3"


@pytest.mark.usefixtures("few_bases")
async def test_a_doubt_at_a_publisher_drops_a_rotten_base_and_the_next_version_brings_one(
    cluster: RunCluster,
) -> None:
    async with cluster.trainer() as first, aiohttp.ClientSession() as session:
        await first.publish_anew(1, tensors(1))
        await publish(first, 2)
        await first.settle()
        chunk = first._store.get_manifest(1, base=True).chunks[0].id
        for rotten, bases in ((False, (1,)), (True, ())):
            if rotten:
                rot(cluster, 1, base=True)
            async with session.post(f"{first.url}/chunks/{chunk}/doubt") as answer:
                assert answer.status == 204
            assert first._store.bases() == bases
        await publish(first, 3)
        await first.settle()
        assert first._store.bases() == (3,)
