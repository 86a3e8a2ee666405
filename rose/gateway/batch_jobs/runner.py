"""Runner of batches: it sends their requests below rollouts, and has each answered once.

validating ── no fault in its file ──► in_progress ── all answered ──► finalizing ──► completed
    │ faults by line                       │ cancelled, or its window is over
    ▼                                      ▼
  failed                               cancelling ──► cancelled, or expired

A batch belongs to the gateway that holds its lock. When that one dies, another one (or its
successor) goes on from the answers that are on disk; what was under way is sent anew.

Requests fill what is idle: they are sent when a place is free and nobody waits, and behind turns of
trainers that come meanwhile. A floor keeps them from starving: so many of them at a time stand in
the queue as trainers' turns do, the demand by which a scheduler leases replicas to their job.
"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import BinaryIO, Final

import msgspec

from rose.contract.gateway import RETRIED
from rose.gateway.backends.http_pool import OK
from rose.gateway.batch_jobs.folder import (
    ANSWERS,
    FAULTS,
    BatchErrors,
    BatchFolder,
    BatchRecord,
    LineFault,
    NotHere,
)
from rose.gateway.batch_jobs.lines import BatchLine, faults_of, requests_of

# Requests of all batches that are sent at a time.
MOST_AT_ONCE: Final = 1_024
# Batches that are run at a time; the others wait.
MOST_BATCHES: Final = 64
# Share of the replicas' places that batches get even when trainers would take all.
FLOOR_SHARE: Final = 0.05
# Added to the priority of requests beyond the floor: trainers' go first.
BEHIND: Final = 1 << 32
# A request that is sent has its place a moment later; until then it looks free.
TAKEN_S, LOOK_S = 0.001, 0.02
SCAN_S = 2.0
# Answers of so many seconds are flushed to disk together.
FLUSH_S = 0.05
SHOWN_S: Final = 1.0
READ_LINES: Final = 256
# Statuses of a gateway that is busy: the request is sent again, until the batch expires.
AGAIN: Final = RETRIED - {HTTPStatus.GATEWAY_TIMEOUT}
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0
EXPIRED: Final = "this request was not answered within the batch's completion window"

Say = Callable[..., None]


@dataclass(frozen=True, slots=True)
class BatchCall:
    """One request of a batch. floor: True if it stands among trainers' turns, not behind them."""

    record: BatchRecord
    path: str
    body: bytes
    floor: bool

    def placed(self, priority: int, *, first: bool = True) -> int:
        """Return the priority of a turn that asks for this one; the floor is its first turn's."""
        return max(0, priority) + (0 if self.floor and first else BEHIND)


Answerer = Callable[[BatchCall], Awaitable[tuple[int, bytes]]]
"""Answers a call with an HTTP status and a JSON body."""


@dataclass(slots=True)
class Place:
    """Leave to send one request of a job. floor: True if it stands among trainers' turns."""

    job: str
    floor: bool
    held: bool = True


class BatchRunner:
    """Runner of all batches of a folder that no other gateway runs."""

    def __init__(
        self,
        folder: BatchFolder,
        answer: Answerer,
        places: Callable[[str], int],
        room: Callable[[str], bool],
        most_line_bytes: int,
        outcomes: Counter[str],
        say: Say,
    ) -> None:
        """places: returns the number of turns that a job's replicas take. room: returns True if one
        more of the job would begin at once. most_line_bytes: longest request. outcomes: counts the
        requests by what came of them. say: logs an event.
        """
        self._folder = folder
        self._answer = answer
        self._places = places
        self._room = room
        self.most_line_bytes = most_line_bytes
        self._outcomes = outcomes
        self._say = say
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._next: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._sent = 0
        self._at_floor: Counter[str] = Counter()
        self._batches = asyncio.Semaphore(MOST_BATCHES)

    def wake(self) -> None:
        """Look for new batches now."""
        self._news.set()

    async def run(self) -> None:
        """Run batches until cancelled; those that run are left as they are on disk."""
        over: set[str] = set()
        try:
            while True:
                for batch_id in await asyncio.to_thread(self._folder.unfinished, over):
                    if batch_id not in self._running:
                        self._start(batch_id)
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), SCAN_S)
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, batch_id: str) -> None:
        task = asyncio.create_task(self._run(batch_id))
        self._running[batch_id] = task
        task.add_done_callback(lambda _: self._running.pop(batch_id))

    async def _run(self, batch_id: str) -> None:
        try:
            async with self._batches:
                with contextlib.ExitStack() as lock:
                    held = self._folder.held(batch_id)
                    if await asyncio.to_thread(lock.enter_context, held):
                        record = await asyncio.to_thread(self._folder.record, batch_id)
                        # Another gateway may have ended it since the scan.
                        if not record.over:
                            await _BatchRun(self, self._folder, record).run()
        except Exception as error:  # noqa: BLE001 -- full disks, lost files, faults of this program
            # Answers are on disk, and the batch goes on from there.
            self._say("batch_stopped", batch=batch_id, reason=repr(error)[:500])
            await asyncio.sleep(SCAN_S)

    async def place(self, job: str) -> Place:
        """Wait until one more request of a job may be sent; give the place back with `leave`."""
        async with self._next[job]:
            await asyncio.sleep(TAKEN_S)
            while True:
                floor = self._at_floor[job] < max(1, round(FLOOR_SHARE * self._places(job)))
                if floor or (self._sent < MOST_AT_ONCE and self._room(job)):
                    self._sent += 1
                    self._at_floor[job] += floor
                    return Place(job, floor)
                await asyncio.sleep(LOOK_S)

    def leave(self, place: Place) -> None:
        """Take a place back, once."""
        self._sent -= place.held
        self._at_floor[place.job] -= place.held and place.floor
        place.held = False

    async def answered(
        self, record: BatchRecord, asked: BatchLine, place: Place
    ) -> tuple[int, bytes]:
        """Return the status and body of a request, which is sent again while the gateway is busy.

        place: taken back while the request waits, and afterwards.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            call = BatchCall(record, asked.url, bytes(asked.body), place.floor)
            try:
                status, body = await self._answer(call)
            finally:
                self.leave(place)
            if status not in AGAIN:
                self._outcomes["answered" if status == OK else "failed"] += 1
                return status, body
            self._outcomes["sent_again"] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(MOST_PAUSE_S, 2 * pause_s)
            place = await self.place(record.job)


class _BatchRun:
    """One batch while this gateway runs it."""

    def __init__(self, runner: BatchRunner, folder: BatchFolder, record: BatchRecord) -> None:
        self._runner = runner
        self._folder = folder
        self._record = record
        self._batch = record.shown
        self._lines: dict[str, list[bytes]] = {ANSWERS: [], FAULTS: []}
        self._stopped = ""
        # Its requests that were sent once and are not answered: some wait to be sent again.
        self._begun = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self) -> None:
        """Run the batch from where it is to its end. Raises OSError, and then it goes on later."""
        try:
            await self._run()
        except NotHere as error:
            # Somebody has removed the file by hand.
            self._fail([LineFault("file_missing", None, str(error))])

    async def _run(self) -> None:
        record, batch = self._record, self._batch
        if batch.in_progress_at is None and not await asyncio.to_thread(self._begin):
            return
        if not record.ending:
            record.ending = await self._send_all(await asyncio.to_thread(self._done))
            batch.finalizing_at = int(time.time())
            if record.ending != "cancelled":
                batch.status = "finalizing"
            await asyncio.to_thread(self._folder.save, record)
        await asyncio.to_thread(self._end)

    def _begin(self) -> bool:
        """Begin with the batch's requests and return True; end it and return False for a file with
        faults.
        """
        batch = self._batch
        with self._file() as file:
            total, faults = faults_of(file, batch.endpoint, self._runner.most_line_bytes)
        batch.request_counts.total = total
        if faults:
            self._fail(faults)
            return False
        batch.in_progress_at = int(time.time())
        if batch.cancelling_at is None:
            batch.status = "in_progress"
        self._folder.save(self._record)
        return True

    def _fail(self, faults: list[LineFault]) -> None:
        batch = self._batch
        batch.status, batch.failed_at = "failed", int(time.time())
        batch.errors = BatchErrors(faults)
        self._folder.save(self._record)
        self._folder.clear(batch.id)

    def _done(self) -> set[str]:
        """Return the custom ids of answered requests, and count these."""
        counts, batch_id = self._batch.request_counts, self._batch.id
        answered = self._folder.answered(batch_id, ANSWERS)
        failed = self._folder.answered(batch_id, FAULTS)
        counts.completed, counts.failed = len(answered), len(failed)
        return answered | failed

    async def _send_all(self, done: set[str]) -> str:
        """Have all other requests answered; return `completed`, or why it stopped before."""
        sending = asyncio.create_task(self._send(done))
        writing = asyncio.create_task(self._write(sending))
        try:
            await asyncio.wait({sending, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            outcomes = await asyncio.gather(sending, writing, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        await self._flush()  # What was answered while it stopped.
        return self._stopped or "completed"

    async def _send(self, done: set[str]) -> None:
        """Send all requests, each when the runner has a place for it."""
        with self._file() as file:
            asked = requests_of(file, done)
            async with asyncio.TaskGroup() as group:
                while some := await asyncio.to_thread(list, islice(asked, READ_LINES)):
                    for each in some:
                        await self._begun.acquire()
                        place = await self._runner.place(self._record.job)
                        task = group.create_task(self._answer(each, place))
                        # A task that is cancelled before its first step takes nothing back.
                        task.add_done_callback(partial(self._left, place))

    def _left(self, place: Place, _: "asyncio.Task[None]") -> None:
        self._runner.leave(place)
        self._begun.release()

    async def _answer(self, asked: BatchLine, place: Place) -> None:
        status, body = await self._runner.answered(self._record, asked, place)
        response = {"status_code": status, "request_id": _new_id(), "body": msgspec.Raw(body)}
        kind = ANSWERS if status == OK else FAULTS
        self._lines[kind].append(_line(asked.custom_id, response, None))

    async def _write(self, sending: "asyncio.Task[None]") -> None:
        """Flush answers to disk and show the batch's counts until all are sent, or it has to stop.
        Raises OSError.
        """
        shown_s = 0.0
        while not self._stopped:
            last = sending.done()
            await self._flush()
            if last:
                return
            if time.monotonic() - shown_s > SHOWN_S:
                shown_s = time.monotonic()
                self._stopped = await asyncio.to_thread(self._look)
            await asyncio.sleep(FLUSH_S)

    async def _flush(self) -> None:
        lines, self._lines = self._lines, {ANSWERS: [], FAULTS: []}
        for kind, some in lines.items():
            if some:
                await asyncio.to_thread(self._folder.append, self._batch.id, kind, some)
        self._batch.request_counts.completed += len(lines[ANSWERS])
        self._batch.request_counts.failed += len(lines[FAULTS])

    def _look(self) -> str:
        """Save the batch's counts; return `cancelled` or `expired` if it is to stop."""
        batch = self._batch
        self._folder.save(self._folder.told(self._record))
        if batch.cancelling_at is not None:
            return "cancelled"
        return "expired" if int(time.time()) >= batch.expires_at else ""

    def _end(self) -> None:
        """Make files of the batch's answers, and end it; after a crash it is called again."""
        batch, record, now = self._batch, self._record, int(time.time())
        if record.ending == "expired":
            done = self._done()
            error = {"code": "batch_expired", "message": EXPIRED}
            with self._file() as file:
                late = [_line(each.custom_id, None, error) for each in requests_of(file, done)]
            self._folder.append(batch.id, FAULTS, late)
            batch.request_counts.failed += len(late)
        batch.output_file_id = self._folder.publish(record, ANSWERS, f"{batch.id}_output.jsonl")
        batch.error_file_id = self._folder.publish(record, FAULTS, f"{batch.id}_error.jsonl")
        batch.status = record.ending
        setattr(batch, f"{record.ending}_at", now)
        self._folder.save(record)
        self._folder.clear(batch.id)

    def _file(self) -> BinaryIO:
        scope = self._record.caller.scope
        return self._folder.content(self._batch.input_file_id, scope).open("rb")


def _line(custom_id: str, response: object, error: object) -> bytes:
    line = {"id": _new_id(), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
