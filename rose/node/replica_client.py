"""The node's calls to a replica's own endpoint (docs/architecture.md, replica HTTP)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rose.errors import RefusedError, UnavailableError
from weight_transfer import OnUpdate, WrongBaseError

CALL_TIMEOUT_S = 5.0
APPLY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Applied:
    """Report of an activation; `ok` only when digest and probe both agree."""

    version: int
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float
    pause_s: float
    apply_s: float
    wire_bytes: int
    changed: int

    @property
    def ok(self) -> bool:
        """Whether the version is active and proven."""
        return self.digest_ok and self.probe_ok


class ReplicaClient:
    """One replica's control calls. Raises UnavailableError when it does not answer."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def state(self) -> dict[str, Any]:
        """Its own account of itself."""
        _, body = await self._call("GET", "state", None, CALL_TIMEOUT_S)
        return body

    async def admit(self, epoch: int) -> None:
        """Open admission for a lease."""
        await self._checked("admit", {"epoch": epoch})

    async def drain(self, epoch: int, reason: str) -> int:
        """Close admission and end all turns; returns how many were ended."""
        body = await self._checked("drain", {"epoch": epoch, "reason": reason})
        return int(body.get("aborted", 0))

    async def sleep(self) -> None:
        """vLLM's own route: give up weights and KV. Its answer proves nothing.

        Raises RefusedError where there is no such route, UnavailableError when it broke on the way:
        vLLM fails once its weights are gone when a neighbour on the GPU took memory meanwhile.
        """
        status, body = await self._call("POST", "/sleep?level=2", None, CALL_TIMEOUT_S)
        if status != 200:
            kind = UnavailableError if status >= 500 else RefusedError
            raise kind(f"{self._url} does not sleep: HTTP {status} {_message(body)}")

    async def apply(
        self, manifests: Sequence[Path], chunks: Path, on_update: OnUpdate = OnUpdate.RECOMPUTE
    ) -> Applied:
        """Activate the last of versions that follow each other, all of them at once.

        Raises WrongBaseError when the replica holds other weights, RefusedError for a version that
        it does not take.
        """
        paths = [str(path) for path in manifests]
        payload: dict[str, object] = {"manifests": paths, "chunks": str(chunks)}
        payload["on_update"] = on_update.value
        status, body = await self._call("POST", "weights/apply", payload, APPLY_TIMEOUT_S)
        if status == 409:
            raise WrongBaseError(f"{self._url}: {_message(body)}")
        if status not in (200, 422) or "version" not in body:
            raise RefusedError(f"{self._url} refused the version: HTTP {status} {_message(body)}")
        return Applied(
            version=int(body["version"]),
            digest_ok=bool(body["digest_ok"]),
            probe_ok=bool(body["probe_ok"]),
            probe_max_abs_diff=float(body["probe_max_abs_diff"]),
            pause_s=float(body["pause_s"]),
            apply_s=float(body["apply_s"]),
            wire_bytes=int(body["wire_bytes"]),
            changed=int(body["changed_elements"]),
        )

    async def _checked(self, path: str, payload: dict[str, object]) -> dict[str, Any]:
        status, body = await self._call("POST", path, payload, CALL_TIMEOUT_S)
        if status != 200:
            raise RefusedError(f"{self._url} refused {path}: HTTP {status} {_message(body)}")
        return body

    async def _call(
        self, method: str, path: str, payload: dict[str, object] | None, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = self._url + (path if path.startswith("/") else f"/rose/v1/{path}")
        try:
            async with self._session.request(
                method, url, json=payload, timeout=timeout
            ) as response:
                return response.status, await response.json(content_type=None) or {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"{self._url} does not answer {path}: {error!r}") from error


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
