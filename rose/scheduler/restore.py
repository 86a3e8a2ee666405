"""Backup of a scheduler's store, and its restore, which must make no old state true again.

A backup is a listing of all keys at one revision, so it is consistent while schedulers run. It is
older than what happened since, and nobody knows what that was. So of what is restored

    epochs     none up to a floor is granted, of any replica: no lease that anybody may still hold,
               or may have a message of, is one of those
    versions   of no job, and none up to a floor is announced: a trainer begins anew with a base,
               and no replica takes other weights for those that it has under a number that was
               used meanwhile
    runs       of no job: who has it now is known when a trainer begins
    stop       the strictest that is known, at least `hold`: nothing is lent before `rose resume`
    election   `leader` and `fence` are of a term, and in no backup

The floor is the time in milliseconds, or the greatest number that is known plus LEAST_LIFT. Epochs
and versions each need a durable write, so between two restores, of one backup even, fewer than one
a millisecond are used, and the later floor is above all of them. It takes a clock that is right.

Leases of the time before are not taken over, since the newest epoch is another: nodes end them.

    restoring, floor, stop ──► old entries go, those of the backup come ──► not `restoring`

That is many transactions, each of a term: schedulers that start meanwhile stand by, and one that
finds `restoring` after a restore that was killed does not serve.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from importlib.metadata import PackageNotFoundError, version

from elastic_scheduler import HarvestMode
from elastic_scheduler.leases.lease_table import MAX_EPOCH, MAX_VERSION, stricter
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.scheduler.persistence import (
    EPOCH_FLOOR,
    RESTORING,
    RUNS,
    STOP,
    VERSIONS,
    JobRecord,
    Saved,
    load,
    save,
    save_epoch_floor,
    save_stop,
)
from rose.store.backup_file import Backup, without
from rose.store.election import Leadership, address_of
from rose.store.protocol import Delete, Put, Store, StoreEntry, Write
from rose.store.wrappers import FENCE, LEADER, FencedStore

# Least lift of the epochs, where the clock is behind the stored times.
LEAST_LIFT = 2**20
# etcd takes 128 operations in a transaction unless told otherwise; the fence is one.
MOST_WRITES = 64
# A leader that was killed counts for as long as its lease.
IN_USE_S = 3.0
LOOK_S = 0.1
LEAD_S = 10.0


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore. entries: keys in the backup.

    epoch_floor: new leases have greater epochs.

    stop: the operator's stop that is in force now.
    """

    entries: int
    jobs: int
    epoch_floor: int
    stop: HarvestMode


async def take_backup(store: Store, taken_s: float | None = None) -> Backup:
    """Return a backup of all keys of a store at one revision, without the election's.

    taken_s: Unix seconds, now by default. Raises `ConfigError` for an empty store, or one from
    which no scheduler could start.
    """
    listing = await store.list("")
    entries = without(listing.entries, (LEADER, FENCE))
    if not entries:
        raise ConfigError("the store is empty; give the --store that the scheduler has")
    # A store from which no scheduler could start is refused now, not when the backup is needed.
    load(entries)
    when_s = time.time() if taken_s is None else taken_s
    return Backup(entries, listing.revision, when_s, _release())


def restored(backup: Sequence[StoreEntry], there: Sequence[StoreEntry], now_s: float) -> list[Put]:
    """Return the writes that restore a backup without making old epochs or versions valid again.

    there: entries that the store had before, whose epochs and stop may be newer. now_s: Unix
    seconds. Raises `ConfigError`.
    """
    saved, before = load(backup), load(without(there, (RESTORING,)))
    modes = [HarvestMode.HOLD, *(each.mode for each in (saved, before) if each.mode is not None)]
    kept = {each.key: Put(each.key, each.value) for each in backup if _stays(each.key)}
    changed = [
        save_epoch_floor(_epoch_floor(saved, before, now_s)),
        save_stop(reduce(stricter, modes)),
        *(_with_numbers_used(saved, job, now_s) for job in saved.jobs),
    ]
    return list((kept | {each.key: each for each in changed}).values())


def _stays(key: str) -> bool:
    return key != RESTORING and not key.startswith((VERSIONS, RUNS))


def _epoch_floor(saved: Saved, before: Saved, now_s: float) -> int:
    """Return an epoch that no lease of these stores, past or future, can have reached."""
    known = (*saved.epochs.values(), *before.epochs.values())
    return _floor(max(saved.epoch_floor, before.epoch_floor, *known, 0), now_s, MAX_EPOCH)


def _with_numbers_used(saved: Saved, job: JobRecord, now_s: float) -> Put:
    newest = max((each.version for each in saved.versions if each.job == job.job), default=0)
    return save(replace(job, floor=_floor(max(newest, job.floor), now_s, MAX_VERSION)))


def _floor(newest: int, now_s: float, most: int) -> int:
    floor = max(newest + LEAST_LIFT, int(now_s * 1e3))
    if floor > most // 2:
        raise ConfigError(f"numbers of this store are used up ({newest}); begin a new store")
    return floor


async def restore(
    store: Store, backup: Backup, *, replace_all: bool = False, now_s: float | None = None
) -> Restored:
    """Write a backup into an empty store, or with replace_all over all that is there.

    Raises `RefusedError` for a store that is in use or not empty, `ConfigError` for a backup from
    which no scheduler could start, `UnavailableError` if the store does not answer. A restore that
    did not end may be started again.
    """
    load(backup.entries)
    when_s = time.time() if now_s is None else now_s
    if when_s < backup.taken_s:
        raise ConfigError("this machine's clock is behind the time of the backup; set it first")
    await _nobody_leads(store)

    async def write_all(fenced: FencedStore) -> Restored:
        there = without((await fenced.list("")).entries, (LEADER, FENCE))
        unfinished = any(each.key == RESTORING for each in there)
        if there and not (replace_all or unfinished):
            raise RefusedError(
                f"the store is not empty ({len(there)} keys); restore into an empty one, or over"
                " all of it with --replace"
            )
        new = {each.key: each for each in restored(backup.entries, there, when_s)}
        # First of all: the old entries may have greater epochs and a stricter stop than the
        # backup, and are deleted below. A second try of this restore must still see them.
        first = (Put(RESTORING, b"{}"), new.pop(EPOCH_FLOOR), new.pop(STOP))
        await fenced.txn((), first)
        done = {each.key for each in first}
        old = [each.key for each in there if each.key not in new and each.key not in done]
        writes: list[Write] = [*map(Delete, old), *new.values()]
        for at in range(0, len(writes), MOST_WRITES):
            await fenced.txn((), writes[at : at + MOST_WRITES])
        await fenced.txn((), (Delete(RESTORING),))
        saved = load((await fenced.list("")).entries)
        assert saved.mode is not None
        return Restored(len(backup.entries), len(saved.jobs), saved.epoch_floor, saved.mode)

    return await _leading(store, write_all)


async def _nobody_leads(store: Store) -> None:
    """Raise `RefusedError` if a scheduler leads; wait up to 3 s for a killed one's lease to end."""
    until_s = time.monotonic() + IN_USE_S
    while (leader := await store.get(LEADER)) is not None:
        if time.monotonic() >= until_s:
            where = address_of(leader) or "an address that it does not name"
            raise RefusedError(
                f"the store is in use: a scheduler leads at {where}; stop all schedulers first"
            )
        await asyncio.sleep(LOOK_S)


async def _leading(store: Store, work: Callable[[FencedStore], Awaitable[Restored]]) -> Restored:
    """Return the result of the work, done as the elected leader so that no other process writes."""
    done: asyncio.Future[Restored] = asyncio.get_running_loop().create_future()

    async def term(fenced: FencedStore) -> None:
        if done.done():
            return
        try:
            result = await work(fenced)
        except Exception as error:  # noqa: BLE001 -- the caller's, who waits for it
            done.set_exception(error)
        else:
            done.set_result(result)

    begun = asyncio.Event()

    def heard(event: str, **_: object) -> None:
        if event == "scheduler_leads":
            begun.set()

    running = asyncio.create_task(Leadership(store, "", term, heard).run())
    try:
        try:
            async with asyncio.timeout(LEAD_S):
                await begun.wait()
        except TimeoutError as error:
            raise UnavailableError(
                "the store does not answer, or a scheduler came to lead; stop all schedulers"
            ) from error
        await asyncio.wait((running, done), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            running.result()
        return await done
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _release() -> str:
    try:
        return version("rose-rollout")
    except PackageNotFoundError:
        return "unknown"
