"""Policy versions on this replica.

stage    while serving: verify, decode, load and compute; nothing is written
pause    as the job wants it for turns in flight, see `OnUpdate`
commit   scatter and prove; then stamp the engine with the version
resume   always; after a failed proof on the old version, closed for admission
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from rose.replica.audit import Audits
from rose.replica.engine_errors import ENGINE_FAILURES
from rose.replica.host_idle import wait_host_idle
from rose.replica.staging import stage
from rose.replica.stamps import stamps_of
from rose.replica.turns import Turns
from weight_transfer import OnUpdate, WeightError
from weight_transfer.vllm.report import merged
from weight_transfer.vllm.rpc_errors import typed

FINISH_OLD_S: Final = 20.0
_LOG = logging.getLogger("vllm.rose.replica")


class ActivationError(WeightError):
    """A commit broke off: which weights the engine holds is not proven any more."""


class Weights:
    """Activates versions, one at a time."""

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - vLLM's AsyncLLM
        model_dir: str,
        turns: Turns,
        finish_old_s: float = FINISH_OLD_S,
    ) -> None:
        self._engine = engine
        self._model_dir = model_dir
        self._turns = turns
        self._finish_old_s = finish_old_s
        self._lock = asyncio.Lock()
        self._ready = False
        self._task: asyncio.Task[None] | None = None
        self._audits = Audits(self._call_all)
        self.version = 0

    def start(self) -> None:
        """Prepare in the background: kernels compile for seconds, and the loader map is traced.

        An engine without our worker extension has no weights to prepare.
        """
        if not _updatable(self._engine.vllm_config):
            return
        self._task = asyncio.get_running_loop().create_task(self._prepare_early())

    async def apply(
        self, manifests: list[str], chunks: str, on_update: OnUpdate = OnUpdate.RECOMPUTE
    ) -> dict[str, Any]:
        """Bring versions that follow each other into force at once, and report the last.

        The report tells whether digest and probe agree; when they do not, the worker has put the
        old values back. Raises WeightError subtypes of weight_transfer while nothing is written,
        ActivationError afterwards.
        """
        async with self._lock:
            await self._prepare()
            staged = await stage(self._call, manifests, chunks)
            with self._held(on_update):
                finished = await self._finish_old(on_update)
                await wait_host_idle()
                started_s = time.perf_counter()
                report = await self._switch(on_update)
                pause_s = time.perf_counter() - started_s
            await self._call("rose_weights_settle")
            return report | {
                "wire_bytes": staged["wire_bytes"],
                "stage_s": staged["stage_s"],
                "pause_s": pause_s,
                "on_update": str(on_update),
                "finished_old": finished,
            }

    async def audit(self) -> dict[str, Any]:
        """Digest every live weight, between the engine's steps: `flipped` names wrong tensors."""
        async with self._lock:
            await self._prepare()
        return await self._audits.run()

    @contextmanager
    def _held(self, on_update: OnUpdate) -> Iterator[None]:
        """Hold new turns back where it matters under which version they began."""
        with ExitStack() as stack:
            if on_update is not OnUpdate.RECOMPUTE:
                stack.enter_context(self._turns.hold.closed())
            yield

    async def _finish_old(self, on_update: OnUpdate) -> bool:
        if on_update is not OnUpdate.FINISH_OLD:
            return False
        finished = await self._turns.all_ended(self._finish_old_s)
        if not finished:
            _LOG.warning("turns outlast %.0f s; they go on under a new version", self._finish_old_s)
        return finished

    async def _switch(self, on_update: OnUpdate) -> dict[str, Any]:
        keep = on_update is OnUpdate.KEEP
        try:
            await self._pause(keep_kv=keep)
            return await self._commit(keep_kv=keep)
        finally:
            # A pause that failed half way holds the engine as well.
            await self._engine.resume_generation()

    async def _pause(self, *, keep_kv: bool) -> None:
        # With cleared caches running turns recompute their KV under the new weights.
        try:
            await self._engine.pause_generation(mode="keep", clear_cache=not keep_kv)
        except Exception as failure:
            raise WeightError(f"the engine could not be paused: {failure}") from failure

    async def _commit(self, *, keep_kv: bool) -> dict[str, Any]:
        try:
            reports = await self._call_all("rose_weights_commit")
            report = merged(reports)
            if report["digest_ok"] and report["probe_ok"]:
                await stamps_of(self._engine).activate(int(report["version"]))
                self.version = int(report["version"])
                self._turns.ages.activated(self.version, kept_kv=keep_kv)
            elif len(reports) > 1:
                # Ranks that could prove it follow those that could not.
                report |= await self._call("rose_weights_rollback")
        except Exception as failure:
            raise ActivationError(f"a policy version broke off: {failure}") from failure
        return report

    async def _prepare_early(self) -> None:
        try:
            async with self._lock:
                await self._prepare()
        except (WeightError, RuntimeError, *ENGINE_FAILURES):
            # The first update tries again, and tells who asked for it.
            _LOG.exception("weights cannot be updated yet")

    async def _prepare(self) -> None:
        if not self._ready:
            key = os.environ.get("ROSE_VERIFY_KEY") or None
            await self._call("rose_weights_init", self._model_dir, key)
            self._ready = True

    async def _call(self, method: str, *args: object) -> dict[str, Any]:
        """The first rank's answer; `done` when all are."""
        answers = await self._call_all(method, *args)
        answer = answers[0]
        if answer is not None and "done" in answer:
            answer = answer | {"done": all(other["done"] for other in answers)}
        return answer

    async def _call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        try:
            answers: list[dict[str, Any]] = await self._engine.collective_rpc(method, args=args)
        except Exception as failure:
            raise typed(failure) from failure
        return answers


def _updatable(config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    parallel = getattr(config, "parallel_config", None)
    return bool(getattr(parallel, "worker_extension_cls", ""))
