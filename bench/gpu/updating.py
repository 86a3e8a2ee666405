"""Piece `update-serving`: versions of 2% applied by a guest that serves beside a loaded host.

update   ├── staged while the host has its load, block after block ──┤ pause ├
control  the same blocks with the same arrivals, and no update
"""

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.common.stats import METRICS, latency_s
from bench.common.tiny_models import changed
from bench.coserve.plan import GUEST, ROSE_ARMS, ArmCell, PlanBlock
from bench.coserve.records import CoserveBlockRecord
from bench.gpu.pieces import Measured, PieceError
from bench.gpu.serving import ServingSession
from bench.load.protocol import Request
from rose.compare.bootstrap import percentile
from weight_transfer import ChunkStore, SigningKey, VersionPublisher, read_safetensors

PROMPT = tuple(range(3, 35))
TURN_TIMEOUT_S = 120.0
RETRY_S = 0.2
# A guest refuses turns while a version is activated, for less than this time.
REFUSED_MOST_S = 30.0
CHANGED = 0.02
APPLY_TIMEOUT_S = 240.0
BUSY = 0.6
# The arm without slack: the host's latencies are to stay as they are.
ARM = next(arm for arm in ROSE_ARMS if arm.policy == "adaptive" and not arm.slack_share)
FIRST_SEGMENT = 70_000
QUANTILES = (50, 90, 99)
_UNAVAILABLE = 503


@dataclass(slots=True)
class GuestClient:
    """Client of the guest's own routes."""

    http: aiohttp.ClientSession
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    async def post(self, path: str, body: object, timeout_s: float) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"{self.url}/rose/v1/{path}"
        async with self.http.post(url, json=body, timeout=timeout, headers=self.headers) as answer:
            return answer.status, await answer.text()


@dataclass(slots=True)
class StampedTurns:
    """Turns one after another until they are stopped, and the versions of their tokens."""

    guest: GuestClient
    output_tokens: int
    tokens: Counter[int] = field(default_factory=Counter)
    across: int = 0
    turns: int = 0

    async def run(self) -> None:
        """Play turns until cancelled."""
        await self.guest.post("admit", {"epoch": 1}, TURN_TIMEOUT_S)
        while True:
            await self.turn()

    async def turn(self) -> list[int]:
        """Play one and return its chunks' versions. Raises PieceError for a wrong stamp."""
        versions: list[int] = []
        for line in await self._lines():
            if "finish_reason" in line:
                break
            if not isinstance(line.get("version"), int) or versions[-1:] > [line["version"]]:
                raise PieceError(f"a chunk after version {versions[-1:]} is stamped {line}")
            versions.append(line["version"])
            self.tokens[line["version"]] += len(line["token_ids"])
        self.turns += 1
        self.across += len(set(versions)) > 1
        return versions

    async def _lines(self) -> list[dict[str, Any]]:
        body = {
            "request_id": f"stamped-{self.turns}",
            "token_ids": PROMPT,
            "sampling": {"max_tokens": self.output_tokens, "temperature": 1.0},
        }
        until_s = time.monotonic() + REFUSED_MOST_S
        while True:
            status, text = await self.guest.post("generate", body, TURN_TIMEOUT_S)
            if status != _UNAVAILABLE or time.monotonic() > until_s:
                break
            await asyncio.sleep(RETRY_S)
        if status != 200:
            raise PieceError(f"the guest refused a turn: {status} {text[:200]}")
        return [json.loads(line) for line in text.splitlines() if line]


class GuestVersions:
    """Publisher of steps there and back between two sets of weights, which a guest applies."""

    def __init__(self, weights: Path, folder: Path, key: SigningKey, seed: int) -> None:
        """Read version 0 from the safetensors file `weights`."""
        self.store = ChunkStore(folder)
        self._publisher = VersionPublisher(self.store, job="gpu", trainer="bench", key=key)
        base = read_safetensors(weights)
        self._sets = base, changed(base, CHANGED, seed)
        self.published = 0

    def publish(self) -> dict[str, Any]:
        """Publish the next version; return its size and duration."""
        version = self.published + 1
        began_s = time.perf_counter()
        old, new = self._sets[self.published % 2], self._sets[version % 2]
        manifest = self._publisher.publish(version, self.published, old, new)
        self.published = version
        return {
            "publish_s": time.perf_counter() - began_s,
            "changed_share": manifest.changed / sum(t.bits.size for t in old.values()),
            "wire_bytes": manifest.wire_bytes,
        }

    async def apply(self, guest: GuestClient) -> dict[str, Any]:
        """Apply the newest version and return the guest's report. Raises PieceError."""
        body = {
            "manifest": str(self.store.manifest_path(self.published)),
            "chunks": str(self.store.chunks_dir),
        }
        began_s = time.monotonic()
        try:
            status, text = await guest.post("weights/apply", body, APPLY_TIMEOUT_S)
            report: dict[str, Any] = json.loads(text)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PieceError(f"the guest did not answer an update: {error!r}") from error
        if status != 200 or report.get("version") != self.published:
            raise PieceError(f"version {self.published} is not active: {status} {report}")
        return report | {"applied_s": time.monotonic() - began_s}


async def updates(session: ServingSession, seconds: float) -> Measured:
    """Measure one update without host load, then updates under it while there is time."""
    until_s = time.monotonic() + seconds
    weights = session.engines.guest_weights
    assert weights is not None
    sizes = session.sizes
    folder, key = session.folder / "versions", session.engines.key
    session.say("version 0 is read and changed")
    versions = await asyncio.to_thread(GuestVersions, weights, folder, key, sizes.seed)
    cell = await session.cell(BUSY, "poisson")
    engines = session.engines
    guest = GuestClient(session.player.session, engines.url(GUEST), engines.headers(GUEST))
    turns = StampedTurns(guest, sizes.guest_load.output_tokens)
    first = await _without_host(session, versions, turns)
    reports: list[dict[str, Any]] = []
    during: list[CoserveBlockRecord] = []
    control: list[CoserveBlockRecord] = []
    longest_s = 0.0
    while not reports or (len(reports) < sizes.rounds and time.monotonic() + longest_s < until_s):
        began_s = time.monotonic()
        told, blocks = await _update(session, versions, cell, turns, len(during))
        reports.append(told)
        during += blocks
        control += [await session.play(_again(block, cell, sizes.arm_s)) for block in blocks]
        longest_s = max(longest_s, time.monotonic() - began_s)
    pauses_s = [report["pause_s"] for report in reports]
    return {
        "engines_start_s": session.start_s,
        "weights_written_s": session.engines.weights_written_s,
        "traffic": {"busy": BUSY, "rate_per_s": cell.rate_per_s},
        "first": first,
        "updates": reports,
        "pause_s": {"p50": percentile(pauses_s, 50), "most": max(pauses_s), "count": len(pauses_s)},
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
    """Apply the first update, which also waits until the guest has proved version 0."""
    published = await asyncio.to_thread(versions.publish)
    session.say(f"version 1 is published after {published['publish_s']:.1f} s")
    session.player.rule(ARM)
    playing = asyncio.create_task(turns.run())
    applying = asyncio.create_task(versions.apply(turns.guest))
    try:
        # Turns end by themselves only when the guest refuses them.
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
    """Cancel a task; raise the error with which it ended by itself."""
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
    cell: ArmCell,
    turns: StampedTurns,
    number: int,
) -> tuple[dict[str, Any], list[CoserveBlockRecord]]:
    """Apply one update under load; return its report and the blocks that were played meanwhile."""
    published = await asyncio.to_thread(versions.publish)
    applying = asyncio.create_task(versions.apply(turns.guest))
    blocks: list[CoserveBlockRecord] = []
    try:
        while not blocks or not applying.done():
            at = number + len(blocks)
            block = PlanBlock(ARM, session.sizes.arm_s, at, FIRST_SEGMENT + at, cell)
            blocks.append(await session.play(block))
        report = await applying
    finally:
        await _ended(applying)
    await _insist_stamped(turns, report)
    session.say(f"version {report['version']}: pause {1e3 * report['pause_s']:.1f} ms")
    return published | report, blocks


def _again(record: CoserveBlockRecord, cell: ArmCell, seconds: float) -> PlanBlock:
    """Return the same arrivals under the same rules."""
    return PlanBlock(ARM, seconds, record.round, record.segment, cell)


async def _host(
    session: ServingSession,
    during: Sequence[CoserveBlockRecord],
    control: Sequence[CoserveBlockRecord],
) -> dict[str, Any]:
    """Return host latencies with and without updates, and their ratios."""
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
