"""Guest scheduler of vLLM: every step needs the gate's permission; oversized requests are aborted.

Loaded by `--scheduler-cls executor.vllm.guest.scheduler.GatedScheduler`.

A request that outgrew the guest's KV cap is aborted at once, so that it continues elsewhere. vLLM
would wait for blocks that do not come, and block everything behind the request with it.
"""

import logging
import os
import time
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from executor.control_page.page import ControlPage
from executor.engine_settings import GUEST, WARM_UP, EngineSettings
from executor.guest.gate_client import (
    EngineLoad,
    GateClient,
    GrantLiveness,
    Watchdog,
    gate_limits,
    step_model,
)
from executor.guest.kv_balloon import GuestKv, too_large
from executor.kv.shrink_plan import Rollout
from executor.step_decision import Run
from executor.vllm.compat import (
    SampledSurface,
    StepSurface,
    capped,
    check_features,
    check_version,
    ended_requests,
    waiting_requests,
)
from executor.vllm.kv_backing import blocks_of, kv_pages
from executor.vllm.kv_block_pool import BalloonedPool
from executor.vllm.scheduler_base import ConfiguredScheduler

logger = logging.getLogger("vllm.rose.guest")


class AbortQueue:
    """Queue of aborted requests, reported to their clients with the engine core's next outputs."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, str]] = []

    def ended(self, requests: Iterable[tuple[int, str]]) -> None:
        """Add requests, by client and id, that the scheduler ended by itself."""
        self._ended.extend(requests)

    def tell(self, outputs: dict[int, Any]) -> None:
        """Add a last output of each to the outputs for their clients."""
        for client, request_id in self._ended:
            last = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(last)
        self._ended.clear()


class GatedScheduler(ConfiguredScheduler):
    """Scheduler that asks the gate before every step; a refusal makes an empty schedule.

    An empty schedule still carries aborts and finished requests to the workers, and leaves vLLM's
    own pause state alone: with that set from outside, the engine core would block on its queue and
    never look at the page again. Inert unless ROSE_ROLE=guest. A guest does not start, with
    ExecutorError, if its page cannot be mapped, its step profile cannot be read, its vLLM is not
    tested, or a feature breaks a promise.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._gate_client: GateClient | None = None
        settings = EngineSettings.from_environ(os.environ)
        if settings.role != GUEST:
            logger.warning("ROSE_ROLE is not %s: this engine runs without a gate", GUEST)
            return
        check_version()
        check_features(self.vllm_config)
        model, limits = step_model(settings), gate_limits(settings)
        page = ControlPage.open(settings.page_path, settings.page_group)
        pages, granules = kv_pages(self.vllm_config, self.kv_cache_config, settings.kv_backend)
        pool = BalloonedPool(self.kv_cache_manager.block_pool, granules, pages)
        self._kv = GuestKv(pool, self._rollouts, self._preempt)
        self._hand_back = AbortQueue()
        self._gate_client = GateClient(page, self._kv.mapped, limits, model, self.block_size)
        orphan = GrantLiveness(time.monotonic_ns(), round(settings.orphan_s * 1e9))
        Watchdog(page, orphan, self._gate_client.beat).start()

    def schedule(self, *args: object, **kwargs: object) -> StepSurface:
        """Schedule within the gate's grant, which may be nothing."""
        gate_client = self._gate_client
        if gate_client is None:
            return self._stock_schedule(*args, **kwargs)
        load = self._load()
        tokens = sequences = 0
        if load.running or load.waiting:
            verdict = gate_client.ask(load)
            if isinstance(verdict, Run):
                tokens, sequences = verdict.token_budget, verdict.max_sequences
        else:
            gate_client.idle(load)
        if not self._fit_kv(gate_client):
            tokens = sequences = 0
        output = self._schedule_within(tokens, sequences, args, kwargs)
        if output.total_num_scheduled_tokens:
            self._kv.step_begun()
        gate_client.scheduled(self._load(), output.total_num_scheduled_tokens)
        return output

    def update_from_output(
        self, scheduler_output: StepSurface, model_runner_output: SampledSurface
    ) -> dict[int, Any]:
        """Process a step's output as vLLM does, then publish it."""
        result: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if self._gate_client is not None:
            if scheduler_output.total_num_scheduled_tokens:
                self._kv.step_done()
            self._hand_back.tell(result)
            self._gate_client.stepped(
                self._load(),
                scheduler_output.total_num_scheduled_tokens,
                len(scheduler_output.num_scheduled_tokens),
                _rollout_tokens(model_runner_output),
            )
        return result

    def has_requests(self) -> bool:
        """Return True also while KV memory is owed: an idle engine can return it only in a step.

        An idle core calls this when something wakes it, as `rose.replica.control` does.
        """
        if super().has_requests():
            return True
        gate_client = self._gate_client
        return gate_client is not None and self._kv.must_shrink(gate_client.grant())

    def _fit_kv(self, gate_client: GateClient) -> bool:
        """Bring KV memory to the grant's bound; return True when a step may begin."""
        fits = self._kv.fit(gate_client.grant())
        gate_client.mapped(self._kv.mapped, self._load())
        if self._kv.ballooned:
            lost = too_large(
                waiting_requests(self),
                self._kv.capacity_blocks,
                lambda tokens: blocks_of(self.kv_cache_config, self.vllm_config, tokens),
                self.num_lookahead_tokens,
            )
            if lost:
                logger.info("%d requests do not fit the KV cap and are handed back", len(lost))
                ended = self.finish_requests(lost, RequestStatus.FINISHED_ABORTED)
                self._hand_back.ended(ended_requests(ended))
        return fits

    def _rollouts(self) -> list[Rollout]:
        if self.deferred_frees:
            return []  # Blocks of rollouts preempted before are on their way: wait for them.
        return [
            Rollout(
                request.request_id,
                request.num_computed_tokens,
                set(chain(*self.kv_cache_manager.get_block_ids(request.request_id))),
            )
            for request in self.running
        ]

    def _preempt(self, request_ids: Collection[str]) -> None:
        chosen = frozenset(request_ids)
        # The queue gets each at its front, so the last goes first.
        for request in reversed([r for r in self.running if r.request_id in chosen]):
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            # The request may come back in this very step: the workers must start it anew.
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _schedule_within(
        self, tokens: int, sequences: int, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> StepSurface:
        with capped(self, tokens, sequences):
            return self._stock_schedule(*args, **kwargs)

    def _stock_schedule(self, *args: object, **kwargs: object) -> StepSurface:
        output: StepSurface = super().schedule(*args, **kwargs)
        return output

    def _load(self) -> EngineLoad:
        running, waiting = self.get_request_counts()
        pool = self.kv_cache_manager.block_pool
        return EngineLoad(running, waiting, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _rollout_tokens(output: SampledSurface) -> int:
    """Return the new tokens of a step's rollouts; a warm-up's do not count."""
    sampled = zip(output.req_ids, output.sampled_token_ids or (), strict=False)
    return sum([len(tokens) for name, tokens in sampled if not name.startswith(WARM_UP)])
