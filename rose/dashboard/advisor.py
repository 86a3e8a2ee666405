"""Advice of `rose advise` for the first page, computed in a process of its own.

    a week of the named Prometheus, ──► a process at low priority ──► the command's tables
    else what hosts said this term

The simulator takes seconds of processor time, which the scheduler's loop has not.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rose.advise import DeploymentUsage, PrometheusHistory, UsageStep
from rose.advise.usage import BY
from rose.errors import RoseError

DAYS: Final = 7.0
# Usage of hosts is read from memory, a week of Prometheus's is not.
EVERY_S: Final = 600.0
EVERY_OF_PROMETHEUS_S: Final = 3_600.0
LIMIT_S: Final = 300.0
NICE = 19
# Step times of a model whose size nobody says.
UNSIZED: Final = "8b"
BY_HOSTS: Final = (
    "by what hosts said since this scheduler began to lead, of which neither models nor numbers of"
    f" GPUs are known: one GPU an engine and the table {UNSIZED} are assumed"
)


@dataclass(frozen=True, slots=True)
class AdviceShown:
    """Advice at `at_s`, Unix seconds: lines, and tables of columns and rows; good for `good_s`."""

    at_s: float
    lines: Sequence[str]
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]] = ()
    good_s: float = EVERY_S


class Advisor:
    """Keeper of the newest advice, which is computed anew while a page asks, if it is old."""

    def __init__(self, prometheus: str, changed: Callable[[], None]) -> None:
        self.newest: AdviceShown | None = None
        self._prometheus, self._changed = prometheus, changed
        self._task: asyncio.Task[None] | None = None

    def due(self, wall_s: float) -> bool:
        """Return True if the newest advice is old and none is computed."""
        newest = self.newest
        good = newest is not None and newest.at_s <= wall_s < newest.at_s + newest.good_s
        return self._task is None and not good

    def ask(
        self, usages: Sequence[DeploymentUsage], targets_s: Sequence[float], wall_s: float
    ) -> None:
        """Compute the advice if anything is known. targets_s: users' TTFT and TPOT."""
        if usages or self._prometheus:
            said = {"url": self._prometheus, "usages": [asdict(u) for u in usages], "s": targets_s}
            self._task = asyncio.create_task(self._advise(json.dumps(said).encode(), wall_s))

    def close(self) -> None:
        """End a computation."""
        if self._task is not None:
            self._task.cancel()

    async def _advise(self, said: bytes, wall_s: float) -> None:
        pipe = asyncio.subprocess.PIPE
        words = sys.executable, "-c", f"import {__name__} as advisor; advisor.main({NICE})"
        process = None
        try:
            process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
            async with asyncio.timeout(LIMIT_S):
                answer, _ = await process.communicate(said)
            self.newest = AdviceShown(wall_s, **json.loads(answer))
        except (OSError, TimeoutError, ValueError):
            self.newest = AdviceShown(wall_s, ["advice cannot be computed; try `rose advise`"])
        finally:
            if process is not None and process.returncode is None:
                process.kill()
            self._task = None
            self._changed()


def advised(said: dict[str, Any], now_s: float) -> dict[str, Any]:
    """Return the lines and tables of an advice for what an `Advisor` says."""
    from rose.advise.advice import Assumed, advice_of
    from rose.advise.page import view

    usages = [
        DeploymentUsage(**{**each, "moments": tuple(UsageStep(**step) for step in each["moments"])})
        for each in said["usages"]
    ]
    lines, good_s = [BY_HOSTS], EVERY_S
    if said["url"]:
        try:
            usages = PrometheusHistory(said["url"], BY.split(",")).usages(DAYS, now_s)
            lines, good_s = [], EVERY_OF_PROMETHEUS_S
        except RoseError as error:
            lines = [str(error), *(lines if usages else ())]
    if not usages:
        return {"lines": lines}
    targets_s = zip(("ttft_s", "tpot_s"), said["s"], strict=True)
    given = {name: target_s for name, target_s in targets_s if target_s}
    try:
        made = view(advice_of(usages, Assumed(unsized=UNSIZED, **given)))
    except RoseError as error:
        return {"lines": [*lines, str(error)]}
    tables = [(table.columns, table.rows) for table in made.tables]
    return {"lines": [*lines, *made.lines], "tables": tables, "good_s": good_s}


def main(nice: int) -> None:
    """Read what an `Advisor` says from standard input, and write the advice as JSON."""
    os.nice(nice)
    sys.stdout.write(json.dumps(advised(json.load(sys.stdin), time.time())))
