"""Updater of a replica's policy version: decodes, loads, pauses, commits, proves, resumes.

decode   while serving: verified and decoded once for all ranks of a node; nothing is written
load     while serving: a fresh load computes the expected results of the new version
pause    as the job wants it for turns in flight, see `OnUpdate`
commit   scatter and prove on every rank; then stamp the engine with the version
resume   only then, or if nothing was written

An update that breaks off from the commit on leaves unproven weights: admission closes, all turns
are revoked, and the engine stays paused. It samples no token any more; only a new life of the
engine, which starts from its base and proves it, serves again.

A guest takes weights while its host is idle: the engine's gate covers neither the update nor a
pause. A host that is never idle keeps its guest at its old version. The guest reports that, and its
node asks again later.

A LoRA adapter is decoded, loaded and proven in the same way, without a pause and without doubt: it
comes into a slot that no turn uses. Turns that begin afterwards use it. Running ones go on under it
(`recompute`), or end under their own (`finish_old`), whose slot stays until a later version needs
it; then they are revoked.

`Audits` digest every live weight, in pieces between the engine's steps, and judge the sums.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, TypeVar

from rose.replica.admission import Admission
from rose.replica.control import GuestControl
from rose.replica.engine import HeldAdapter, ReplicaEngine
from rose.replica.turns import Turns
from weight_transfer import AdapterError, OnUpdate, ProbeError, WeightError
from weight_transfer.apply.probe import Findings, Part, judge
from weight_transfer.apply.replica_weights import merged, typed
from weight_transfer.apply.shared_segment import ranks_folder

PIECE_ELEMENTS: Final = 8 << 20
TRIES: Final = 3
STAGE_POLL_S: Final = 0.01
WEIGHTS_DIR: Final = "ROSE_WEIGHTS_DIR"
VERIFY_KEY: Final = "ROSE_VERIFY_KEY"
UNSIGNED: Final = "ROSE_UNSIGNED"
FINISH_OLD_S: Final = 20.0
STAGE_PATIENCE_S = 20.0
"""Wait for a busy host, over all pieces; a node waits for the whole update for a minute."""
SWITCH_PATIENCE_S = 5.0
"""Wait for a busy host once all is staged."""
CALL_LIMIT_S: Final = 30.0
"""Time limit of each call under the pause; a node waits for the whole update for a minute."""
_LOG = logging.getLogger("vllm.rose.replica")
_T = TypeVar("_T")
CallAll = Callable[..., Awaitable[list[dict[str, Any]]]]
"""Function that calls a worker method and returns each rank's answer."""


class Audits:
    """Auditor of an engine's live weights through the worker calls of `call`; one audit runs at a
    time.
    """

    def __init__(self, call: CallAll) -> None:
        self._call = call
        self._lock = asyncio.Lock()

    async def run(self) -> dict[str, Any]:
        """Return the audit's report {version, flipped, unjudged, weights, audit_s}: names of wrong
        tensors, names of unchecked ones, number of elements, seconds.

        Raises WeightError if the version changed during each of TRIES attempts.
        """
        async with self._lock:
            began_s = time.perf_counter()
            for _ in range(TRIES):
                found = await self._once()
                if found is not None:
                    version, weights, findings = found
                    return {
                        "version": version,
                        "flipped": list(findings.flipped),
                        "unjudged": list(findings.unjudged),
                        "weights": weights,
                        "audit_s": time.perf_counter() - began_s,
                    }
        raise WeightError(f"the version changed in each of {TRIES} audits; ask again later")

    async def _once(self) -> tuple[int, int, Findings] | None:
        """Return (version, number of weights, findings) of one audit, None if the version changed
        meanwhile.
        """
        parts: list[Part] = []
        versions: set[int] = set()
        done = False
        while not done:
            began_s = time.perf_counter()
            again = not versions
            answers = await self._call("rose_weights_audit", PIECE_ELEMENTS, again)
            versions |= {answer["version"] for answer in answers}
            if len(versions) > 1:
                return None
            for answer in answers:
                parts += [
                    Part(name, tuple(key), n, total) for name, key, n, total in answer["parts"]
                ]
            done = all(answer["done"] for answer in answers)
            # A piece delays the engine's steps: they get as much time as it took.
            await asyncio.sleep(time.perf_counter() - began_s)
        expected = (await self._call("rose_weights_digests"))[0]
        if expected["version"] not in versions:
            return None
        findings = judge(parts, expected["digests"], expected["elements"])
        return versions.pop(), sum(part.elements for part in parts), findings


class ActivationError(WeightError):
    """Error raised because a commit failed half way, so that the engine's weights are not proven
    any more.
    """


class EngineCallError(WeightError):
    """Error raised because the engine failed at a call that writes no weights."""


class WeightUpdater:
    """Updater of one engine's weights: it applies policy versions, one at a time.

    version, job: the active version and its job; 0 and "" until the first update.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        turns: Turns,
        admission: Admission,
        control: GuestControl,
        finish_old_s: float = FINISH_OLD_S,
    ) -> None:
        """Create the updater of `engine`.

        admission: closed until the process ends once weights are in doubt. finish_old_s: seconds to
        wait for running turns under OnUpdate.FINISH_OLD.
        """
        self._engine = engine
        self._turns = turns
        self._admission = admission
        self._control = control
        self._finish_old_s = finish_old_s
        self._lock = asyncio.Lock()
        self._ready = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._audits = Audits(self._call_all)
        self.version = 0
        self.job = ""
        # Job of the weights that are about to be written.
        self._coming = ""
        # Adapters in the engine's slots, oldest first.
        self._held: list[HeldAdapter] = []

    def serves(self, job: str) -> bool:
        """Return True if turns of the job may begin: its weights or its adapter are active or about
        to be written, or one of the two jobs is unnamed.
        """
        if adapters := self._turns.adapters:
            if not job:
                return len(adapters) == 1
            return job in adapters or self._admission.begins_with_base(job)
        return not job or (self._coming or self.job) in ("", job)

    def start(self) -> None:
        """Start to prepare the weight workers in the background: they compile kernels and trace the
        loader, which takes seconds; do nothing for an engine without them.
        """
        if not self._engine.updatable:
            return
        self._spawn(self._prepare_early())

    async def apply(
        self, manifests: list[str], chunks: str, on_update: OnUpdate = OnUpdate.RECOMPUTE
    ) -> dict[str, Any]:
        """Apply successive versions in one update and return a report of the last one.

        The update finishes even if the caller is cancelled. Raises WeightError subtypes of
        weight_transfer or HostBusyError while nothing is written, and ActivationError afterwards:
        then all turns are revoked and admission stays closed until the engine is restarted.
        """
        return await asyncio.shield(self._spawn(self._apply(manifests, chunks, on_update)))

    async def _apply(
        self, manifests: list[str], chunks: str, on_update: OnUpdate
    ) -> dict[str, Any]:
        async with self._lock:
            if self._admission.quarantined:
                raise ActivationError(f"{self._admission.reason}; start this engine anew")
            if not os.environ.get(WEIGHTS_DIR):
                raise WeightError(f"{WEIGHTS_DIR} is not set: this replica takes no versions")
            if not os.environ.get(VERIFY_KEY) and os.environ.get(UNSIGNED) != "1":
                raise WeightError(
                    f"{VERIFY_KEY} is not set: anybody's weights would be taken; give the key, or"
                    f" set {UNSIGNED}=1"
                )
            await self._prepare()
            if self._engine.adapts:
                return await self._adopt(manifests, chunks, on_update)
            await self._decode(manifests, chunks)
            loaded = await self._load()
            # New turns are held back if the version under which they begin matters.
            open_gate = on_update is OnUpdate.RECOMPUTE
            with nullcontext() if open_gate else self._turns.hold.closed():
                finished = await self._finish_old(on_update)
                await self._control.wait_host_idle(SWITCH_PATIENCE_S)
                started_s = time.perf_counter()
                with self._coming_of(str(loaded.get("job", ""))) as job:
                    report = await self._switch(int(loaded["version"]), on_update, job)
                    self.job = job
                pause_s = time.perf_counter() - started_s
            await self._settle()
            return report | {
                "wire_bytes": loaded["wire_bytes"],
                "stage_s": loaded["stage_s"],
                "pause_s": pause_s,
                "on_update": str(on_update),
                "finished_old": finished,
            }

    async def _adopt(
        self, manifests: list[str], chunks: str, on_update: OnUpdate
    ) -> dict[str, Any]:
        """Bring a version of an adapter into a slot of its own, prove it, and begin turns with it;
        the engine does not pause. Raises WeightError, and everything is as before.
        """
        if on_update is OnUpdate.KEEP:
            raise AdapterError("on_update is keep: KV belongs to its adapter; publish it otherwise")
        name, _ = await asyncio.gather(self._decode(manifests, chunks), self._drop_unused())
        try:
            await self._make_room()
            loaded = await self._load()
            await self._control.wait_host_idle(SWITCH_PATIENCE_S)
            new = HeldAdapter(str(loaded["job"]), int(loaded["version"]), name)
            with self._coming_of(new.job):
                report = merged(await _bounded(self._call_all("rose_weights_commit")))
                _insist_proven(report, new.version, ProbeError)
                self._held.append(new)
                self._turns.adapters[new.job] = new
                self.version, self.job = new.version, new.job
        except BaseException:
            with suppress(WeightError):
                await self._call("rose_adapters_drop", [name])
            raise
        if on_update is OnUpdate.RECOMPUTE:
            await self._turns.move(new)
        return report | {
            "wire_bytes": loaded["wire_bytes"],
            "stage_s": loaded["stage_s"],
            "pause_s": 0.0,
            "on_update": str(on_update),
            "finished_old": on_update is OnUpdate.FINISH_OLD,
        }

    async def _drop_unused(self) -> None:
        """Give back the slots of old adapters that no turn uses."""
        newest, turns = self._turns.adapters, self._turns
        old = [each for each in self._held if newest.get(each.job) != each]
        await self._drop([each for each in old if not turns.with_adapter(each)])

    async def _make_room(self) -> None:
        """Give back a slot if none is free: turns that use the oldest adapter are revoked, those of
        a lease's job last.
        """
        if len(self._held) < self._engine.adapts:
            return
        # Raises what decoding raised, before anybody gives way.
        await self._call("rose_weights_load", 0)
        newest, leased = self._turns.adapters, self._admission.known_jobs
        gone = min(self._held, key=lambda e: (newest.get(e.job) == e, e.job in leased))
        if newest.get(gone.job) == gone:
            del newest[gone.job]
        await self._turns.revoke_of(gone)
        await self._drop([gone])

    async def _drop(self, gone: list[HeldAdapter]) -> None:
        if gone:
            await self._call("rose_adapters_drop", [each.name for each in gone])
        self._held = [each for each in self._held if each not in gone]

    async def audit(self) -> dict[str, Any]:
        """Compute digests of every live weight between the engine's steps and return the report of
        `Audits.run`; `flipped` names wrong tensors.
        """
        async with self._lock:
            await self._prepare()
        return await self._audits.run()

    async def distrust(self, why: str) -> None:
        """Close admission until the process ends and revoke all turns, because the weights are in
        doubt.
        """
        _LOG.error("%s; this replica serves no more turns", why)
        self._admission.quarantine(why)
        try:
            await self._turns.revoke_all()
        except self._engine.failures:
            _LOG.exception("the engine has ended, and its turns with it")

    async def _decode(self, manifests: list[str], chunks: str) -> str:
        """Verify and decode the versions' files beside the engine's steps, and return the name of
        the attempt; nothing is written to the model. Raises the ranks' errors.
        """
        attempt = secrets.token_hex(8)
        while True:
            if (await self._call("rose_weights_decode", manifests, chunks, attempt))["done"]:
                return attempt
            await asyncio.sleep(STAGE_POLL_S)

    async def _load(self) -> dict[str, Any]:
        """Load the decoded version, piece by piece between the engine's steps while the host is
        idle, and return its facts.

        Raises the ranks' errors and HostBusyError; the model is not changed then.
        """
        clock_s, patience_s = asyncio.get_running_loop().time, STAGE_PATIENCE_S
        while True:
            began_s = clock_s()
            await self._control.wait_host_idle(patience_s)
            patience_s = max(0.0, patience_s - (clock_s() - began_s))
            loaded = await self._call("rose_weights_load", 1)
            if loaded["done"]:
                return loaded
            # A piece delays the engine's steps: they get as much time as it took.
            await asyncio.sleep(loaded["piece_s"])

    @contextmanager
    def _coming_of(self, job: str) -> Iterator[str]:
        """Return a context manager in which only turns of `job` may begin. Raises WeightError if
        the lease is another job's.

        An update takes longer than a lease may last: the lease of its request may be over by now.
        """
        admission = self._admission
        # A lease may be over while others are open: its job is known until the next one.
        if admission.open and not (admission.takes(job) or job in admission.known_jobs):
            names = ", ".join(sorted(admission.jobs))
            raise WeightError(f"leased to {names}: no weights of {job} are taken")
        self._coming = job
        try:
            yield job
        finally:
            self._coming = ""

    async def _finish_old(self, on_update: OnUpdate) -> bool:
        if on_update is not OnUpdate.FINISH_OLD:
            return False
        finished = await self._turns.all_ended(self._finish_old_s)
        if not finished:
            _LOG.warning("turns outlast %.0f s; they go on under a new version", self._finish_old_s)
        return finished

    async def _switch(self, version: int, on_update: OnUpdate, job: str) -> dict[str, Any]:
        keep = on_update is OnUpdate.KEEP
        try:
            unpaused = await self._pause(job, keep_kv=keep)
            report = {} if unpaused else await self._commit(version, keep_kv=keep)
            # A pause that failed half way stops the engine as well.
            await _bounded(self._engine.resume())
        except BaseException as failure:
            # This includes cancellation at the end of the process.
            why = f"version {version} broke off: {failure or type(failure).__name__}"
            await self.distrust(why)
            if isinstance(failure, Exception):
                raise ActivationError(why) from failure
            raise
        if unpaused:
            raise WeightError(f"the engine could not be paused: {unpaused!r}") from unpaused
        return report

    async def _pause(self, job: str, *, keep_kv: bool) -> Exception | None:
        """Revoke other jobs' turns and pause the engine; return the error, None if it is paused. No
        weights are written yet.
        """
        # With cleared caches running turns recompute their KV under the new weights; those of
        # another job must not run under them.
        try:
            await _bounded(self._turns.revoke_others(job))
            await _bounded(self._engine.pause(clear_cache=not keep_kv))
        except Exception as failure:  # noqa: BLE001 -- whatever an engine raises; the caller is told
            return failure
        return None

    async def _commit(self, version: int, *, keep_kv: bool) -> dict[str, Any]:
        """Write the weights, check the ranks' proofs, stamp the version and return the merged
        report. Raises any error, and ActivationError without proofs.
        """
        report = merged(await _bounded(self._call_all("rose_weights_commit")))
        _insist_proven(report, version)
        await _bounded(self._engine.activate(version))
        self.version = version
        self._turns.ages.activated(version, kept_kv=keep_kv)
        return report

    async def _settle(self) -> None:
        try:
            await self._call("rose_weights_settle")
        except WeightError:
            # The version is active and proven; the next staging reports it.
            _LOG.exception("the checkpoint copy was not brought up to date")

    async def _prepare_early(self) -> None:
        try:
            async with self._lock:
                await self._prepare()
        except WeightError:
            # The first update tries again, and reports it.
            _LOG.exception("weights cannot be updated yet")

    async def _prepare(self) -> None:
        if not self._ready:
            key = os.environ.get(VERIFY_KEY) or None
            folder = os.environ.get(WEIGHTS_DIR) or None
            # A new folder for every try: files of an earlier one have another meaning.
            alone = self._engine.ranks == 1
            place = None if alone else str(ranks_folder() / secrets.token_hex(8))
            await self._call("rose_weights_init", self._engine.model_dir, key, folder, place)
            self._ready = True

    async def _call(self, method: str, *args: object) -> dict[str, Any]:
        """Call a method on all ranks and return the first rank's answer; its `done` is True only if
        all ranks are done.
        """
        answers = await self._call_all(method, *args)
        answer = answers[0]
        if answer is not None and "done" in answer:
            answer = answer | {"done": all(other["done"] for other in answers)}
        return answer

    async def _call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        try:
            answers = await self._engine.call_all(method, *args)
        except Exception as failure:
            known = typed(failure)
            if isinstance(known, WeightError):
                raise known from failure
            raise EngineCallError(f"{method}: {failure!r}") from failure
        return answers

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        # The caller may be gone, and nobody else would look at its error.
        if not task.cancelled() and task.exception() is not None:
            _LOG.warning("an update ended: %s", task.exception())


def _insist_proven(
    report: Mapping[str, Any], version: int, kind: type[WeightError] = ActivationError
) -> None:
    """Raise an error of this kind unless the report says that all ranks have proven to run
    `version`.
    """
    if report["version"] == version and report["digest_ok"] and report["probe_ok"]:
        return
    said = {name: report[name] for name in ("digest_ok", "probe_ok", "probe_max_abs_diff")}
    raise kind(f"ranks report version {report['version']} with {said}")


async def _bounded(call: Awaitable[_T]) -> _T:
    async with asyncio.timeout(CALL_LIMIT_S):
        return await call
