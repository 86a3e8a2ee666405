"""Guest scheduler of vLLM: every step needs the gate's permission; oversized requests are aborted.

Loaded by `--scheduler-cls executor.vllm.guest.scheduler.GatedScheduler`.
"""

import logging
import os
import time
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from executor.engine_settings import GUEST, WARM_UP, EngineSettings
from executor.guest.gate_client import EngineLoad
from executor.guest.plugin import GuestPlugin
from executor.kv.shrink_plan import Rollout, blocks_in
from executor.vllm import surfaces
from executor.vllm.compat import (
    SampledSurface,
    StepSurface,
    capped,
    check_features,
    check_version,
    ended_requests,
    waiting_requests,
)
from executor.vllm.drafts import DraftScheduler
from executor.vllm.kv_backing import kv_groups, kv_pages
from executor.vllm.kv_block_pool import BalloonedPool
from executor.vllm.probes import check_addresses
from executor.vllm.rank_worker import carry


class AbortQueue:
    """Requests that the guest aborted by itself, reported to clients with the next outputs."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, str]] = []

    def ended(self, requests: Iterable[tuple[int, str]]) -> None:
        """Add (client index, request id) pairs of requests that the scheduler ended by itself."""
        self._ended.extend(requests)

    def tell(self, outputs: dict[int, Any]) -> None:
        """Move the queued requests' last outputs into `outputs`, which are by client index."""
        for client, request_id in self._ended:
            last = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(last)
        self._ended.clear()


class GatedScheduler(GuestPlugin, DraftScheduler):
    """Scheduler of a guest that asks the gate before every step; a refusal makes an empty schedule.

    An empty schedule still carries aborts and finished requests to the workers, and leaves vLLM's
    own pause state alone: with that set from outside, the engine core would block on its queue and
    never look at the page again. Inert unless ROSE_ROLE=guest. A guest does not start, with
    ExecutorError, if its page cannot be mapped, its step profile cannot be read, its vLLM is not
    tested, or a feature breaks a promise.
    """

    # vLLM shows the lines of its own loggers' children.
    log = logging.getLogger("vllm.rose.guest")

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        settings = EngineSettings.from_environ(os.environ)
        if settings.role != GUEST:
            self.log.warning("ROSE_ROLE is not %s: this engine runs without a gate", GUEST)
            return
        check_version(surfaces.GUEST)
        check_features(self.vllm_config)
        self._aborts = AbortQueue()
        pages, granules = kv_pages(self.vllm_config, self.kv_cache_config, settings.kv_backend)
        check_addresses(self.vllm_config, self.kv_cache_config, pages)
        pool = BalloonedPool(self.kv_cache_manager.block_pool, granules, pages)
        self._groups = kv_groups(self.vllm_config, self.kv_cache_config)
        block_tokens = min((group.block_tokens for group in self._groups), default=self.block_size)
        self.attach(settings, pool, block_tokens)

    def schedule(self, *args: object, **kwargs: object) -> StepSurface:
        """Schedule one step within the gate's grant and return it; the step may be empty."""
        output: StepSurface
        if not self.gated:
            output = super().schedule(*args, **kwargs)
            return output
        with capped(self, *self.permit()):
            output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._kv.step_begun()
        carry(output, self._kv.pages)
        self._gate.scheduled(self._load(), output.total_num_scheduled_tokens)
        return output

    def update_from_output(
        self, scheduler_output: StepSurface, model_runner_output: SampledSurface
    ) -> dict[int, Any]:
        """Process a step's output as vLLM does, publish it, and return the outputs by client."""
        result: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if self.gated:
            if scheduler_output.total_num_scheduled_tokens:
                self._kv.step_done()
            self._aborts.tell(result)
            self._gate.stepped(
                self._load(),
                scheduler_output.total_num_scheduled_tokens,
                len(scheduler_output.num_scheduled_tokens),
                _rollout_tokens(model_runner_output),
            )
        return result

    def has_requests(self) -> bool:
        """Return True if there are requests, or KV memory is to be returned.

        An idle core calls this when something wakes it, as `rose.replica.control` does.
        """
        return super().has_requests() or (self.gated and self.memory_wanted())

    def _waiting_sizes(self) -> Iterable[tuple[str, int]]:
        return [(request.request_id, request.num_tokens) for request in waiting_requests(self)]

    def _blocks_for(self, tokens: int) -> int:
        # A request whose drafts do not fit would be preempted for them again and again.
        return blocks_in(self._groups, tokens + self.draft_tokens + self.num_lookahead_tokens)

    def _hand_back(self, request_ids: Collection[str]) -> None:
        ended = self.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._aborts.ended(ended_requests(ended))

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

    def _load(self) -> EngineLoad:
        running, waiting = self.get_request_counts()
        pool = self.kv_cache_manager.block_pool
        return EngineLoad(running, waiting, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _rollout_tokens(output: SampledSurface) -> int:
    """Return the number of new tokens of a step's rollouts, without a warm-up's."""
    sampled = zip(output.req_ids, output.sampled_token_ids or (), strict=False)
    return sum([len(tokens) for name, tokens in sampled if not name.startswith(WARM_UP)])
