"""vLLM's internals that the plugins use, as typing protocols, and the versions that ROSE supports.

No surface here is public in vLLM: the engine tests pin them. If versions differ, the object itself
is checked. A version that ROSE is not tested with has to have all of `executor.vllm.surfaces`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from executor.engine_surfaces import EngineVersions
from executor.errors import ExecutorError

TESTED: Final = ("0.25.0", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
VERSIONS: Final = EngineVersions("vLLM", "vllm", TESTED, ("0.25.0", "0.34.0"))
check_version: Final = VERSIONS.check
DRAFTS: Final = ("ngram", "suffix", "mtp", "eagle")
"""Methods of drafts that a replica may have: an update misses no weights of theirs."""
# cmpl-<X-Request-Id>-<prompt index>, chatcmpl-<X-Request-Id>; some versions add 8 random digits.
_COMPLETION = re.compile(r"cmpl-(?P<id>.+)-(?P<index>\d{1,4})(?:-[0-9a-f]{8})?")
_CHAT = re.compile(r"chatcmpl-(?P<id>.+)")


class RequestSurface(Protocol):
    """Type of vllm.v1.request.Request; `arrival_time` is in wall-clock seconds.

    Numbers of tokens are those so far.
    """

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_tokens: int
    num_output_tokens: int
    num_tokens_with_spec: int


class BlockSurface(Protocol):
    """Type of vllm.v1.core.kv_cache_utils.KVCacheBlock; `block_hash` names the cached content."""

    block_id: int
    is_null: bool
    ref_cnt: int
    block_hash: bytes | None


class FreeQueueSurface(Protocol):
    """Type of vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue."""

    num_free_blocks: int

    def get_all_free_blocks(self) -> list[BlockSurface]: ...


class BlockPoolSurface(Protocol):
    """Type of vllm.v1.core.block_pool.BlockPool; `evict_blocks` drops blocks' cached content."""

    num_gpu_blocks: int
    blocks: list[BlockSurface]
    free_block_queue: FreeQueueSurface

    def get_num_free_blocks(self) -> int: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


class KvCacheManagerSurface(Protocol):
    """Type of vllm.v1.core.kv_cache_manager.KVCacheManager."""

    block_pool: BlockPoolSurface


class SchedulerSurface(Protocol):
    """Type of vllm.v1.core.sched.scheduler.Scheduler; `requests` are the unfinished ones by id.

    `finished_req_ids`: those finished since the last schedule(). `get_request_counts`: numbers of
    running and waiting requests.
    """

    requests: Mapping[str, RequestSurface]
    finished_req_ids: set[str]
    kv_cache_manager: KvCacheManagerSurface

    def get_request_counts(self) -> tuple[int, int]: ...


class NewRequestSurface(Protocol):
    """Type of vllm.v1.core.sched.output.NewRequestData."""

    req_id: str


class StepSurface(Protocol):
    """Type of vllm.v1.core.sched.output.SchedulerOutput: one scheduled step.

    `scheduled_new_reqs`: requests in a step for the first time. `num_scheduled_tokens`: by request
    id.
    """

    scheduled_new_reqs: Sequence[NewRequestSurface]
    total_num_scheduled_tokens: int
    num_scheduled_tokens: Mapping[str, int]


class SampledSurface(Protocol):
    """Type of vllm.v1.outputs.ModelRunnerOutput: a step's requests, and new tokens of each."""

    req_ids: Sequence[str]
    sampled_token_ids: Sequence[Sequence[int]]


class FinishedSurface(Protocol):
    """Type of vllm.v1.metrics.stats.FinishedRequestStats; times in seconds."""

    request_id: str | None
    finish_reason: object
    e2e_latency: float
    decode_time: float
    mean_time_per_output_token: float
    num_prompt_tokens: int
    num_generation_tokens: int


class IterationSurface(Protocol):
    """Type of vllm.v1.metrics.stats.IterationStats."""

    finished_requests: Sequence[FinishedSurface]


def _refused(config: Any) -> Iterator[tuple[object, str, str]]:  # noqa: ANN401 -- vLLM's config
    drafts, option = config.speculative_config, "--speculative-config"
    method = getattr(drafts, "method", None)
    yield method not in (None, *DRAFTS), undrafted(str(method)), option
    table = getattr(drafts, "num_speculative_tokens_per_batch_size", None)
    # The suffix proposer of vLLM 0.32 fails at the first step of another number.
    yield method == "suffix" and table, "suffix drafts by size of batch", option
    if method == "eagle":
        head = Path(config.model_config.model) / "draft"
        yield Path(drafts.model) != head, f"drafts of a head outside of {head}", option
    yield config.kv_transfer_config, "disaggregated prefill and decode", "--kv-transfer-config"
    yield config.model_config.logits_processors, "custom samplers", "--logits-processors"
    yield getattr(config, "diffusion_config", None), "diffusion", "the diffusion model"


def undrafted(method: str) -> str:
    """Return the name of drafts that a replica does not have, for an error."""
    return f"drafts of method {method or 'none'!r}, but of {', '.join(DRAFTS)}"


def check_features(config: Any, who: str = "a guest") -> None:  # noqa: ANN401 -- VllmConfig
    """Raise ExecutorError for the first feature in the configuration that a guest does not have."""
    for found, meaning, option in _refused(config):
        if found:
            raise ExecutorError(f"{who} on vLLM does not have {meaning}; leave out {option}")


@contextmanager
def capped(
    scheduler: Any,  # noqa: ANN401 -- vLLM's scheduler
    tokens: int,
    sequences: int,
) -> Iterator[None]:
    """Limit schedule() inside the context to `tokens`, and to `sequences` requests.

    Running requests beyond that run on, in every version; no new one is admitted.
    """
    attribute, most = "max_num_active_reqs", sequences
    if not hasattr(scheduler, attribute):
        # 0.25 has one number for admission and for the slots of its runner, and asserts that no
        # more run.
        attribute, most = "max_num_running_reqs", max(sequences, len(scheduler.running))
    full = scheduler.max_num_scheduled_tokens, getattr(scheduler, attribute)
    scheduler.max_num_scheduled_tokens = min(full[0], tokens)
    setattr(scheduler, attribute, min(full[1], most))
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = full[0]
        setattr(scheduler, attribute, full[1])


def waiting_requests(scheduler: Any) -> list[Any]:  # noqa: ANN401 -- vLLM's scheduler and requests
    """Return the waiting requests, from both queues that every vLLM has under its own names."""
    beside = getattr(scheduler, "kv_holding_waiting", None)
    if beside is None:
        beside = scheduler.skipped_waiting
    return [*beside, *scheduler.waiting]


def ended_requests(ended: Iterable[Any]) -> list[tuple[int, str]]:
    """Return the (client index, request id) pairs in finish_requests()'s result, of any version."""
    return [
        (item[1], item[0]) if isinstance(item, tuple) else (item.client_index, item.request_id)
        for item in ended
    ]


def client_request_id(engine_request_id: str) -> str:
    """Return the X-Request-Id that a client sent, from the id that vLLM made of it.

    Further prompts of one completion request keep their index (`id-1`, `id-2`, …); an id of another
    form is returned as it is.
    """
    if match := _COMPLETION.fullmatch(engine_request_id):
        index = int(match["index"])
        return match["id"] if index == 0 else f"{match['id']}-{index}"
    if match := _CHAT.fullmatch(engine_request_id):
        return match["id"]
    return engine_request_id


def decodes_only(config: Any) -> bool:  # noqa: ANN401 -- vLLM's VllmConfig
    """Return True if other hosts compute the prompts, and this one takes over their KV.

    Its requests have no TTFT here: only TPOT is this host's.
    """
    return getattr(config.kv_transfer_config, "kv_role", None) == "kv_consumer"


def own_devices(ranks: int) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of an engine's `ranks` ranks; empty on a CPU or if unknown."""
    from vllm.platforms import current_platform  # a guest has no use for it

    if not current_platform.is_cuda():
        return ()
    try:
        return tuple(str(current_platform.get_device_uuid(rank)) for rank in range(ranks))
    except Exception:  # noqa: BLE001 -- of whatever bindings it has; without UUIDs nobody comes
        return ()
