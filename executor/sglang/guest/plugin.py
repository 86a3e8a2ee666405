"""Plugin `rose_guest` of SGLang: sets the guest's hooks; inert unless ROSE_ROLE is guest.

Scheduler.run_event_loop              attach: page, gate, balloon, watchdog
Scheduler._should_defer_prefill       gate: may a step begin, how large; KV to the grant's cap
Scheduler._get_new_batch_prefill_raw  tokens of a prefill, its chunks included
Scheduler.get_num_allocatable_reqs    sequences
Scheduler.update_running_batch        no decode without the gate's permission
Scheduler.run_batch                   a step begins; its tokens are stamped
Scheduler.process_batch_result        a step is done
IdleSleeper.maybe_sleep               an idle guest notices that its memory is wanted
allocator.clear                       held granules stay held

Work before, within and after each step:

    begin      aborted requests end; the gate grants tokens and sequences; KV comes to its cap
    prefill    at most the granted tokens, chunks included; no more sequences than granted
    decode     one token a sequence: sequences beyond the tokens are parked
    parked     back in the queue; its KV stays in the prefix cache, and it resumes with one token

Of several tensor-parallel ranks the first one alone asks the gate and fits the KV memory, and each
step begins with a broadcast of its decision, which all ranks follow (`executor.sglang.ranks`).

A step is one pass: SGLang's overlapped scheduling is off in a guest, so that nothing is in flight
when the gate is asked. Retracted requests keep their tokens and compute their KV again.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from executor.engine_settings import GUEST, WARM_UP, EngineSettings
from executor.errors import ExecutorError
from executor.guest.gate_client import EngineLoad, StartGate
from executor.guest.plugin import GuestPlugin, watch
from executor.kv.rank_pages import RankPager
from executor.kv.shrink_plan import Rollout
from executor.rank_group import RankGroup, wait_together
from executor.sglang import surfaces
from executor.sglang.compat import (
    GUEST_NEEDED,
    NEEDED,
    SCHEDULER,
    EnginePart,
    Hook,
    check_features,
    check_version,
    give_up,
    install,
    part_of_engine,
    stamp,
)
from executor.sglang.kv_pool import BalloonedAllocator, ChangeKind, PoolChange
from executor.sglang.ranks import RankMessage, rank_memory
from executor.sglang.reserved_pool import ReservedBuffers

_SLEEPER: Final = "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep"
_ALLOCATORS: Final = (
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.clear",
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear",
)
_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
IDLE_POLL_MS: Final = 10
IDLE_ROUNDS: Final = 100
# Share of the prefix cache that is dropped at once, so that a large one is not asked often.
FORGET_SHARE: Final = 1 / 8


class GuestScheduler(GuestPlugin):
    """Gate and balloon of one guest on SGLang, and the hooks around its scheduler."""

    log = logging.getLogger("rose.sglang")

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 -- SGLang's
        settings: EngineSettings,
    ) -> None:
        """Attach to a scheduler that is complete and has not begun; all ranks do.

        Raises ExecutorError if the page, a profile or this model's KV cache cannot be used.
        """
        _check_cache(scheduler)
        self._scheduler = scheduler
        self._batch = scheduler.running_batch
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page_tokens = int(self._allocator.page_size)
        self._capacity_tokens = int(scheduler.max_total_num_tokens)
        self._ranks = RankGroup.of(scheduler.tp_group)
        memory = rank_memory(self._ranks, self._allocator, settings.kv_backend)
        self._pager = memory.pager
        self._pool = BalloonedAllocator(
            self._allocator, memory.granules, memory.pages, self._owned, self._forget
        )
        self._tell_capacity()
        self.tokens = 0
        """Most tokens of the next step; 0 for no step."""
        self.sequences = 0
        """Most sequences of the next step."""
        if self._ranks.follows:
            watch(settings, memory.pages)
        else:
            self.attach(settings, self._pool, self._page_tokens)

    def begin(self, running: Any) -> bool:  # noqa: ANN401 -- SGLang's ScheduleBatch
        """Ask the gate and fit the KV memory; return True if a step may begin.

        running: the batch of running requests; those beyond the granted tokens go back to the
        queue.
        """
        self._batch = running
        self._end_aborted()
        held = len(self._pool.held)
        self.tokens, self.sequences = self._agreed(self._pager) if self._pager else self.permit()
        if len(self._pool.held) != held:
            self._tell_capacity()
        # SGLang keeps this set until a request ends; a grant changes sooner.
        running.batch_is_full = False
        if self.tokens:
            # Admitted requests decode in the next step.
            self.sequences = min(self.sequences, self.tokens)
            self._park(self.tokens)
        return self.tokens > 0

    def _agreed(self, pager: RankPager) -> tuple[int, int]:
        """Decide on the first rank, do the same on all others; return `permit`'s result."""
        message = RankMessage()
        if self.gated:
            self._pool.changes = []
            allowed = self.permit()
            operations = self._pool.pages.drain()
            message = RankMessage(tuple(self._pool.changes), tuple(operations), *allowed)
        message = self._ranks.agree(message)
        if not self.gated:
            for change in message.changes:
                self._follow(change)
        pager.carry_out(message.operations)
        return message.tokens, message.sequences

    def _follow(self, change: PoolChange) -> None:
        match change.kind:
            case ChangeKind.PREEMPT:
                self._preempt(change.ids)
            case ChangeKind.HAND_BACK:
                self._hand_back(change.ids)
            case _:
                self._pool.follow(change)

    def get_new_batch_prefill(self, original: Hook, scheduler: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Plan a prefill of no more tokens than granted; return SGLang's result."""
        room = self.tokens // self._page_tokens * self._page_tokens
        if not room:
            return None, named.get("running_batch", a[-1] if a else None)
        full = scheduler.chunked_prefill_size, scheduler.max_prefill_tokens
        scheduler.chunked_prefill_size = room if full[0] is None else min(full[0], room)
        scheduler.max_prefill_tokens = min(full[1], room)
        try:
            return original(scheduler, *a, **named)
        finally:
            scheduler.chunked_prefill_size, scheduler.max_prefill_tokens = full

    def get_num_allocatable_reqs(
        self,
        original: Hook,
        scheduler: Any,  # noqa: ANN401 -- SGLang's
        running_bs: int,
        *a: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> int:
        """Return how many requests SGLang may add, within the granted sequences."""
        found = int(original(scheduler, running_bs, *a, **named))
        return min(found, self.sequences - running_bs)

    def update_running_batch(self, original: Hook, scheduler: Any, batch: Any) -> Any:  # noqa: ANN401
        """Return SGLang's batch to decode; without a grant None, which skips the decode."""
        return original(scheduler, batch) if self.tokens else None

    def run_batch(self, original: Hook, scheduler: Any, batch: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Publish the begin of a step, run it, stamp its tokens, and return SGLang's result."""
        if self.gated:
            self._kv.step_begun()
            self._gate.scheduled(self._load(batch), tokens_of(batch))
        result = original(scheduler, batch, *a, **named)
        stamp(batch, result)
        return result

    def process_batch_result(self, original: Hook, scheduler: Any, batch: Any, result: Any) -> Any:  # noqa: ANN401
        """Process a step's output as SGLang does, then publish the step's end."""
        before = _output_tokens(batch)
        done = original(scheduler, batch, result)
        if self.gated:
            self._kv.step_done()
            sampled = _output_tokens(batch) - before
            self._gate.stepped(self._load(batch), tokens_of(batch), len(batch.reqs), sampled)
        return done

    def maybe_sleep(self, original: Hook, sleeper: Any) -> None:  # noqa: ANN401 -- SGLang's
        """Wait for a message to an idle engine, a second at most; less if memory is wanted."""
        del original
        # Other ranks' lenders of pages are heard in steps alone, an empty one too.
        for _ in range(IDLE_ROUNDS if self._pool.pages.always_restores or not self._pager else 1):
            if sleeper.poller.poll(IDLE_POLL_MS) or self.memory_wanted():
                return

    def clear(self, original: Hook, allocator: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Clear the allocator as SGLang does, and take the held granules out of it again."""
        done = original(allocator)
        if allocator is self._allocator:
            self._pool.cleared()
        return done

    def _preempt(self, request_ids: Collection[str]) -> None:
        self._pool.note(PoolChange(ChangeKind.PREEMPT, ids=tuple(request_ids)))
        self._requeue(set(request_ids), keep_kv=False)

    def _park(self, tokens: int) -> None:
        """Send all but the `tokens` oldest running requests back to the queue, their KV cached."""
        beyond = self._batch.reqs[tokens:]
        self._requeue({request.rid for request in beyond}, keep_kv=True)

    def _requeue(self, ids: set[str], *, keep_kv: bool) -> None:
        scheduler, batch = self._scheduler, self._batch
        gone = [request for request in batch.reqs if request.rid in ids]
        chunked = scheduler.chunked_req
        if not keep_kv and chunked is not None and chunked.rid in ids:
            scheduler.chunked_req = None
            gone.append(chunked)
        if not gone:
            return
        for request in gone:
            self._release(request, keep_kv=keep_kv)
            request.reset_for_retract()
            scheduler._add_request_to_queue(request, is_retracted=True)
        left = [n for n, request in enumerate(batch.reqs) if request.rid not in ids]
        batch.filter_batch(keep_indices=left)
        # They have waited already: in front of requests that have not.
        back = [request for request in scheduler.waiting_queue if request.rid in ids]
        others = [request for request in scheduler.waiting_queue if request.rid not in ids]
        scheduler.waiting_queue = back + others

    def _release(self, request: Any, *, keep_kv: bool) -> None:  # noqa: ANN401 -- SGLang's Req
        """Free a request's KV; with `keep_kv` leave it to the prefix cache."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(request, self._scheduler.tree_cache, checkpoint=keep_kv)

    def _end_aborted(self) -> None:
        """End aborted requests at once: SGLang lets each run one more step, and none may come."""
        batch = self._batch
        ended = [request for request in batch.reqs if request.to_finish is not None]
        if ended:
            for request in ended:
                request.finished_reason, request.to_finish = request.to_finish, None
                self._release(request, keep_kv=False)
                self._end(request)
            batch.filter_batch()

    def _tell_capacity(self) -> None:
        """Set the size of the pool for SGLang's idle check that no block was lost."""
        away = self._pool.held_blocks * self._page_tokens
        self._scheduler.invariant_checker.max_total_num_tokens = self._capacity_tokens - away

    def _waiting_sizes(self) -> Iterable[tuple[str, int]]:
        return [
            (request.rid, len(request.origin_input_ids) + len(request.output_ids))
            for request in self._scheduler.waiting_queue
        ]

    def _blocks_for(self, tokens: int) -> int:
        return -(-(tokens + 1) // self._page_tokens)

    def _hand_back(self, request_ids: Collection[str]) -> None:
        self._pool.note(PoolChange(ChangeKind.HAND_BACK, ids=tuple(request_ids)))
        lost, queue = set(request_ids), self._scheduler.waiting_queue
        self._scheduler.waiting_queue = [r for r in queue if r.rid not in lost]
        for request in queue:
            if request.rid in lost:
                self._scheduler._release_aborted_request(request)
                self._end(request)

    def _end(self, request: Any) -> None:  # noqa: ANN401 -- SGLang's Req
        """End a request at its client, so that it continues elsewhere."""
        from sglang.srt.managers.scheduler import _make_abort_req

        reason = request.finished_reason
        said = None if reason is None else reason.to_json()
        self._scheduler.send_abort_output(_make_abort_req(request, finished_reason=said), request)

    def _running(self) -> list[Any]:
        """Return the requests that have KV, each once."""
        found = {request.rid: request for request in self._batch.reqs}
        chunked = self._scheduler.chunked_req
        if chunked is not None:
            found.setdefault(chunked.rid, chunked)
        return [request for request in found.values() if request.kv.holds_kv]

    def _blocks(self, request: Any) -> torch.Tensor:  # noqa: ANN401 -- SGLang's Req
        kv = request.kv
        rows = self._scheduler.req_to_token_pool.req_to_token
        slots = rows[kv.req_pool_idx, : kv.kv_allocated_len].to(torch.int64)
        blocks: torch.Tensor = torch.unique(slots // self._page_tokens)
        return blocks

    def _owned(self) -> torch.Tensor:
        blocks = [self._blocks(request) for request in self._running()]
        return torch.unique(torch.cat(blocks)) if blocks else torch.empty(0, dtype=torch.int64)

    def _rollouts(self) -> Sequence[Rollout]:
        return [
            Rollout(r.rid, int(r.kv.kv_committed_len), self._blocks(r).tolist())
            for r in self._running()
        ]

    def _forget(self, tokens: int) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        tree, before = self._scheduler.tree_cache, self._allocator.available_size()
        share = int(tree.evictable_size() * FORGET_SHARE)
        tree.evict(EvictParams(num_tokens=max(tokens, share)))
        return int(self._allocator.available_size() - before) // self._page_tokens

    def _load(self, batch: Any = None) -> EngineLoad:  # noqa: ANN401 -- SGLang's ScheduleBatch
        """Return running and waiting requests and used KV blocks now.

        batch: one that is not among the running requests yet.
        """
        scheduler, tree = self._scheduler, self._scheduler.tree_cache
        ids = {request.rid for request in self._batch.reqs}
        if batch is not None:
            ids |= {request.rid for request in batch.reqs if not request.finished()}
        if scheduler.chunked_req is not None:
            ids.add(scheduler.chunked_req.rid)
        waiting = len(scheduler.waiting_queue) + len(scheduler.grammar_manager.grammar_queue)
        free_tokens = int(self._allocator.available_size()) + int(tree.evictable_size())
        used = self._pool.capacity_blocks - free_tokens // self._page_tokens
        return EngineLoad(len(ids), waiting, max(0, used))


def _output_tokens(batch: Any) -> int:  # noqa: ANN401 -- SGLang's ScheduleBatch
    """Return the number of output tokens of a batch's rollouts so far, without a warm-up's."""
    return sum(len(r.output_ids) for r in batch.reqs if not r.rid.startswith(WARM_UP))


def tokens_of(batch: Any) -> int:  # noqa: ANN401 -- SGLang's ScheduleBatch
    """Return the number of tokens of one step: a prefill's new ones, or one for each sequence."""
    if batch.forward_mode.is_extend():
        return int(batch.extend_num_tokens)
    return len(batch.reqs)


def _check_cache(scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
    """Raise ExecutorError for models whose KV cache is not a plain list of blocks."""
    tree = scheduler.tree_cache
    if tree.supports_swa() or tree.supports_mamba():
        raise ExecutorError(
            "a guest on SGLang serves models with full attention; this one keeps windows or states"
        )
    if not (scheduler.chunked_prefill_size or 0) > 0:
        raise ExecutorError("a guest needs chunked prefill; leave out --chunked-prefill-size=-1")


class GuestHooks:
    """Hooks of a guest process, and its GuestScheduler once the scheduler is about to run."""

    def __init__(self, settings: EngineSettings, start: StartGate | None = None) -> None:
        self._settings = settings
        self._start = start
        self._guest: GuestScheduler | None = None

    @property
    def hooks(self) -> Mapping[str, Hook]:
        """Hooks by the full names of the functions that they are set around."""
        guests: dict[str, Callable[..., Any]] = {
            f"{SCHEDULER}._get_new_batch_prefill_raw": GuestScheduler.get_new_batch_prefill,
            f"{SCHEDULER}.get_num_allocatable_reqs": GuestScheduler.get_num_allocatable_reqs,
            f"{SCHEDULER}.update_running_batch": GuestScheduler.update_running_batch,
            f"{SCHEDULER}.run_batch": GuestScheduler.run_batch,
            f"{SCHEDULER}.process_batch_result": GuestScheduler.process_batch_result,
            _SLEEPER: GuestScheduler.maybe_sleep,
            **dict.fromkeys(_ALLOCATORS, GuestScheduler.clear),
        }
        named: dict[str, Hook] = {target: self._attached(hook) for target, hook in guests.items()}
        named[f"{SCHEDULER}.run_event_loop"] = self.run_event_loop
        named[f"{SCHEDULER}._should_defer_prefill"] = self.should_defer_prefill
        if self._start is not None:
            named[_RUNNER] = self.forward
        return named

    def _attached(self, hook: Callable[..., Any]) -> Hook:
        """Return a hook that calls the guest's method; without a guest, SGLang's function."""

        def around(original: Hook, *a: Any, **named: Any) -> Any:  # noqa: ANN401 -- SGLang's
            if self._guest is None:
                return original(*a, **named)
            return hook(self._guest, original, *a, **named)

        return around

    def run_event_loop(self, original: Hook, scheduler: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Attach the guest to its scheduler, then run SGLang's loop. Raises ExecutorError."""
        check_features(scheduler.server_args, {**NEEDED, **GUEST_NEEDED})
        self._guest = GuestScheduler(scheduler, self._settings)
        if self._start is not None:
            self._start.tell()
        return original(scheduler)

    def should_defer_prefill(self, original: Hook, scheduler: Any, running_batch: Any) -> bool:  # noqa: ANN401
        """Return True, which defers prefill, if the gate permits no step; else SGLang's answer."""
        if self._guest is None or not self._guest.begin(running_batch):
            return True
        return bool(original(scheduler, running_batch))

    def forward(self, original: Hook, runner: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Run a forward pass; one of the engine's start waits for the host first."""
        if self._guest is None and self._start is not None:
            wait_together(self._start, RankGroup.of(runner.tp_group))
        return original(runner, *a, **named)


def register() -> None:
    """Set the guest's hooks: the entry point of the plugin group `sglang.srt.plugins`.

    It does nothing in other roles and processes, and ends the process if ROSE cannot run here.
    """
    if os.environ.get("ROSE_ROLE") != GUEST or part_of_engine() is not EnginePart.SCHEDULER:
        return
    try:
        check_version(surfaces.GUEST)
        settings = EngineSettings.from_environ(os.environ)
        start = StartGate.from_environ(os.environ)
    except ExecutorError as error:
        give_up(error)
    install({**GuestHooks(settings, start).hooks, **ReservedBuffers(settings).hooks})
