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
    """Error reply of a replica that does not know which weights its engine runs; only a restart of
    the engine resolves it.
    """


class ReplicaHostBusyError(RefusedError):
    """Error reply of a replica whose host has not been idle for long enough to apply a weight
    version beside it; try again later.
    """


class UnfitAdapterError(RefusedError):
    """Error reply of a replica that a version does not fit: an adapter of another base or shape, or
    one kind of versions where the other is taken. Another try or a new start of the engine does not
    help.
    """


_REFUSALS = {
    "unproven": UnprovenError,
    "host_busy": ReplicaHostBusyError,
    "unfit_adapter": UnfitAdapterError,
}


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """HTTP reply of a replica: status code and body."""

    status: int
    body: bytes

    @property
    def kind(self) -> str:
        """Error type in a body of the contract's error shape, "" for any other body."""
        refusal = _read(self.body, Refusal)
        return refusal.error.type if refusal else ""

    @property
    def said(self) -> str:
        """HTTP status and error message, or the first 200 bytes of the body, in one line
        for a log.
        """
        refusal = _read(self.body, Refusal)
        text = refusal.error.message if refusal else self.body[:200].decode(errors="replace")
        return f"HTTP {self.status} {text}"


@dataclass(eq=False)
class ReplicaClient:
    """HTTP client of one replica's control routes. Every call raises UnavailableError if the
    replica does not answer.

    _headers: returns the headers of a control request now; each start of the engine has a new
    secret. _offer: number of the offer whose leases it admits and drains.
    """

    _session: aiohttp.ClientSession
    _url: str
    _headers: Callable[[], Mapping[str, str]] = dict
    _offer: int = 0

    async def state(self) -> ReplicaState:
        """Return the replica's own account of its lease, turns, job and policy version."""
        answer = await self._call("GET", STATE, None, CALL_TIMEOUT_S)
        account = _read(answer.body, ReplicaState) if answer.status == 200 else None
        if account is None:
            raise UnavailableError(f"{self._url} gives no account of itself: {answer.said}")
        return account

    async def admit(self, epoch: int, job: str = "", latest: int | None = None) -> None:
        """Tell the replica to admit turns under the lease `epoch` of `job`, whose newest version is
        `latest`. Raises RefusedError.
        """
        await self._checked(ADMIT, EpochBody(epoch, job=job, latest=latest, offer=self._offer))

    async def drain(self, epoch: int, reason: str) -> int:
        """Tell the replica to stop admission and end all turns of the lease `epoch`; return the
        number of turns that were ended. Raises RefusedError.
        """
        answer = await self._checked(DRAIN, EpochBody(epoch, reason, offer=self._offer))
        drained = _read(answer.body, Drained)
        return drained.aborted if drained else 0

    async def sleep(self) -> None:
        """Call vLLM's own sleep route, which frees weights and KV memory; a success does not prove
        that memory was freed.

        Raises RefusedError where there is no such route, and UnavailableError for a 5xx reply: vLLM
        fails after its weights are gone if another process on the GPU took the memory meanwhile.
        """
        answer = await self._call("POST", f"/sleep?level={SLEEP_LEVEL}", None, CALL_TIMEOUT_S)
        if answer.status != 200:
            kind = UnavailableError if answer.status >= 500 else RefusedError
            raise kind(f"{self._url} does not sleep: {answer.said}")

    async def apply(
        self, manifests: Sequence[Path], chunks: Path, on_update: OnUpdate = OnUpdate.RECOMPUTE
    ) -> UpdateApplied:
        """Apply the manifests of successive versions in one update and return the replica's report
        of the last version.

        chunks: folder of the files that the manifests name. Raises WrongBaseError if the replica
        holds other weights than the first manifest builds on, RefusedError for a version that it
        rejects, ReplicaHostBusyError for one to try later, and UnprovenError if its weights are
        unknown now.
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
    """Return the decoded body of a reply, None if it is not valid JSON of this type: no engine's
    reply may end the daemon.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except BAD_BYTES:
        return None
