"""FakeAsyncLLM whose ranks hold weights: steps remember which ones each token was sampled from."""

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from rose.replica.endpoint import ReplicaEndpoint
from tests.fakes.asgi_client import CONTROL, AsgiExchange, exchange
from tests.fakes.async_llm import FakeAsyncLLM

NEXT = 3
REPORT = {
    "version": NEXT,
    "changed_elements": 1,
    "apply_s": 0.1,
    "probe_s": 0.2,
    "probe_max_abs_diff": 0.0,
    "digest_ok": True,
    "probe_ok": True,
}
STAGED = {"done": True, "version": NEXT, "wire_bytes": 5, "stage_s": 0.1}


class FakeWeightRanks(FakeAsyncLLM):
    """Version 0 on each rank, then NEXT. `breaks` names the call that breaks off, and how:

    raises   before it did anything
    silent   it did all of it, and its answer is an error
    hangs    it did all of it, and there is no answer
    half     only the first rank did it
    unproven, other_version, no_report: of a commit, all ranks wrote and the last one reports that
    """

    def __init__(self, breaks: str = "", how: str = "raises", ranks: int = 2) -> None:
        super().__init__()
        self.weights = [0] * ranks
        self.proven = {0}
        self.paused = False
        self.calls: list[str] = []
        self.sampled: dict[int, list[int]] = {}
        self.breaks, self.how = breaks, how
        self.broke = asyncio.Event()
        self.renderer = self.engine_core = self

    def get_eos_token_id(self) -> int | None:
        """The renderer's: this vocabulary has none."""
        return None

    async def clear_mm_cache_async(self) -> None:
        """Nothing is there to clear."""

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        del mode, clear_cache
        await self._call("pause", self._pause)

    async def resume_generation(self) -> None:
        await self._call("resume", self._resume)

    async def update_weight_version(self, version: str) -> None:
        def stamp() -> None:
            self.weight_version = version

        await self._call("stamp", stamp)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        del args
        name = method.removeprefix("rose_weights_")
        if name != "commit":
            await self._call(name, lambda: None)
            found = {"parts": [], "digests": {}, "elements": {}}
            return [STAGED | found for _ in self.weights]
        await self._call(name, self._commit)
        return self._reports()

    def step_unpaused(self) -> None:
        """Step like the engine's own loop."""
        if self.paused or not self.live:
            return
        for state in self.output_processor.request_states.values():
            self.sampled[state.detokenizer.num_output_tokens()] = list(self.weights)
        self.step()

    def _pause(self) -> None:
        self.paused = True

    def _resume(self) -> None:
        self.paused = False

    def _commit(self) -> None:
        half = self.breaks == "commit" and self.how == "half"
        for rank in range(1 if half else len(self.weights)):
            self.weights[rank] = NEXT
        if not (self.breaks == "commit" and self.how in {"half", "unproven", "other_version"}):
            self.proven.add(NEXT)

    def _reports(self) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = [REPORT for _ in self.weights]
        if self.breaks == "commit" and self.how == "unproven":
            reports[-1] = REPORT | {"digest_ok": False}
        if self.breaks == "commit" and self.how == "other_version":
            reports[-1] = REPORT | {"version": NEXT + 1}
        return [] if (self.breaks, self.how) == ("commit", "no_report") else reports

    async def _call(self, name: str, action: Any) -> None:
        self.calls.append(name)
        if name != self.breaks:
            action()
            return
        self.broke.set()
        if self.how != "raises":
            action()
        if self.how == "hangs":
            await asyncio.Event().wait()
        if self.how in {"raises", "silent", "half"}:
            raise RuntimeError(f"the answer of {name} is lost")


class Served:
    """The endpoint around such an engine, as a client and a node see it."""

    def __init__(self, engine: FakeAsyncLLM, headers: Mapping[str, str] = CONTROL) -> None:
        self.engine = engine
        self.endpoint = ReplicaEndpoint()
        self.app = FastAPI()
        self.endpoint.attach_router(self.app)
        self.headers = headers

    async def start(self) -> "Served":
        await self.endpoint.init_state(self.engine, self.app.state, Namespace(model="model"))
        return self

    def begin(self, path: str, body: object, method: str = "POST") -> AsgiExchange:
        return exchange(self.app, f"/rose/v1/{path}", body, method, self.headers)

    async def ask(self, path: str, body: object, method: str = "POST") -> tuple[int, Any]:
        answer = await self.begin(path, body, method).done()
        return answer.status, answer.json

    async def state(self) -> dict[str, Any]:
        return dict((await self.ask("state", b"", "GET"))[1])
