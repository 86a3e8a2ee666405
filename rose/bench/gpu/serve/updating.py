"""Piece `update-serving`: versions of 2% applied by a guest that serves beside a loaded host.

update   ├── staged while the host has its load, block after block ──┤ pause ├
control  the same blocks with the same arrivals, and no update
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

from rose.bench.coserve.names import GUEST
from rose.bench.coserve.pairs import METRICS, latency_s
from rose.bench.coserve.plan import ROSE_ARMS, Block, Cell
from rose.bench.coserve.records import BlockRecord
from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.piece import Measured
from rose.bench.gpu.serve.session import ServingSession
from rose.bench.gpu.serve.stamped import StampedTurns
from rose.bench.gpu.serve.versions import GuestVersions
from rose.load.protocol import Request
from rose.stats import percentile

BUSY = 0.6
# adaptive, invisible: the host's latencies are to stay as they are.
ARM = next(arm for arm in ROSE_ARMS if arm.policy == "adaptive" and not arm.slack_share)
FIRST_SEGMENT = 70_000
QUANTILES = (50, 90, 99)


async def updates(session: ServingSession, seconds: float) -> Measured:
    """One update without host load, under turns; then `rounds` at most under it, while there is
    time."""
    until_s = time.monotonic() + seconds
    weights = session.engines.guest_weights
    assert weights is not None
    sizes = session.sizes
    folder, key = session.folder / "versions", session.key
    session.say("version 0 is read and changed")
    versions = await asyncio.to_thread(GuestVersions, weights, folder, key, sizes.seed)
    cell = await session.cell(BUSY, "poisson")
    turns = StampedTurns(
        session.http,
        session.engines.url(GUEST),
        sizes.guest_load.output_tokens,
        session.engines.headers(GUEST),
    )
    first = await _without_host(session, versions, turns)
    reports: list[dict[str, Any]] = []
    during: list[BlockRecord] = []
    control: list[BlockRecord] = []
    longest_s = 0.0
    while not reports or (len(reports) < sizes.rounds and time.monotonic() + longest_s < until_s):
        began_s = time.monotonic()
        told, blocks = await _update(session, versions, cell, turns, len(during))
        reports.append(told)
        during += blocks
        control += [await session.play(_again(block, cell, sizes.arm_s)) for block in blocks]
        longest_s = max(longest_s, time.monotonic() - began_s)
    return {
        "engines_start_s": session.start_s,
        "weights_written_s": session.engines.weights_written_s,
        "traffic": {"busy": BUSY, "rate_per_s": cell.rate_per_s},
        "first": first,
        "updates": reports,
        "pause_s": _spread([report["pause_s"] for report in reports]),
        "host": await _host(session, during, control),
        "stamped": {
            "turns": turns.turns,
            "turns_across_a_version": turns.across,
            "tokens_of_version": {str(v): count for v, count in sorted(turns.tokens.items())},
        },
    }


async def _without_host(
    session: ServingSession, versions: GuestVersions, turns: StampedTurns
) -> dict[str, Any]:
    """The first update: it also waits until the guest has proved version 0."""
    published = await asyncio.to_thread(versions.publish)
    session.say(f"version 1 is published after {published['publish_s']:.1f} s")
    session.player.rule(ARM)
    playing = asyncio.create_task(turns.run())
    applying = asyncio.create_task(
        versions.apply(session.http, session.engines.url(GUEST), session.engines.headers(GUEST))
    )
    try:
        # Turns end by themselves only when the guest does not take them any more.
        await asyncio.wait({playing, applying}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not applying.done():
            applying.cancel()
        await _ended(playing)
    report = await applying
    await _insist_stamped(turns, report)
    session.say(f"version 1 is active after {report['applied_s']:.1f} s")
    return published | report


async def _ended(task: asyncio.Task[Any]) -> None:
    """End it; what it raised by itself is raised here."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _insist_stamped(turns: StampedTurns, report: dict[str, Any]) -> None:
    newest = await turns.turn()
    if set(newest) != {report["version"]}:
        raise PieceError(f"a turn after version {report['version']} is stamped {newest}")


async def _update(
    session: ServingSession,
    versions: GuestVersions,
    cell: Cell,
    turns: StampedTurns,
    number: int,
) -> tuple[dict[str, Any], list[BlockRecord]]:
    """One update under load; its report and the blocks that were played meanwhile."""
    published = await asyncio.to_thread(versions.publish)
    applying = asyncio.create_task(
        versions.apply(session.http, session.engines.url(GUEST), session.engines.headers(GUEST))
    )
    blocks: list[BlockRecord] = []
    try:
        while not blocks or not applying.done():
            at = number + len(blocks)
            block = Block(ARM, session.sizes.arm_s, at, FIRST_SEGMENT + at, cell)
            blocks.append(await session.play(block))
        report = await applying
    finally:
        await _ended(applying)
    await _insist_stamped(turns, report)
    session.say(f"version {report['version']}: pause {1e3 * report['pause_s']:.1f} ms")
    return published | report, blocks


def _again(record: BlockRecord, cell: Cell, seconds: float) -> Block:
    """The same arrivals under the same rules."""
    return Block(ARM, seconds, record.round, record.segment, cell)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 50), "most": max(values), "count": len(values)}


async def _host(
    session: ServingSession, during: Sequence[BlockRecord], control: Sequence[BlockRecord]
) -> dict[str, Any]:
    """Latencies of the host's requests while versions were staged and applied, and without."""
    requests = await session.requests()
    found = {
        name: _latencies([r for r in requests if r.block in {block.block for block in blocks}])
        for name, blocks in (("during", during), ("control", control))
    }
    ratios = {
        key: found["during"][key] / found["control"][key]
        for key in found["control"]
        if key.endswith("_s") and found["control"][key] and found["during"].get(key)
    }
    return {**found, "ratio": ratios}


def _latencies(requests: Sequence[Request]) -> dict[str, float]:
    told: dict[str, float] = {"requests": len(requests)}
    told["failed"] = sum(request.status != "ok" for request in requests)
    for metric in METRICS:
        values = [v for r in requests if (v := latency_s(r, metric)) is not None and v < math.inf]
        for quantile in QUANTILES if values else ():
            told[f"{metric}_p{quantile}_s"] = percentile(values, quantile)
    return told
