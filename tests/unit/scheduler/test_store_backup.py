"""A store in a file and back: whole or refused, and nothing of the time before comes true again."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from core_cases import JOB, CoreBench, offer
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_scheduler import HarvestMode
from elastic_scheduler.errors import StaleEpoch
from elastic_scheduler.leases.lease_table import LeaseHeld, LeaseTable
from rose.cli.main import main as rose
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.replica.admission import Admission
from rose.scheduler.core.messages import HarvestSet, Held, Offered
from rose.scheduler.persistence import (
    RESTORING,
    JobRecord,
    load,
    save,
    save_epoch,
    save_stop,
)
from rose.scheduler.restore import (
    LEAST_LIFT,
    MOST_WRITES,
    restore,
    restored,
    take_backup,
)
from rose.store import Expect, FencedStore, Leadership, SqliteStore, StoreEntry, Write
from rose.store.backup_file import Backup, decoded, encoded, read_backup, write_backup
from tests.fakes.memory_store import InMemoryStore

TAKEN_S = 1_000.0
NOW_S = 1_790_000_000.0
ENTRIES = st.dictionaries(st.text(min_size=1), st.binary(), min_size=1, max_size=4)


def backup_of(store: InMemoryStore) -> Backup:
    return Backup(store.entries, 1, TAKEN_S)


def written(writes: Sequence[Write]) -> InMemoryStore:
    store = InMemoryStore()
    for write in writes:
        store.write(write.key, write.value)
    return store


# ---- the file ----


@given(ENTRIES, st.data())
def test_a_file_is_read_back_and_no_other_bytes_are(
    entries: dict[str, bytes], data: st.DataObject
) -> None:
    kept = tuple(StoreEntry(key, value, 7) for key, value in sorted(entries.items()))
    backup = Backup(kept, 7, TAKEN_S, "0.3.0")
    raw = encoded(backup)
    assert decoded(raw) == backup
    at = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(ConfigError):
        decoded(raw[:at])
    changed = bytearray(raw)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ConfigError):
        decoded(bytes(changed))


@given(st.binary(max_size=200))
def test_foreign_bytes_are_one_line(raw: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        decoded(raw)
    assert "\n" not in str(caught.value)


def test_a_later_version_of_the_file_is_named() -> None:
    raw = encoded(Backup((), 1, TAKEN_S)).replace(b'"version": 1', b'"version": 2')
    with pytest.raises(ConfigError, match="version 2"):
        decoded(raw)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "store.backup"
    write_backup(file, Backup((), 1, TAKEN_S))
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="there already"):
        write_backup(file, Backup((), 2, TAKEN_S))
    assert read_backup(file).revision == 1
    assert [each.name for each in tmp_path.iterdir()] == ["store.backup"]


# ---- what comes back ----

STEPS = st.lists(
    st.tuples(st.sampled_from(("grant", "forget", "backup", "restore", "anew")), st.integers(0, 1)),
    max_size=24,
)


@given(STEPS)
@example([("anew", 0), ("grant", 0), ("forget", 0), ("anew", 0), ("grant", 0)])
@example([("grant", 0), ("forget", 0), ("restore", 0), ("grant", 0)])
@example([*[("restore", 0)] * 3, ("grant", 0), ("anew", 0), ("grant", 0)])
@example([("grant", 0), ("backup", 0), ("grant", 0), ("forget", 0), ("anew", 1), ("grant", 0)])
def test_no_epoch_is_granted_twice_whatever_is_restored(script: list[tuple[str, int]]) -> None:
    """Nodes may forget what they saw, and one backup may be restored again and again."""
    store = InMemoryStore()
    kept = [backup_of(store)]
    table, seen, granted = LeaseTable(2.0), [0, 0], set()
    for step_number, (step, number) in enumerate(script):
        now_s, replica = NOW_S + 3.0 * step_number, f"g{number}"
        if step == "grant":
            try:
                epoch = table.proposed(replica, seen[number])
            except StaleEpoch:
                # Restored again and again within seconds, then lost whole: its node starts anew.
                assert any(before == "anew" for before, _ in script[:step_number])
                seen[number] = 0
                epoch = table.proposed(replica)
            write = save_epoch(replica, epoch, JOB)
            store.write(write.key, write.value)
            table.reserve(replica, epoch)
            with contextlib.suppress(LeaseHeld):
                seen[number] = table.grant(JOB, replica, now_s, seen_epoch=0).epoch
                assert (replica, seen[number]) not in granted
                granted.add((replica, seen[number]))
        elif step == "forget":
            seen[number] = 0
        elif step == "backup":
            kept.append(backup_of(store))
        else:
            # Into what is there, or into a new store, since all of the old one was lost.
            there = store.entries if step == "restore" else ()
            store = written(restored(kept[number % len(kept)].entries, there, now_s))
            saved = load(store.entries)
            table = LeaseTable(2.0, saved.epochs, saved.epoch_floor)


def test_a_clock_that_is_behind_what_is_known_lifts_the_floor_all_the_same() -> None:
    there = written([save_epoch("g0", 7, JOB), save(JobRecord(JOB, 1, floor=9))]).entries
    saved = load(written(restored(there, (), now_s=0.001)).entries)
    assert saved.epoch_floor == 7 + LEAST_LIFT
    assert saved.jobs[0].floor == 9 + LEAST_LIFT


def test_a_replica_that_lives_takes_the_epochs_after_a_restore() -> None:
    admission = Admission()
    admission.admit(3)
    [floor] = [write for write in restored((), (), NOW_S) if write.key == "epoch_floor"]
    assert floor.value is not None
    admission.admit(json.loads(floor.value)["epoch"] + 1)


def led() -> CoreBench:
    bench = CoreBench().with_job()
    bench.attach()
    bench.offered(offer("g0"), offer("g1"))
    bench.announce(1, 0)
    return bench


def test_a_restored_scheduler_takes_no_lease_over_and_lends_nothing_before_it_is_told() -> None:
    before = led()
    bench = CoreBench(HarvestMode.ACTIVE, written(restored(before.store.entries, (), NOW_S)))
    bench.attach()
    bench.step(Offered(1, (offer(epoch=1),), held=(Held("g0", JOB, 1, 2.0),)))
    assert bench.kinds() == ["release"], "what was granted before is over"
    bench.step(HarvestSet(HarvestMode.ACTIVE, None))
    bench.at(bench.now_s + 2.0)
    bench.step(Offered(1, (offer(epoch=1),)))
    assert bench.row().lease_epoch > NOW_S * 1e3


def test_version_numbers_that_may_have_been_used_are_used_up() -> None:
    before = led()
    bench = CoreBench(HarvestMode.ACTIVE, written(restored(before.store.entries, (), NOW_S)))
    with pytest.raises(RefusedError, match="anew"):
        bench.announce(2, 1)
    new = int(NOW_S * 1e3) + 1
    bench.announce(new, new)


@pytest.mark.parametrize(
    ("then", "now", "stays"),
    [
        (HarvestMode.ACTIVE, None, HarvestMode.HOLD),
        (HarvestMode.OFF, None, HarvestMode.OFF),
        (HarvestMode.ACTIVE, HarvestMode.HOLD_AND_DRAIN, HarvestMode.HOLD_AND_DRAIN),
    ],
)
def test_the_strictest_stop_that_is_known_stays(
    then: HarvestMode, now: HarvestMode | None, stays: HarvestMode
) -> None:
    there = written([save_stop(now)] if now else [])
    back = restored(written([save_stop(then)]).entries, there.entries, NOW_S)
    assert load(written(back).entries).mode is stays


# ---- on stores ----


async def test_a_backup_is_one_revision_without_the_election(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    first = asyncio.Event()

    async def lead(fenced: FencedStore) -> None:
        for number in range(20):
            write = save_epoch("g0", number + 1, JOB)
            other = save_epoch("g1", number + 1, JOB)
            await fenced.txn((), [write, other])
            first.set()

    leading = asyncio.create_task(Leadership(store, "here:1", lead, _silent).run())
    await first.wait()
    backup = await take_backup(store)
    leading.cancel()
    await asyncio.wait((leading,))
    await store.close()
    saved = load(backup.entries)
    assert saved.epochs["g0"] == saved.epochs["g1"], "of one moment"
    assert {each.key for each in backup.entries} == {"epochs/g0", "epochs/g1"}


async def test_a_store_is_restored_over_another_one_when_that_is_said() -> None:
    many = [save_epoch(f"g{n}", 5, JOB) for n in range(2 * MOST_WRITES)]
    backup = backup_of(written([*many, save(JobRecord(JOB, 1))]))
    store = written([save_epoch("newer", 2**41, JOB), save_stop(HarvestMode.OFF)])
    with pytest.raises(RefusedError, match="--replace"):
        await restore(store, backup)
    with pytest.raises(ConfigError, match="clock"):
        await restore(store, backup, replace_all=True, now_s=TAKEN_S - 1)
    done = await restore(store, backup, replace_all=True)
    saved = load(store.entries)
    assert saved.epochs == {f"g{n}": 5 for n in range(2 * MOST_WRITES)}
    assert saved.epoch_floor == done.epoch_floor == 2**41 + LEAST_LIFT
    assert done.stop is HarvestMode.OFF
    assert {"leader", RESTORING}.isdisjoint(each.key for each in store.entries)


async def test_a_store_that_a_scheduler_leads_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose.scheduler.restore.IN_USE_S", 0.0)
    store = InMemoryStore()
    store.write("leader", b'{"address": "s1:7400", "id": "x"}')
    with pytest.raises(RefusedError, match="s1:7400"):
        await restore(store, Backup((), 1, TAKEN_S))
    assert [each.key for each in store.entries] == ["leader"]


class Dying(InMemoryStore):
    """Answers no more after so many transactions."""

    left = 0

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        self.left -= 1
        if not self.left:
            raise UnavailableError("it is gone")
        return await super().txn(expect, writes)


@pytest.mark.parametrize("dies_at", [3, 4, 5])
async def test_a_restore_that_did_not_end_serves_nobody_and_is_begun_again(dies_at: int) -> None:
    backup = backup_of(written([save_epoch(f"g{n}", 5, JOB) for n in range(2 * MOST_WRITES)]))
    store = Dying()
    store.write("epochs/g0", save_epoch("g0", 2**41, JOB).value)
    store.left = dies_at
    with pytest.raises(UnavailableError):
        await restore(store, backup, replace_all=True)
    with pytest.raises(ConfigError, match="again"):
        load(store.entries)
    done = await restore(store, backup)
    assert done.epoch_floor > 2**41, "of what the first one removed"
    assert len(load(store.entries).epochs) == 2 * MOST_WRITES


async def test_what_no_scheduler_wrote_is_neither_backed_up_nor_replaced() -> None:
    strange = InMemoryStore()
    strange.write("epochs/g0", b"not json")
    with pytest.raises(ConfigError, match="no scheduler wrote"):
        await take_backup(strange)
    with pytest.raises(ConfigError, match="no scheduler wrote"):
        await restore(strange, backup_of(written([save_epoch("g", 1, JOB)])), replace_all=True)
    with pytest.raises(ConfigError, match="empty"):
        await take_backup(InMemoryStore())


def test_the_command_goes_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def filled() -> None:
        store = SqliteStore(tmp_path / "store")
        await store.txn((), [save_epoch("g0", 3, JOB), save(JobRecord(JOB, 1))])
        await store.close()

    asyncio.run(filled())
    file = str(tmp_path / "file")
    assert rose(["store", "backup", "--store", f"{tmp_path}/store", file]) == 0
    assert rose(["store", "show", file]) == 0
    assert f"job {JOB} at version 0" in capsys.readouterr().out
    assert rose(["store", "restore", "--store", f"{tmp_path}/new", file]) == 0
    assert "rose resume" in capsys.readouterr().out
    assert rose(["store", "restore", "--store", f"{tmp_path}/new", file]) == 2
    assert "--replace" in capsys.readouterr().err
    assert rose(["store", "backup", "--store", f"{tmp_path}/typo", f"{file}2"]) == 2
    assert not (tmp_path / "typo").exists()


def _silent(_event: str, **_fields: object) -> None:
    return None
