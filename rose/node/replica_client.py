"""The node's calls to a replica's own endpoint (docs/contracts/replica-http.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from executor.kv.reclaim_ladder import SLEEP_LEVEL
from rose.contract.replica import ADMIT, DRAIN, STATE, Drained, EpochBody, Refusal, ReplicaState
from rose.contract.weights import APPLY, ApplyBody, UpdateApplied
from rose.errors import BAD_BYTES, RefusedError, UnavailableError
from weight_transfer import OnUpdate, WrongBaseError

CALL_TIMEOUT_S = 5.0
APPLY_TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 1 << 20
JSON = {"Content-Type": "application/json"}
_T = TypeVar("_T")


class UnprovenError(RefusedError):
    """The replica does not know which weights its engine runs; only a new life of it does."""


class ReplicaHostBusyError(RefusedError):
    """The replica's host has not been idle for long enough to take a version beside it."""


_REFUSALS = {"unproven": UnprovenError, "host_busy": ReplicaHostBusyError}


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """Any HTTP reply of a replica."""

    status: int
    body: bytes

    @property
    def kind(self) -> str:
        """Kind of an error of the contract's shape, "" for any other reply."""
        refusal = _read(self.body, Refusal)
        return refusal.error.type if refusal else ""

    @property
    def said(self) -> str:
        """The reply as one line for a person."""
        refusal = _read(self.body, Refusal)
        text = refusal.error.message if refusal else self.body[:200].decode(errors="replace")
        return f"HTTP {self.status} {text}"


@dataclass(eq=False)
class ReplicaClient:
    """One replica's control calls. Raises UnavailableError when it does not answer.

    headers: what a request for control bears now; each life of an engine has its own secret.
    """

    _session: aiohttp.ClientSession
    _url: str
    _headers: Callable[[], Mapping[str, str]] = dict

    async def state(self) -> ReplicaState:
        """Return the replica's own state."""
        answer = await self._call("GET", STATE, None, CALL_TIMEOUT_S)
        account = _read(answer.body, ReplicaState) if answer.status == 200 else None
        if account is None:
            raise UnavailableError(f"{self._url} gives no account of itself: {answer.said}")
        return account

    async def admit(self, epoch: int, job: str = "") -> None:
        """Open admission for a job's lease."""
        await self._checked(ADMIT, EpochBody(epoch, job=job))

    async def drain(self, epoch: int, reason: str) -> int:
        """Close admission and end all turns; returns how many were ended."""
        answer = await self._checked(DRAIN, EpochBody(epoch, reason))
        drained = _read(answer.body, Drained)
        return drained.aborted if drained else 0

    async def sleep(self) -> None:
        """vLLM's own route: give up weights and KV. Its answer proves nothing.

        Raises RefusedError where there is no such route, UnavailableError when it broke on the way:
        vLLM fails once its weights are gone when a neighbour on the GPU took memory meanwhile.
        """
        answer = await self._call("POST", f"/sleep?level={SLEEP_LEVEL}", None, CALL_TIMEOUT_S)
        if answer.status != 200:
            kind = UnavailableError if answer.status >= 500 else RefusedError
            raise kind(f"{self._url} does not sleep: {answer.said}")

    async def apply(
        self, manifests: Sequence[Path], chunks: Path, on_update: OnUpdate = OnUpdate.RECOMPUTE
    ) -> UpdateApplied:
        """Activate the last of versions that follow each other, all of them at once.

        Raises WrongBaseError when the replica holds other weights, RefusedError for a version that
        it does not take, HostBusyError for one that it takes later, UnprovenError when nobody knows
        any more which one it runs.
        """
        paths = [str(path) for path in manifests]
        body = ApplyBody(str(chunks), manifests=paths, on_update=on_update)
        answer = await self._call("POST", APPLY, body, APPLY_TIMEOUT_S)
        if answer.status == 200:
            applied = _read(answer.body, UpdateApplied)
            if applied is None:
                raise UnprovenError(f"{self._url} reports no proof: {answer.said}")
            return applied
        if answer.status == 409:
            raise WrongBaseError(f"{self._url}: {answer.said}")
        kind = _REFUSALS.get(answer.kind, RefusedError)
        raise kind(f"{self._url} refused the version: {answer.said}")

    async def _checked(self, path: str, body: msgspec.Struct) -> ReplicaAnswer:
        answer = await self._call("POST", path, body, CALL_TIMEOUT_S)
        if answer.status != 200:
            raise RefusedError(f"{self._url} refused {path}: {answer.said}")
        return answer

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None, timeout_s: float
    ) -> ReplicaAnswer:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=None if body is None else msgspec.json.encode(body),
                timeout=timeout,
                headers={**JSON, **self._headers()} if method == "POST" else None,
                allow_redirects=False,
            ) as response:
                said = bytearray()
                async for part in response.content.iter_any():
                    said += part
                    if len(said) > MAX_ANSWER_BYTES:
                        raise UnavailableError(f"{self._url} answers {path} without an end")
                return ReplicaAnswer(response.status, bytes(said))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._url} does not answer {path}: {error!r}") from error


def _read(body: bytes, kind: type[_T]) -> _T | None:
    """Decode a reply, None for an invalid one: no engine's reply may end the daemon."""
    try:
        return msgspec.json.decode(body, type=kind)
    except BAD_BYTES:
        return None
