"""Policy versions on this replica.

stage    while serving: verify and decode, nothing is written
pause    keep running turns, drop every cache: no token mixes two versions' KV
commit   scatter and prove; then stamp the engine with the version
resume   always; after a failed proof on the old version, closed for admission
"""

import asyncio
import os
import time
from typing import Any

from rose.replica.host_idle import wait_host_idle
from weight_transfer import WeightError
from weight_transfer.vllm.rpc_errors import typed


class ActivationError(WeightError):
    """A commit broke off: which weights the engine holds is not proven any more."""


class Weights:
    """Activates versions, one at a time."""

    def __init__(self, engine: Any, model_dir: str) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
        self._engine = engine
        self._model_dir = model_dir
        self._lock = asyncio.Lock()
        self._ready = False
        self.version = 0

    async def apply(self, manifests: list[str], chunks: str) -> dict[str, Any]:
        """Bring versions that follow each other into force at once, and report the last.

        The report tells whether digest and probe agree; when they do not, the worker has put the
        old values back. Raises WeightError subtypes of weight_transfer while nothing is written,
        ActivationError afterwards.
        """
        async with self._lock:
            await self._prepare()
            staged = await self._call("rose_weights_stage", manifests, chunks)
            await wait_host_idle()
            started_s = time.perf_counter()
            report = await self._switch()
            return report | {
                "wire_bytes": staged["wire_bytes"],
                "stage_s": staged["stage_s"],
                "pause_s": time.perf_counter() - started_s,
            }

    async def _switch(self) -> dict[str, Any]:
        try:
            await self._pause()
            return await self._commit()
        finally:
            # A pause that failed half way holds the engine as well.
            await self._engine.resume_generation()

    async def _pause(self) -> None:
        # Caches are cleared and running turns recompute their KV under the new weights.
        try:
            await self._engine.pause_generation(mode="keep", clear_cache=True)
        except Exception as failure:
            raise WeightError(f"the engine could not be paused: {failure}") from failure

    async def _commit(self) -> dict[str, Any]:
        try:
            report = await self._call("rose_weights_commit")
            if report["digest_ok"] and report["probe_ok"]:
                await self._engine.update_weight_version(str(report["version"]))
                self.version = int(report["version"])
        except Exception as failure:
            raise ActivationError(f"a policy version broke off: {failure}") from failure
        return report

    async def _prepare(self) -> None:
        if not self._ready:
            key = os.environ.get("ROSE_VERIFY_KEY") or None
            await self._call("rose_weights_init", self._model_dir, key)
            self._ready = True

    async def _call(self, method: str, *args: object) -> dict[str, Any]:
        try:
            answers = await self._engine.collective_rpc(method, args=args)
        except Exception as failure:
            raise typed(failure) from failure
        answer: dict[str, Any] = answers[0]
        return answer
