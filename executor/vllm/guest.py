"""`--scheduler-cls executor.vllm.guest.GatedScheduler`: no step without the gate's leave."""

import logging
import os
import time

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from executor.control_page import ControlPage
from executor.gate import Run
from executor.orphan import OrphanCore
from executor.vllm.settings import GUEST, EngineSettings
from executor.vllm.station import GuestStation, Load
from executor.vllm.surfaces import SampledSurface, StepSurface
from executor.vllm.watchdog import Watchdog

logger = logging.getLogger("vllm.rose.guest")


class GatedScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM's types are not ours to check
    """Asks the gate before every step; a refusal makes an empty schedule.

    An empty schedule still carries aborts and finished requests to the workers, and leaves vLLM's
    own pause state alone: with that set from outside, the engine core would block on its queue and
    never look at the page again. Inert unless ROSE_ROLE=guest; a guest whose page cannot be mapped
    raises PageError and so does not start.
    """

    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._station: GuestStation | None = None
        settings = EngineSettings.from_environ(os.environ)
        if settings.role != GUEST:
            logger.warning("ROSE_ROLE is not %s: this engine runs without a gate", GUEST)
            return
        page = ControlPage.open(settings.page_path)
        kv_bytes = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        self._station = GuestStation(page, kv_bytes)
        orphan = OrphanCore(time.monotonic_ns(), round(settings.orphan_s * 1e9))
        Watchdog(page, orphan, self._station.beat).start()

    def schedule(self, *args: object, **kwargs: object) -> StepSurface:
        """Schedule within what the gate allows, which may be nothing."""
        station = self._station
        if station is None:
            return self._stock_schedule(*args, **kwargs)
        load = self._load()
        tokens = sequences = 0
        if load.running or load.waiting:
            verdict = station.ask(load)
            if isinstance(verdict, Run):
                tokens, sequences = verdict.token_budget, verdict.max_sequences
        else:
            station.idle(load)
        output = self._schedule_within(tokens, sequences, args, kwargs)
        station.scheduled(self._load(), output.total_num_scheduled_tokens)
        return output

    def update_from_output(
        self, scheduler_output: StepSurface, model_runner_output: SampledSurface
    ) -> object:
        """Process a step's output as vLLM does, then publish it."""
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._station is not None:
            self._station.stepped(
                self._load(),
                scheduler_output.total_num_scheduled_tokens,
                len(scheduler_output.num_scheduled_tokens),
                sum(map(len, model_runner_output.sampled_token_ids or ())),
            )
        return result

    def _schedule_within(
        self, tokens: int, sequences: int, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> StepSurface:
        full = self.max_num_scheduled_tokens, self.max_num_active_reqs
        self.max_num_scheduled_tokens = min(full[0], tokens)
        self.max_num_active_reqs = min(full[1], sequences)
        try:
            return self._stock_schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = full

    def _stock_schedule(self, *args: object, **kwargs: object) -> StepSurface:
        output: StepSurface = super().schedule(*args, **kwargs)
        return output

    def _load(self) -> Load:
        running, waiting = self.get_request_counts()
        pool = self.kv_cache_manager.block_pool
        return Load(running, waiting, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
