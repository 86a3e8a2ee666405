"""Audits: every live weight is digested, in pieces between the engine's steps, and judged."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from weight_transfer import WeightError
from weight_transfer.vllm.proof.audit import Findings, Part, judge

PIECE_ELEMENTS: Final = 8 << 20
TRIES: Final = 3
CallAll = Callable[..., Awaitable[list[dict[str, Any]]]]
"""Calls a worker method and gives each rank's answer."""


class Audits:
    """Runs audits over `call`, one at a time."""

    def __init__(self, call: CallAll) -> None:
        self._call = call
        self._lock = asyncio.Lock()

    async def run(self) -> dict[str, Any]:
        """Report {version, flipped, unjudged, weights, audit_s}.

        Raises WeightError when versions change faster than it can look.
        """
        async with self._lock:
            began_s = time.perf_counter()
            for _ in range(TRIES):
                found = await self._once()
                if found is not None:
                    version, weights, findings = found
                    return {
                        "version": version,
                        "flipped": list(findings.flipped),
                        "unjudged": list(findings.unjudged),
                        "weights": weights,
                        "audit_s": time.perf_counter() - began_s,
                    }
        raise WeightError(f"the version changed in each of {TRIES} audits; ask again later")

    async def _once(self) -> tuple[int, int, Findings] | None:
        """(version, weights that were read, findings), None when the version changed meanwhile."""
        parts: list[Part] = []
        versions: set[int] = set()
        done = False
        while not done:
            began_s = time.perf_counter()
            again = not versions
            answers = await self._call("rose_weights_audit", PIECE_ELEMENTS, again)
            versions |= {answer["version"] for answer in answers}
            if len(versions) > 1:
                return None
            for answer in answers:
                parts += [
                    Part(name, tuple(key), n, total) for name, key, n, total in answer["parts"]
                ]
            done = all(answer["done"] for answer in answers)
            # A piece holds up the engine's steps: they get as much time as it took.
            await asyncio.sleep(time.perf_counter() - began_s)
        expected = (await self._call("rose_weights_digests"))[0]
        if expected["version"] not in versions:
            return None
        findings = judge(parts, expected["digests"], expected["elements"])
        return versions.pop(), sum(part.elements for part in parts), findings
