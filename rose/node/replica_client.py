"""The node's calls to a replica's own endpoint (docs/contracts/replica-http.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from rose.decoding import BAD_BYTES
from rose.errors import RefusedError, UnavailableError
from weight_transfer import OnUpdate, WrongBaseError

CALL_TIMEOUT_S = 5.0
APPLY_TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 1 << 20
_T = TypeVar("_T")


class UnprovenError(RefusedError):
    """The replica does not know which weights its engine runs; only a new life of it does."""


class ReplicaHostBusyError(RefusedError):
    """The replica's host has not been idle for long enough to take a version beside it."""


class Account(msgspec.Struct, frozen=True):
    """A replica's account of itself. What does not say that its weights are proven has none."""

    policy_version: int
    epoch: int
    admitting: bool
    running: int
    waiting: int
    tokens_total: int
    proven: bool


class AppliedUpdate(msgspec.Struct, frozen=True):
    """Report of an activation; `ok` only when digest and probe both agree."""

    version: int
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float
    pause_s: float
    apply_s: float
    wire_bytes: int
    changed: int = msgspec.field(name="changed_elements")

    @property
    def ok(self) -> bool:
        """Whether the version is active and proven."""
        return self.digest_ok and self.probe_ok


_REFUSALS = {"unproven": UnprovenError, "host_busy": ReplicaHostBusyError}


class _Fault(msgspec.Struct, frozen=True):
    type: str
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Fault


class _Drained(msgspec.Struct, frozen=True):
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """What came back, whatever it is."""

    status: int
    body: bytes

    @property
    def kind(self) -> str:
        """Of an error of the contract's shape, "" of any other answer."""
        refusal = _read(self.body, _Refusal)
        return refusal.error.type if refusal else ""

    @property
    def said(self) -> str:
        """For a person, in one line."""
        refusal = _read(self.body, _Refusal)
        text = refusal.error.message if refusal else self.body[:200].decode(errors="replace")
        return f"HTTP {self.status} {text}"


class ReplicaClient:
    """One replica's control calls. Raises UnavailableError when it does not answer.

    `headers`: what a request for control bears now; each life of an engine has its own secret.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._session = session
        self._url = url
        self._headers = headers

    async def state(self) -> Account:
        """Its own account of itself."""
        answer = await self._call("GET", "state", None, CALL_TIMEOUT_S)
        account = _read(answer.body, Account) if answer.status == 200 else None
        if account is None:
            raise UnavailableError(f"{self._url} gives no account of itself: {answer.said}")
        return account

    async def admit(self, epoch: int) -> None:
        """Open admission for a lease."""
        await self._checked("admit", {"epoch": epoch})

    async def drain(self, epoch: int, reason: str) -> int:
        """Close admission and end all turns; returns how many were ended."""
        answer = await self._checked("drain", {"epoch": epoch, "reason": reason})
        drained = _read(answer.body, _Drained)
        return drained.aborted if drained else 0

    async def sleep(self) -> None:
        """vLLM's own route: give up weights and KV. Its answer proves nothing.

        Raises RefusedError where there is no such route, UnavailableError when it broke on the way:
        vLLM fails once its weights are gone when a neighbour on the GPU took memory meanwhile.
        """
        answer = await self._call("POST", "/sleep?level=2", None, CALL_TIMEOUT_S)
        if answer.status != 200:
            kind = UnavailableError if answer.status >= 500 else RefusedError
            raise kind(f"{self._url} does not sleep: {answer.said}")

    async def apply(
        self, manifests: Sequence[Path], chunks: Path, on_update: OnUpdate = OnUpdate.RECOMPUTE
    ) -> AppliedUpdate:
        """Activate the last of versions that follow each other, all of them at once.

        Raises WrongBaseError when the replica holds other weights, RefusedError for a version that
        it does not take, HostBusyError for one that it takes later, UnprovenError when nobody knows
        any more which one it runs.
        """
        payload: dict[str, object] = {
            "manifests": [str(path) for path in manifests],
            "chunks": str(chunks),
            "on_update": on_update.value,
        }
        answer = await self._call("POST", "weights/apply", payload, APPLY_TIMEOUT_S)
        if answer.status == 200:
            applied = _read(answer.body, AppliedUpdate)
            if applied is None:
                raise UnprovenError(f"{self._url} reports no proof: {answer.said}")
            return applied
        if answer.status == 409:
            raise WrongBaseError(f"{self._url}: {answer.said}")
        kind = _REFUSALS.get(answer.kind, RefusedError)
        raise kind(f"{self._url} refused the version: {answer.said}")

    async def _checked(self, path: str, payload: dict[str, object]) -> ReplicaAnswer:
        answer = await self._call("POST", path, payload, CALL_TIMEOUT_S)
        if answer.status != 200:
            raise RefusedError(f"{self._url} refused {path}: {answer.said}")
        return answer

    async def _call(
        self, method: str, path: str, payload: dict[str, object] | None, timeout_s: float
    ) -> ReplicaAnswer:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = self._url + (path if path.startswith("/") else f"/rose/v1/{path}")
        try:
            async with self._session.request(
                method,
                url,
                json=payload,
                timeout=timeout,
                headers=self._headers() if method == "POST" else None,
                allow_redirects=False,
            ) as response:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise UnavailableError(f"{self._url} answers {path} without an end")
                return ReplicaAnswer(response.status, bytes(body))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{self._url} does not answer {path}: {error!r}") from error


def _read(body: bytes, kind: type[_T]) -> _T | None:
    """None for anything else: an engine's answer is not to end the daemon beside a host."""
    try:
        return msgspec.json.decode(body, type=kind)
    except BAD_BYTES:
        return None
