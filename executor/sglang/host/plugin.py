"""Plugin `rose_host` of SGLang: publishes a stock scheduler's state; inert unless ROSE_ROLE=host.

    Scheduler.__init__                   attach: page, seat, lending
    Scheduler._add_request_to_queue      a request came, or was put back
    Scheduler.get_next_batch_to_run      a turn with work: lend, or take back
    Scheduler.run_batch                  a step begins
    Scheduler.process_batch_result       it is done
    Scheduler.abort_request              requests may be gone
    Scheduler.on_idle                    nothing to do: lend
    Scheduler.maybe_sleep_on_idle        not while there is more to lend
    Scheduler.run_event_loop             its end: leave the page
    TokenizerManager._handle_batch_output   latencies of finished requests
Of a host that lends:

    allocator.alloc …                    lent blocks count as free, unless they are a GPU's
    Scheduler.update_running_batch       a decode waits for lent blocks of a GPU
    SchedulerRequestReceiver._broadcast_reqs_across_ranks   several ranks lend the same
    pool._create_buffers                 with ROSE_KV_BACKEND=cuda: KV memory that can go

Each hook calls the original function with its arguments, and returns its result.
"""

import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from executor.control_page.seqlock_records import LatencyRecord
from executor.engine_settings import HOST, LEND, EngineSettings
from executor.errors import ExecutorError
from executor.host.kv_lender import HostLender
from executor.host.plugin import KEEPS, SERVES_ON, HostPlugin, LatencyWriter, lending_limits
from executor.kv.rank_pages import RankPager
from executor.rank_group import RankGroup
from executor.sglang import surfaces
from executor.sglang.compat import (
    HOST_NEEDED,
    SCHEDULER,
    VERSIONS,
    EnginePart,
    Hook,
    check_features,
    check_version,
    client_request_id,
    own_devices,
    part_of_engine,
    stand_around,
)
from executor.sglang.host.kv_lender import (
    LendingAllocator,
    check_scheduler,
    lender_of,
    lending_pool,
)
from executor.sglang.host.state_publisher import BatchPublisher
from executor.sglang.kv_pool import ChangeKind, PoolChange
from executor.sglang.ranks import RankMessage
from executor.sglang.reserved_pool import ReservedBuffers

TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager"
HANDLE_OUTPUT: Final = f"{TOKENIZER}.TokenizerManager._handle_batch_output"
HEALTH_CHECK: Final = "HEALTH_CHECK"
"""Prefix of the ids of SGLang's own health checks, whose latencies do not count."""
# Pause of an idle host that has nothing more to lend before it looks again.
IDLE_LOOK_NS: Final = 50_000_000
_ALLOCATOR: Final = "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator"
_PAGED: Final = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_RECEIVE: Final = (
    "sglang.srt.managers.scheduler_components.request_receiver"
    ".SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)

logger = logging.getLogger("rose.sglang")


class SglangHost(HostPlugin[BatchPublisher]):
    """Publisher and lender of one SGLang scheduler; only the scheduler's thread may call it."""

    log = logger
    publisher = BatchPublisher

    def __init__(self, scheduler: Any, refused: ExecutorError | None = None) -> None:  # noqa: ANN401 -- SGLang's
        """Create the host, without publishing; see `attach`.

        refused: the reason why this SGLang cannot be a host, if it is known already.
        """
        self._scheduler = scheduler
        self._refused = refused
        self._ranks = RankGroup.of(scheduler.tp_group)
        # Several ranks lend in `message` alone.
        self._deciding = self._ranks.size == 1
        self.asked = False
        self._stops: tuple[Exception | None] | None = None
        self.pool: LendingAllocator | None = None
        self.pager: RankPager | None = None
        self._began_ns = self._look_ns = 0

    def arrived(self, request: Any, *, again: bool) -> None:  # noqa: ANN401 -- SGLang's Req
        """Publish a request that came to the queue or came back (`again`).

        A lending host takes memory back for it.
        """
        if self._observer is not None:
            self._quietly(self._tell_arrival, self._observer, request, again)
            if self._deciding:
                self._lend(arrived=True)

    def turn(self, *_: object) -> None:
        """Begin a turn of the scheduler's loop; lend or take back if there are requests.

        An idle host lends in `idled`.
        """
        self._began_ns = time.monotonic_ns()
        if self._deciding and self._busy:
            self._lend()

    def begin(self, batch: Any, *_: object) -> None:  # noqa: ANN401 -- SGLang's ScheduleBatch
        """Record and publish the begin of a step."""
        if self._lender is not None:
            self._lender.step_begun()
        if self._observer is not None:
            self._quietly(self._observer.began, batch, self._began_ns)

    def done(self, batch: Any, *_: object) -> None:  # noqa: ANN401 -- SGLang's ScheduleBatch
        """Record a processed step."""
        if self._lender is not None:
            self._lender.step_done()
            self._note_ended(batch)
        if self._observer is not None:
            self._quietly(self._observer.stepped, batch)

    def aborted(self, *_: object) -> None:
        """Publish the remaining requests after an abort."""
        if self._observer is not None:
            self._quietly(self._observer.aborted)

    def idled(self) -> None:
        """Publish a turn of the loop without work, and lend, before SGLang sleeps."""
        if self._observer is not None:
            self._quietly(self._observer.idled)
        if self._deciding and self._due():
            self._lend()

    def message(self) -> RankMessage | None:
        """Lend or take back, as the first of several ranks; return what all ranks have to do."""
        pool = self.pool
        if pool is None or self._deciding:
            return None
        changes: list[PoolChange] = []
        pool.changes = changes
        self._deciding = True
        try:
            if self._stops is not None:
                self.stop_lending(*self._stops)
            elif self._busy or self._due():
                self._lend()
        finally:
            self._deciding, self._stops, pool.changes = False, None, None
        operations = pool.pages.drain()
        return RankMessage(tuple(changes), tuple(operations)) if changes or operations else None

    @property
    def _busy(self) -> bool:
        return bool(self._scheduler.waiting_queue or self._scheduler.running_batch.reqs)

    def _due(self) -> bool:
        """Return True if an idle host is to look for memory to lend or to take back now."""
        now_ns = time.monotonic_ns()
        if self._lender is None or not (self._lender.pending or now_ns >= self._look_ns):
            return False
        self._look_ns = now_ns + IDLE_LOOK_NS
        return True

    @property
    def awake(self) -> bool:
        """True if an idle host has more to lend and must not sleep."""
        return self._lender is not None and self._lender.pending

    def leave(self) -> None:
        """Release the page's seat, for its next host."""
        self._quietly(self._leave)

    def stop_lending(self, why: Exception | None = None) -> None:
        """Take lent memory back and restore SGLang's own pool; several ranks do in `message`."""
        if not self._deciding:
            self._stops = (why,)
            return
        super().stop_lending(why)
        if self._lender is None:
            self.pool = None

    def _tell_arrival(self, observer: BatchPublisher, request: Any, again: bool) -> None:  # noqa: ANN401
        # With this an answer that is not streamed has the time of its first token, too.
        request.time_stats.has_timing_data = True
        observer.arrived(request, again=again)

    def _note_ended(self, batch: Any) -> None:  # noqa: ANN401 -- SGLang's ScheduleBatch
        if self.pool is not None:
            now_ns = time.monotonic_ns()
            for request in batch.reqs:
                if request.finished_reason is not None:
                    self.pool.warm.add(now_ns, request.seqlen)

    def _check(self) -> tuple[str, str]:
        if self._refused is not None:
            raise self._refused
        support = check_version(surfaces.HOST)
        check_features(self._scheduler.server_args, HOST_NEEDED, "a host")
        return VERSIONS.installed, support

    @property
    def _engine(self) -> Any:  # noqa: ANN401 -- SGLang's scheduler
        return self._scheduler

    def _make_lender(self, settings: EngineSettings) -> HostLender:
        check_version(surfaces.LENDING)
        check_scheduler(self._scheduler)
        self.asked = self._ranks.agree(True)
        self.pool, self.pager = lending_pool(self._scheduler, self._ranks, settings.kv_backend)
        page_tokens = int(self._scheduler.token_to_kv_pool_allocator.page_size)
        return lender_of(self.pool, lending_limits(settings), page_tokens)

    def _identity(self) -> tuple[str, tuple[str, ...]]:
        arguments = self._scheduler.server_args
        name = arguments.served_model_name or arguments.model_path
        return str(name), own_devices(arguments)

    def _demand(self) -> tuple[int, int]:
        scheduler, observer = self._scheduler, self._observer
        queue = scheduler.waiting_queue
        requests = observer.requests if observer is not None else 0
        return max(requests, len(queue)), queue[0].seqlen if queue else 0


class HostHooks:
    """Hooks of a host process, and its SglangHost, or on other ranks a pool that follows."""

    def __init__(self, *, lends: bool) -> None:
        self._lends = lends
        self._host: SglangHost | None = None
        self._ranks = RankGroup()
        self._followed: LendingAllocator | None = None
        self._pager: RankPager | None = None
        self.refused: ExecutorError | None = None

    @property
    def host(self) -> SglangHost | None:
        """Host of this process; None before its scheduler and on ranks that do not publish."""
        return self._host

    @property
    def hooks(self) -> Mapping[str, Hook]:
        """Hooks by the full names of the functions that they are set around."""
        named: dict[str, Hook] = {
            f"{SCHEDULER}.__init__": self.made,
            f"{SCHEDULER}._add_request_to_queue": self.add_request,
            f"{SCHEDULER}.get_next_batch_to_run": self._before(SglangHost.turn),
            f"{SCHEDULER}.run_batch": self._before(SglangHost.begin),
            f"{SCHEDULER}.process_batch_result": self._after(SglangHost.done),
            f"{SCHEDULER}.abort_request": self._after(SglangHost.aborted),
            f"{SCHEDULER}.on_idle": self._before(SglangHost.idled),
            f"{SCHEDULER}.maybe_sleep_on_idle": self.maybe_sleep,
            f"{SCHEDULER}.run_event_loop": self.run_event_loop,
        }
        if self._lends:
            for owner in (_ALLOCATOR, _PAGED):
                named[f"{owner}.alloc"] = self.allocate
                named[f"{owner}.available_size"] = self.available
                named[f"{owner}.clear"] = self.clear
            named[f"{_PAGED}.alloc_extend"] = self.allocate_extend
            named[f"{_PAGED}.alloc_decode"] = self.allocate_decode
            named[f"{SCHEDULER}.update_running_batch"] = self.update_running_batch
            named[_RECEIVE] = self.receive
        return named

    def made(self, original: Hook, scheduler: Any, *a: Any, **named: Any) -> None:  # noqa: ANN401
        """Make the scheduler, then attach a host to it on the first of the ranks."""
        original(scheduler, *a, **named)
        try:
            self._ranks = ranks = RankGroup.of(scheduler.tp_group)
            if not ranks.follows:
                self._attach(scheduler)
            elif self._lends and ranks.agree():
                backend = EngineSettings.from_environ(os.environ).kv_backend
                self._followed, self._pager = lending_pool(scheduler, ranks, backend)
        except ExecutorError as error:
            logger.error("%s: %s", KEEPS, error)  # noqa: TRY400 -- one line says it all
        except Exception:
            logger.exception(SERVES_ON)

    def _attach(self, scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
        self._host = host = SglangHost(scheduler, self.refused)
        try:
            host.attach()
        finally:
            if self._lends and not host.asked:
                self._ranks.agree(False)
            self._pager = host.pager

    def add_request(
        self,
        original: Hook,
        scheduler: Any,  # noqa: ANN401 -- SGLang's
        request: Any,  # noqa: ANN401
        *a: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Queue a request as SGLang does, and publish it unless SGLang refused it."""
        found = original(scheduler, request, *a, **named)
        if self._host is not None and request.finished_reason is None:
            again = bool(request.output_ids) or bool(named.get("is_retracted") or (a and a[0]))
            self._host.arrived(request, again=again)
        return found

    def _before(self, act: Callable[..., None]) -> Hook:
        """Return a hook that calls `act` on the host, then SGLang's own function."""

        def around(original: Hook, scheduler: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
            if self._host is not None:
                act(self._host, *a)
            return original(scheduler, *a, **named)

        return around

    def _after(self, act: Callable[..., None]) -> Hook:
        """Return a hook that calls SGLang's own function, then `act` on the host."""

        def around(original: Hook, scheduler: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
            found = original(scheduler, *a, **named)
            if self._host is not None:
                act(self._host, *a)
            return found

        return around

    def maybe_sleep(self, original: Hook, scheduler: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Sleep as SGLang does, unless there is more to lend."""
        if self._host is not None and self._host.awake:
            return None
        return original(scheduler)

    def run_event_loop(self, original: Hook, scheduler: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Run SGLang's loop until its end, then release the page's seat."""
        try:
            return original(scheduler)
        finally:
            if self._host is not None:
                self._host.leave()

    def receive(
        self,
        original: Hook,
        receiver: Any,  # noqa: ANN401 -- SGLang's
        requests: Any,  # noqa: ANN401 -- a list on the first rank, else None
        *a: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return the requests of a turn on every rank; a RankMessage travels with them."""
        message = self._host.message() if self._host is not None else None
        if message is not None:
            requests = [*requests, message]
        received = original(receiver, requests, *a, **named)
        if self._pager is None:
            return received
        messages = [one for one in received if isinstance(one, RankMessage)]
        for change in (change for message in messages for change in message.changes):
            if self._followed is not None:
                self._followed.follow(change)
            if change.kind is ChangeKind.DISSOLVE:
                self._followed = None
        self._pager.carry_out([step for message in messages for step in message.operations])
        return [one for one in received if not isinstance(one, RankMessage)]

    def update_running_batch(self, original: Hook, scheduler: Any, batch: Any) -> Any:  # noqa: ANN401
        """Return SGLang's batch to decode; None, no decode, while it waits for lent blocks."""
        pool = self._pool
        if pool is None or pool.hold is None:
            return original(scheduler, batch)
        if not pool.held or batch.is_empty() or batch.check_decode_mem():
            pool.hold.over()
        elif self._ranks.agree(pool.hold.waits(time.monotonic_ns(), len(batch.reqs))):
            return None
        return original(scheduler, batch)

    def allocate(self, original: Hook, allocator: Any, need_size: int) -> Any:  # noqa: ANN401
        """Return newly allocated slots, or None; lent granules are taken back if need be."""
        return self._allocated(allocator, need_size, lambda: original(allocator, need_size))

    def allocate_extend(self, original: Hook, allocator: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Return slots for a prefill, or None; lent granules are taken back if need be."""
        tokens = int(named["extend_num_tokens"] if "extend_num_tokens" in named else a[5])
        sequences = len(named["seq_lens"] if "seq_lens" in named else a[2])
        # Each sequence may begin a page of which it needs a part.
        tokens += (sequences + 1) * int(allocator.page_size)
        return self._allocated(allocator, tokens, lambda: original(allocator, *a, **named))

    def allocate_decode(self, original: Hook, allocator: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Return slots for a decode, or None; lent granules are taken back if need be."""
        sequences = len(named["seq_lens"] if "seq_lens" in named else a[0])
        tokens = sequences * int(allocator.page_size)
        return self._allocated(allocator, tokens, lambda: original(allocator, *a, **named))

    def available(self, original: Hook, allocator: Any) -> int:  # noqa: ANN401 -- SGLang's
        """Return the number of free tokens; lent ones are included where they come at once."""
        pool = self._pool_of(allocator)
        free = int(original(allocator))
        return free if pool is None else free + pool.counted_tokens

    def clear(self, original: Hook, allocator: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Clear the allocator as SGLang does, and take the lent granules out of it again."""
        found = original(allocator)
        pool = self._pool_of(allocator)
        if pool is not None:
            pool.cleared()
        return found

    def _allocated(self, allocator: Any, tokens: int, try_it: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return the result of `try_it`; while that is None, take lent granules back and try again.

        None once no granule is lent any more.
        """
        found = try_it()
        if found is None and (pool := self._pool_of(allocator)) is not None:
            while found is None and pool.short_of(tokens):
                found = try_it()
        return found

    def _pool_of(self, allocator: Any) -> LendingAllocator | None:  # noqa: ANN401 -- SGLang's
        pool = self._pool
        return pool if pool is not None and pool.owns(allocator) else None

    @property
    def _pool(self) -> LendingAllocator | None:
        return self._host.pool if self._host is not None else self._followed


def _reserved_buffers() -> Mapping[str, Hook]:
    """Return the hooks that put KV buffers into reserved memory; the host logs invalid settings."""
    try:
        return ReservedBuffers(EngineSettings.from_environ(os.environ)).hooks
    except ExecutorError:
        return {}


def _can_lend() -> bool:
    """Return True if this SGLang has the names that lending needs; its lender says what lacks."""
    try:
        check_version(surfaces.LENDING)
    except ExecutorError:
        return False
    return True


def register() -> None:
    """Set the host's hooks: the entry point of the plugin group `sglang.srt.plugins`.

    With an SGLang version that ROSE does not work with, one hook is set, which logs that.
    """
    if os.environ.get("ROSE_ROLE") != HOST:
        return
    hosts = HostHooks(lends=os.environ.get("ROSE_HOST_LEVEL") == LEND and _can_lend())
    part = part_of_engine()
    try:
        check_version(surfaces.HOST)
        if part is EnginePart.SCHEDULER:
            stand_around({**hosts.hooks, **_reserved_buffers()})
        # Further processes of the API are children, like schedulers.
        if part is EnginePart.SERVER or TOKENIZER in sys.modules:
            stand_around({HANDLE_OUTPUT: LatencyHook()})
    except ExecutorError as error:
        hosts.refused = error
        made = f"{SCHEDULER}.__init__"
        if part is EnginePart.SCHEDULER:
            stand_around({made: hosts.hooks[made]})


def latency_record(
    request_id: str,
    stats: Any,  # noqa: ANN401 -- SGLang's APIServerReqTimeStats
    prompt_tokens: int,
    output_tokens: int,
    now_s: float,
    now_ns: int,
) -> LatencyRecord:
    """Return the latency record of a finished request.

    `now_s` on SGLang's clock and `now_ns` on the page's are the same moment.
    """
    finished_s = stats.finished_time or now_s
    first_s = stats.first_token_time or finished_s
    gaps = output_tokens - 1
    return LatencyRecord(
        request_id=client_request_id(request_id),
        finished_ns=now_ns - max(0, round((now_s - finished_s) * 1e9)),
        ttft_ns=max(0, round((first_s - stats.created_time) * 1e9)),
        tpot_ns=max(0, round((finished_s - first_s) / gaps * 1e9)) if gaps > 0 else 0,
        e2e_ns=max(0, round((finished_s - stats.created_time) * 1e9)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


class LatencyHook:
    """Hook around TokenizerManager._handle_batch_output that publishes request latencies.

    Each API process has one.
    """

    def __init__(self) -> None:
        self._writer: LatencyWriter | None = None

    async def __call__(
        self,
        original: Callable[[Any, Any], Awaitable[Any]],
        manager: Any,  # noqa: ANN401 -- SGLang's
        received: Any,  # noqa: ANN401 -- a batch of outputs
    ) -> Any:  # noqa: ANN401
        """Handle a batch of outputs as SGLang does, publish its finished requests' latencies."""
        ended = _ending(manager, received)
        found = await original(manager, received)
        if ended:
            if self._writer is None:
                self._writer = LatencyWriter(logger)
            self._writer.append(lambda: _records(received, ended))
        return found


def _ending(manager: Any, received: Any) -> list[tuple[int, Any]]:  # noqa: ANN401 -- SGLang's
    """Return index and state of each request that ends with this batch, before SGLang drops it."""
    try:
        states = manager.rid_to_state
        reasons = zip(received.rids, received.finished_reasons, strict=True)
        return [
            (at, states[id_])
            for at, (id_, reason) in enumerate(reasons)
            if reason is not None and id_ in states and not id_.startswith(HEALTH_CHECK)
        ]
    except Exception:
        logger.exception("the host serves on; latencies of a batch are not published")
        return []


def _records(received: Any, ended: list[tuple[int, Any]]) -> Iterator[LatencyRecord]:  # noqa: ANN401
    """Yield the latency records; a request that ended before its first token has none."""
    now_s, now_ns = time.perf_counter(), time.monotonic_ns()
    tokens = getattr(received, "completion_tokens", None) or [0] * len(received.rids)
    for at, state in ended:
        if tokens[at] > 0:
            yield latency_record(
                received.rids[at],
                state.time_stats,
                received.prompt_tokens[at],
                tokens[at],
                now_s,
                now_ns,
            )
