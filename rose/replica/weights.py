"""Policy versions on this replica: stage while serving, switch under the engine's own pause."""

import asyncio
import os
import time
from typing import Any

from rose.replica.host_idle import wait_host_idle
from weight_transfer.vllm.rpc_errors import typed


class Weights:
    """Activates versions, one at a time."""

    def __init__(self, engine: Any, model_dir: str) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
        self._engine = engine
        self._model_dir = model_dir
        self._lock = asyncio.Lock()
        self._ready = False
        self.version = 0

    async def apply(self, manifest: str, chunks: str) -> dict[str, Any]:
        """Bring a version into force. Raises WeightError subtypes of weight_transfer.

        The report tells whether digest and probe agree; when they do not, the worker has put the
        old values back.
        """
        async with self._lock:
            await self._prepare()
            staged = await self._call("rose_weights_stage", manifest, chunks)
            await wait_host_idle()
            started_s = time.perf_counter()
            # Caches are cleared and running turns recompute: no token mixes two versions' KV.
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            try:
                report = await self._call("rose_weights_commit")
                if report["digest_ok"] and report["probe_ok"]:
                    await self._engine.update_weight_version(str(report["version"]))
                    self.version = int(report["version"])
            finally:
                await self._engine.resume_generation()
            return report | {
                "wire_bytes": staged["wire_bytes"],
                "stage_s": staged["stage_s"],
                "pause_s": time.perf_counter() - started_s,
            }

    async def _prepare(self) -> None:
        if not self._ready:
            key = os.environ.get("ROSE_VERIFY_KEY")
            await self._call("rose_weights_init", self._model_dir, key)
            self._ready = True

    async def _call(self, method: str, *args: object) -> dict[str, Any]:
        try:
            answers = await self._engine.collective_rpc(method, args=args)
        except Exception as failure:
            raise typed(failure) from failure
        answer: dict[str, Any] = answers[0]
        return answer
