"""Runs of a trainer: the lock on the root folder, and the claim on the job at the scheduler.

A run lives where its versions are. `root/run` names it and is locked by the living trainer, so
whoever gets the lock knows that the trainer before it is dead, and is the same run: it need not
wait for anything. The kernel lets go of the lock however a process ends.

RunKeeper keeps the run in the scheduler's eyes, and notices when another has the job:

start ── another run has the job ── it is silent for RUN_TTL_S ──► ours
  │          └─ it lives on ──► RunHeldError, which names it
  └──► renewed each few seconds ── refused: another took over ──► `check` raises RunFencedError
"""

import asyncio
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import grpc
import grpc.aio

from rose.contract.weights import RUN_TTL_S
from rose.errors import RefusedError, RunFencedError, RunHeldError, UnavailableError
from rose.process.filelock import HeldFile, holder_of
from rose.rpc import rose_pb2
from rose.rpc.leader_channel import LeaderChannel

T = TypeVar("T")
RETRY_S = 0.5
# Longest wait for a dead run, which holds its job for RUN_TTL_S after its last renewal.
WAIT_S = RUN_TTL_S + 2 * RETRY_S
RENEWALS = 4
"""Number of renewals within the time after which the scheduler takes a run for dead."""
END_S = 2.0
_log = logging.getLogger(__name__)
FILE = "run"
MAX_HOLDER_CHARS = 160
_RUN = re.compile(rb'"run": "([0-9a-f]{16})"')
# Record locks are a process's: two publishers in one process are told apart here.
_HELD: set[Path] = set()


class RunRoot:
    """Exclusive lock on a publisher's root folder, held from `take` to `close`.

    `claim`: message for the scheduler with the run's id, a random id of this process, and the
    holder's name as text.
    """

    def __init__(self, place: Path, file: HeldFile, claim: rose_pb2.Claim) -> None:
        self.claim = claim
        self._place = place
        self._file = file

    @classmethod
    def take(cls, root: Path, name: str = "") -> Self:
        """Lock the root for this process and return the lock; `name`: label of the run in messages.

        The run's id is read from the root's file, or drawn and written there. Raises RefusedError
        that names the process with the lock, ConfigError when the root cannot be locked.
        """
        place = (root / FILE).resolve()
        if place in _HELD:
            raise RefusedError(f"{root} has a publisher in this process; close that one first")
        try:
            file = HeldFile.take(place)
        except RefusedError as error:
            raise RefusedError(
                f"{root} is in use by a trainer that lives, {_said_holder(place)}; stop that one,"
                " or give this one a root of its own"
            ) from error
        known = _RUN.search(file.read())
        run = known[1].decode() if known else secrets.token_hex(8)
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        holder = (f"run {name} on {holder}" if name else holder)[:MAX_HOLDER_CHARS]
        fields = {"run": run, "holder": holder, "since_s": round(time.time())}
        try:
            # The run's id keeps its place in the file, whenever this process is killed.
            written = os.pwrite(file.descriptor, json.dumps(fields).encode(), 0)
            os.ftruncate(file.descriptor, written)
        except OSError as error:
            file.close()
            raise RefusedError(f"{place} cannot be written: {error.strerror}") from error
        _HELD.add(place)
        claim = rose_pb2.Claim(run=run, process=secrets.token_hex(4), holder=holder)
        return cls(place, file, claim)

    def close(self) -> None:
        """Release the lock; the run's id stays in the root's file."""
        if self._place in _HELD:
            _HELD.discard(self._place)
            self._file.close()


def _said_holder(place: Path) -> str:
    """Return the holder's name in the root's lock file, or its process id where the file is
    damaged."""
    try:
        fields = json.loads(place.read_bytes())
        holder = fields.get("holder") if isinstance(fields, dict) else None
    except (OSError, ValueError):
        holder = None
    return str(holder or f"process {holder_of(place)}")[:MAX_HOLDER_CHARS]


def run_error(
    error: grpc.aio.AioRpcError | UnavailableError,
) -> RunHeldError | RunFencedError | None:
    """Return RunHeldError or RunFencedError for a failed call that another run caused, else None.

    The gRPC status ALREADY_EXISTS is RunHeldError, ABORTED is RunFencedError.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            return RunHeldError(str(error.details()))
        if error.code() is grpc.StatusCode.ABORTED:
            return RunFencedError(str(error.details()))
    return None


def reason_of(error: grpc.aio.AioRpcError | UnavailableError) -> str:
    """Return the text of a failed call to the scheduler."""
    return str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)


async def until_free(register: Callable[[], Coroutine[None, None, T]], wait_s: float) -> T:
    """Call `register` until no other run holds the job, and return its result.

    It is repeated every RETRY_S for at most `wait_s`; then the last RunHeldError is raised. Any
    other error is raised at once.
    """
    loop = asyncio.get_running_loop()
    until_s, warned = loop.time() + wait_s, False
    while True:
        try:
            return await register()
        except RunHeldError as error:
            if loop.time() + RETRY_S >= until_s:
                raise
            if not warned:
                warned = True
                _log.warning("waits for up to %.0f s: %s", wait_s, error)
            await asyncio.sleep(RETRY_S)


class RunKeeper:
    """Task that renews one run's claim on its job at the scheduler until the claim is lost or
    closed."""

    def __init__(self, scheduler: LeaderChannel, job: str, claim: rose_pb2.Claim) -> None:
        self._scheduler = scheduler
        self._job = job
        self._claim = claim
        self._fenced = ""
        self._task: asyncio.Task[None] | None = None

    def start(self, ttl_s: float) -> None:
        """Start to renew the run four times in every `ttl_s`.

        0: the scheduler expects no renewals.
        """
        if ttl_s:
            self._task = asyncio.create_task(self._renew(ttl_s))

    def check(self) -> None:
        """Raise RunFencedError if a renewal or another call showed that another run has the job."""
        if self._fenced:
            raise RunFencedError(self._fenced)

    def lost(self, error: RunFencedError) -> None:
        """Record that a call was refused because another run has the job.

        The first error is kept.
        """
        self._fenced = self._fenced or str(error)

    async def close(self) -> None:
        """Stop renewing, and tell the scheduler that the run is over, so that the next need not
        wait.

        A scheduler that cannot be reached is ignored. Nothing is sent for a run that was lost or
        never renewed.
        """
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._fenced:
            return
        request = rose_pb2.EndRunRequest(job=self._job, claim=self._claim)
        with suppress(grpc.aio.AioRpcError, UnavailableError):
            await self._scheduler.call(
                lambda stub, left_s: stub.EndRun(request, timeout=left_s), END_S
            )

    async def _renew(self, ttl_s: float) -> None:
        request = rose_pb2.RenewRunRequest(job=self._job, claim=self._claim)
        warned = ""
        while True:
            await asyncio.sleep(ttl_s / RENEWALS)
            try:
                await self._scheduler.call(
                    lambda stub, left_s: stub.RenewRun(request, timeout=left_s), ttl_s
                )
            except (grpc.aio.AioRpcError, UnavailableError) as error:
                fenced = run_error(error)
                if isinstance(fenced, RunFencedError):
                    _log.error("%s", fenced)
                    self.lost(fenced)
                    return
                # Retry while no scheduler answers: the next leader takes the run for alive.
                why = reason_of(error)
                if why != warned:
                    _log.warning("the run of job %s is not renewed: %s", self._job, why)
                warned = why
            else:
                warned = ""
