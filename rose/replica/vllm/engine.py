"""vLLM's AsyncLLM as a replica's engine.

The pause is that of `AsyncLLM.pause_generation` without the 20 ms sleep at its end, which is there
for callers that must have seen the last outputs. Versions do not depend on that: tokens are stamped
by the engine, or counted where they come in (`stamps`).
"""

import secrets
from collections.abc import Sequence
from typing import Any

from rose.contract.replica import GenerateBody
from rose.replica.engine import MOST_WARM_UP_TOKENS, WarmUpSizes
from rose.replica.token_versions import KvStaleness
from rose.replica.vllm.requests import ENGINE_FAILURES, EngineRequest
from rose.replica.vllm.stamps import stamps_of
from rose.tracing import TraceContext
from weight_transfer.apply.shared_segment import ranks_folder


class VllmEngine:
    """An AsyncLLM. It counts tokens from here on, if the engine does not."""

    failures = ENGINE_FAILURES

    def __init__(self, engine: Any, model_dir: str = "") -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        self._engine = engine
        self.model_dir = model_dir
        self._stamps = stamps_of(engine)

    @property
    def updatable(self) -> bool:
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        return bool(getattr(parallel, "worker_extension_cls", ""))

    @property
    def kv_tokens(self) -> int:
        cache = self._engine.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    @property
    def sizes(self) -> WarmUpSizes:
        config = self._engine.vllm_config
        return WarmUpSizes(
            config.scheduler_config.max_num_seqs,
            config.model_config.max_model_len,
            min(config.scheduler_config.max_num_batched_tokens, MOST_WARM_UP_TOKENS),
            config.model_config.get_vocab_size(),
        )

    async def start(
        self, body: GenerateBody, ages: KvStaleness, trace: TraceContext | None = None
    ) -> EngineRequest:
        return await EngineRequest.start(self._engine, body, ages, trace)

    async def abort(self, requests: Sequence[EngineRequest]) -> None:
        if requests:
            await self._engine.abort([request.id for request in requests], internal=True)

    async def pause(self, *, clear_cache: bool) -> None:
        if clear_cache:
            await self._engine.renderer.clear_mm_cache_async()
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def activate(self, version: int) -> None:
        await self._stamps.activate(version)

    async def call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = await self._engine.collective_rpc(method, args=args)
        return answers

    def meeting_place(self) -> str | None:
        # A new one for every try: files of an earlier one have another meaning.
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        if max(getattr(parallel, name, 1) for name in ("world_size", "world_size_across_dp")) == 1:
            return None
        return str(ranks_folder() / secrets.token_hex(8))

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._engine.reset_prefix_cache())

    async def wake(self) -> None:
        # Any utility call ends an idle core's wait for its queue.
        await self._engine.is_paused()
