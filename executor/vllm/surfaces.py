"""The few surfaces of vLLM that the plugins touch, and nothing else of it.

None of them is public in vLLM: they are pinned by the engine tests.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol


class RequestSurface(Protocol):
    """vllm.v1.request.Request; `arrival_time` is wall-clock seconds."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        ...


class BlockPoolSurface(Protocol):
    """vllm.v1.core.block_pool.BlockPool."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        ...


class BlockSurface(Protocol):
    """vllm.v1.core.kv_cache_utils.KVCacheBlock."""

    block_id: int
    is_null: bool
    ref_cnt: int

    @property
    def block_hash(self) -> bytes | None:
        """Name of the cached content, None without any."""
        ...


class FreeQueueSurface(Protocol):
    """vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue."""

    num_free_blocks: int

    def get_all_free_blocks(self) -> list[BlockSurface]:
        """All of them."""
        ...


class FullBlockPoolSurface(Protocol):
    """vllm.v1.core.block_pool.BlockPool, as far as a balloon needs it."""

    num_gpu_blocks: int
    blocks: list[BlockSurface]
    free_block_queue: FreeQueueSurface

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forget the cached content of these blocks."""
        ...


class KvCacheManagerSurface(Protocol):
    """vllm.v1.core.kv_cache_manager.KVCacheManager."""

    @property
    def block_pool(self) -> BlockPoolSurface:
        """The pool all blocks come from."""
        ...


class SchedulerSurface(Protocol):
    """vllm.v1.core.sched.scheduler.Scheduler; `finished_req_ids`: since the last schedule()."""

    @property
    def requests(self) -> Mapping[str, RequestSurface]:
        """Unfinished requests by id."""
        ...

    @property
    def finished_req_ids(self) -> set[str]:
        """Requests that finished since the last schedule()."""
        ...

    @property
    def kv_cache_manager(self) -> KvCacheManagerSurface:
        """Owner of the KV blocks."""
        ...

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        ...


class NewRequestSurface(Protocol):
    """vllm.v1.core.sched.output.NewRequestData."""

    req_id: str


class StepSurface(Protocol):
    """vllm.v1.core.sched.output.SchedulerOutput."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequestSurface]:
        """Requests that are in a step for the first time."""
        ...

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Sum over all requests."""
        ...

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens of this step by request id."""
        ...


class SampledSurface(Protocol):
    """vllm.v1.outputs.ModelRunnerOutput."""

    @property
    def req_ids(self) -> Sequence[str]:
        """Requests of the step, in the order of its outputs."""
        ...

    @property
    def sampled_token_ids(self) -> Sequence[Sequence[int]]:
        """New tokens of each request of the step."""
        ...


class FinishedSurface(Protocol):
    """vllm.v1.metrics.stats.FinishedRequestStats; times in seconds."""

    request_id: str | None
    e2e_latency: float
    decode_time: float
    mean_time_per_output_token: float
    num_prompt_tokens: int
    num_generation_tokens: int


class IterationSurface(Protocol):
    """vllm.v1.metrics.stats.IterationStats."""

    @property
    def finished_requests(self) -> Sequence[FinishedSurface]:
        """Requests that finished in this iteration."""
        ...
