"""Workers of vLLM with KV pages that their engine's scheduler moves, and a start that is gated.

A worker in the engine core (UniProcExecutor) shares its memory with the scheduler. Elsewhere, one
process a rank (the `mp` executor), each rank carries out the operations on pages that a step has
with it (`executor.kv.rank_pages`), before the step's own work.

The forward passes of a guest's start wait for its host: on the first rank of a tensor-parallel
group by the gate, and on its other ranks by a message of the first, so that none of them waits
busily in a collective of the pass beside a busy host.
"""

import logging
import os
from typing import Any, Final

import torch

from executor.engine_settings import HOST, EngineSettings
from executor.guest.gate_client import StartGate
from executor.kv.backing import NoPages, PageBackend
from executor.kv.rank_pages import CommonGranule, RankPager
from executor.rank_group import RankGroup, wait_together
from executor.vllm.kv_backing import kv_pages
from executor.vllm.probes import check_addresses

OPERATIONS: Final = "rose_page_operations"
"""Attribute of a step's SchedulerOutput: the operations that each rank carries out before it."""

_log = logging.getLogger("vllm.rose.worker")


def host_goes_on(error: Exception) -> None:
    """Log a warning if the engine is a host, else raise `error`."""
    if os.environ.get("ROSE_ROLE") != HOST:
        raise error
    _log.warning("KV memory is not reserved; the host serves on without lending it: %s", error)


def carry(output: Any, pages: PageBackend) -> None:  # noqa: ANN401 -- vLLM's SchedulerOutput
    """Have a step carry the operations on pages that were decided since the last one."""
    if operations := pages.drain():
        setattr(output, OPERATIONS, operations)


class RankedWorker:
    """Base of a worker class, before vLLM's own, that carries out its scheduler's page operations.

    It does so in a process of its own (the `mp` executor), for a guest and for a host that lends.
    """

    vllm_config: Any
    rank: int
    pager: RankPager | None = None
    _kv_cache_config: Any = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 -- vLLM's type
        """Allocate the KV cache as vLLM does."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._kv_cache_config = kv_cache_config

    def compile_or_warm_up_model(self) -> Any:  # noqa: ANN401 -- vLLM's own
        """Warm up as vLLM does, then report the KV pages to the engine's scheduler.

        A host whose pages cannot be moved goes on with a warning. Raises ExecutorError in a guest.
        """
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        settings = EngineSettings.from_environ(os.environ)
        parallel = self.vllm_config.parallel_config
        if settings.moves_pages and parallel.distributed_executor_backend == "mp":
            try:
                self.pager = self._make_pager(settings, parallel.world_size)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the host starts
                host_goes_on(error)
        return result

    def execute_model(self, scheduler_output: Any) -> Any:  # noqa: ANN401 -- vLLM's types
        """Carry out the step's operations on pages, then run it as vLLM does."""
        if self.pager is not None:
            self.pager.carry_out(getattr(scheduler_output, OPERATIONS, ()))
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _make_pager(self, settings: EngineSettings, ranks: int) -> RankPager | None:
        common = CommonGranule(_gather)
        try:
            pages, granules = kv_pages(
                self.vllm_config, self._kv_cache_config, settings.kv_backend, common
            )
        finally:
            common.close()
        if isinstance(pages, NoPages):
            return None
        check_addresses(self.vllm_config, self._kv_cache_config, pages)
        return RankPager(pages, granules, self.rank, ranks)


def _gather(value: int) -> list[int]:
    """Return the values of all ranks."""
    from vllm.distributed.parallel_state import get_world_group

    return RankGroup.of(get_world_group()).gather(value)


class GatedStart:
    """Base of a worker class, before vLLM's own, that gates the forward passes of a guest's start.

    `start_gate` is None for an engine that starts ungated.
    """

    model_runner: Any
    start_gate: StartGate | None = None
    _start_hook: Any = None

    def load_model(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 -- vLLM's own
        """Load the model as vLLM does, and gate its passes from here on. Raises ExecutorError."""
        super().load_model(*arguments, **options)  # type: ignore[misc]
        self.start_gate = gate = StartGate.from_environ(os.environ)
        if gate is not None:
            model = self.model_runner.get_model()
            self._start_hook = model.register_forward_pre_hook(lambda *_: _pass(gate))

    def compile_or_warm_up_model(self) -> Any:  # noqa: ANN401 -- vLLM's own
        """Warm up and capture graphs as vLLM does, then remove the gate of the start.

        The passes that follow are steps, which the scheduler gates.
        """
        try:
            return super().compile_or_warm_up_model()  # type: ignore[misc]
        finally:
            if self._start_hook is not None:
                self._start_hook.remove()
                if self.start_gate is not None:
                    self.start_gate.tell()


def _pass(gate: StartGate) -> None:
    # A captured pass is not run.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used and torch.cuda.is_current_stream_capturing():
        return
    from vllm.distributed import parallel_state

    initialized = parallel_state.model_parallel_is_initialized()
    wait_together(gate, RankGroup.of(parallel_state.get_tp_group()) if initialized else RankGroup())
