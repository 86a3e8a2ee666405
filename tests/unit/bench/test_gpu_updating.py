"""A guest's versions on a card: weights on disk, steps of them, and what figures mean."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from standin_guest import StandInGuest

from bench.coserve.plan import Cell, PlanBlock
from bench.coserve.records import CoserveBlockRecord, Counters
from bench.gpu import models
from bench.gpu.limits import REQUESTS_FOR_P90, updating_checks
from bench.gpu.models import SHAPES, checkpoint_name, write_weights
from bench.gpu.pieces import PieceError
from bench.gpu.serve import updating
from bench.gpu.serve.updating import CHANGED, GuestVersions, StampedTurns, stepped
from bench.gpu.sizes import REHEARSAL
from bench.load.protocol import Request
from weight_transfer import Receiver, SigningKey, read_chunk, read_safetensors
from weight_transfer.format.manifest import Manifest

TINY = SHAPES["tiny"]


def test_weights_are_on_disk_whole_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    path = write_weights(TINY, tmp_path / "one", seed=1)
    read = read_safetensors(path)
    assert {name: t.shape for name, t in read.items()} == {
        checkpoint_name(name): shape for name, shape in TINY.tensors().items()
    }
    again = write_weights(TINY, tmp_path / "two", seed=1)
    assert again.read_bytes() == path.read_bytes()
    assert write_weights(TINY, tmp_path / "one", seed=2).read_bytes() != path.read_bytes()
    values = read["lm_head.weight"].bits.astype(np.uint32) << 16
    floats = values.view(np.float32)
    assert 2**-8 <= np.abs(floats).min() < np.abs(floats).max() < 2**-4
    assert set(read["model.norm.weight"].bits) == {0x3F80}


def test_a_file_that_is_there_is_kept_and_half_a_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_weights(TINY, tmp_path, seed=1)
    digest = hashlib.sha256(path.read_bytes()).digest()
    with monkeypatch.context() as patch:
        patch.setattr(models, "_weights", None)
        assert write_weights(TINY, tmp_path, seed=1) == path
    path.write_bytes(path.read_bytes()[:-2])
    write_weights(TINY, tmp_path, seed=1)
    assert hashlib.sha256(path.read_bytes()).digest() == digest


def test_versions_go_there_and_back_and_a_receiver_takes_all_of_them(tmp_path: Path) -> None:
    key = SigningKey.generate()
    path = write_weights(TINY, tmp_path, seed=1)
    base = read_safetensors(path)
    versions = GuestVersions(path, tmp_path / "store", key, seed=3)
    receiver = Receiver(base)
    seen = []
    for version in (1, 2, 3):
        told = versions.publish()
        assert told["changed_share"] == pytest.approx(CHANGED, rel=0.1)
        manifest = Manifest.from_bytes(versions.store.manifest_path(version).read_bytes())
        chunks = {ref.id: read_chunk(versions.store.chunks_dir, ref.id) for ref in manifest.chunks}
        receiver.commit(receiver.decode(manifest, chunks, key.verify_key, manifest.created_s))
        seen.append({name: t.bits.copy() for name, t in receiver.tensors.items()})
    for name, bits in stepped(base, 3).items():
        np.testing.assert_array_equal(seen[0][name], bits.bits)
        np.testing.assert_array_equal(seen[1][name], base[name].bits)
        np.testing.assert_array_equal(seen[2][name], bits.bits)


async def served(lines: list[dict[str, Any]]) -> TestServer:
    """A stand-in guest that answers each turn with these lines."""
    app = web.Application()

    async def generate(request: web.Request) -> web.Response:
        assert (await request.json())["token_ids"]
        return web.Response(text="\n".join(json.dumps(line) for line in lines))

    app.router.add_post("/rose/v1/generate", generate)
    server = TestServer(app)
    await server.start_server()
    return server


def chunk(version: Any, tokens: int = 2) -> dict[str, Any]:
    return {"token_ids": [1] * tokens, "logprobs": [0.0] * tokens, "version": version}


async def test_tokens_are_counted_by_the_version_that_sampled_them() -> None:
    server = await served([chunk(1), chunk(1, 3), chunk(2), {"finish_reason": "length"}])
    async with aiohttp.ClientSession() as http:
        turns = StampedTurns(http, str(server.make_url("")).rstrip("/"), 8)
        assert await turns.turn() == [1, 1, 2]
        await turns.turn()
    await server.close()
    assert dict(turns.tokens) == {1: 10, 2: 4}
    assert (turns.turns, turns.across) == (2, 2)


@pytest.mark.parametrize("wrong", [[chunk(2), chunk(1)], [chunk(None)]])
async def test_a_chunk_without_its_version_or_of_an_older_one_ends_the_piece(
    wrong: list[dict[str, Any]],
) -> None:
    server = await served(wrong)
    async with aiohttp.ClientSession() as http:
        turns = StampedTurns(http, str(server.make_url("")).rstrip("/"), 8)
        with pytest.raises(PieceError, match="is stamped"):
            await turns.turn()
    await server.close()


class StandInSession:
    """A guest that answers, and a host whose requests take 10 ms, 20 ms beside an update."""

    def __init__(self, guest: StandInGuest, weights: Path, folder: Path, key: SigningKey) -> None:
        self.sizes, self.folder, self.key, self.start_s = REHEARSAL, folder, key, 1.0
        self.engines: Any = self
        self.player: Any = self
        self.guest_weights, self.weights_written_s = weights, 0.5
        self.http: Any = None
        self.base = ""
        self.ruled: list[str] = []
        self.played: list[tuple[CoserveBlockRecord, bool]] = []
        self._guest = guest

    def url(self, name: str) -> str:
        assert name == "guest"
        return self.base

    def headers(self, name: str) -> dict[str, str]:
        return {}

    def rule(self, arm: Any) -> None:
        self.ruled.append(arm.name)

    def say(self, what: str) -> None:
        assert what

    async def cell(self, busy: float, traffic: Any) -> Cell:
        return Cell(busy, traffic, 5.0)

    async def play(self, block: PlanBlock) -> CoserveBlockRecord:
        before = self._guest.receiver.version
        await asyncio.sleep(0.1)
        updated = self._guest.receiver.version != before
        assert block.cell is not None
        none = Counters(0, 0, 0, 0)
        record = CoserveBlockRecord(
            block=len(self.played), arm=block.arm.name, round=block.round, segment=block.segment,
            busy_target=0.6, traffic="poisson", rate_per_s=5.0, policy=block.arm.policy,
            slack_share=block.arm.slack_share, isolation="none", start_s=0.0,
            end_s=block.duration_s, start=none, end=none,
        )  # fmt: skip
        self.played.append((record, updated))
        return record

    async def requests(self) -> list[Request]:
        return [
            Request(
                request_id=f"{record.block}", block=record.block, arm=record.arm,
                segment=record.segment, offset_s=0.0, arrival_s=0.0,
                ttft_s=0.02 if updated else 0.01, e2e_s=1.0, output_tokens=4, status="ok",
                tpot_s=0.005, prompt_tokens=8, source="client",
            )
            for record, updated in self.played
        ]  # fmt: skip


@asynccontextmanager
async def session(tmp_path: Path) -> AsyncIterator[tuple[StandInSession, StandInGuest]]:
    key = SigningKey.generate()
    weights = write_weights(SHAPES["tiny-guest"], tmp_path, seed=1)
    guest = StandInGuest(weights, key.verify_key)
    server = await guest.start()
    made = StandInSession(guest, weights, tmp_path, key)
    made.base = str(server.make_url("")).rstrip("/")
    async with aiohttp.ClientSession() as made.http:
        yield made, guest
    await server.close()


async def test_an_update_is_measured_beside_the_same_arrivals_without_one(tmp_path: Path) -> None:
    async with session(tmp_path) as (made, _):
        began_s = time.monotonic()
        found = await updating.updates(made, 60.0)  # type: ignore[arg-type]
        assert time.monotonic() - began_s < 60
    assert [found["first"]["version"], *(u["version"] for u in found["updates"])] == [1, 2]
    assert found["pause_s"] == {"p50": 0.02, "most": 0.02, "count": 1}
    assert made.ruled == ["adaptive-0.0"], "the guest may run before the first block"
    half = len(made.played) // 2
    segments = [record.segment for record, _ in made.played]
    assert segments[:half] == segments[half:], "the same arrivals"
    assert [updated for _, updated in made.played].index(True) < half
    host = found["host"]
    assert host["during"]["requests"] == host["control"]["requests"] == half >= 1
    assert host["control"]["ttft_p90_s"] == 0.01
    assert host["ratio"]["ttft_p90_s"] == pytest.approx(2.0)
    tokens = found["stamped"]["tokens_of_version"]
    assert set(tokens) == {"0", "1", "2"}
    assert found["stamped"]["turns_across_a_version"] <= found["stamped"]["turns"]
    assert json.dumps(found, allow_nan=False)


async def test_a_guest_that_stamps_the_old_version_fails_the_piece(tmp_path: Path) -> None:
    async with session(tmp_path) as (made, guest):
        guest.stamped_late = True
        with pytest.raises(PieceError, match=r"a turn after version 1 is stamped \[0, 0\]"):
            await updating.updates(made, 60.0)  # type: ignore[arg-type]


async def test_a_guest_that_died_fails_the_piece_though_its_server_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updating, "REFUSED_MOST_S", 0.5)
    async with session(tmp_path) as (made, guest):
        guest.dead = True
        with pytest.raises(PieceError, match=r"the guest refused a turn: 503"):
            await updating.updates(made, 60.0)  # type: ignore[arg-type]


async def test_a_version_that_is_not_active_fails_the_piece(tmp_path: Path) -> None:
    async with session(tmp_path) as (made, _):
        made.key = SigningKey.generate()
        with pytest.raises(PieceError, match=r"did not answer|is not active"):
            await updating.updates(made, 60.0)  # type: ignore[arg-type]


def measured(pause_s: float, most_s: float, ratio: float, requests: int) -> dict[str, Any]:
    return {
        "pause_s": {"p50": pause_s, "most": most_s},
        "host": {
            "during": {"requests": requests},
            "control": {"requests": requests},
            "ratio": {"ttft_p90_s": ratio, "tpot_p90_s": 1.0},
        },
    }


def test_a_pause_above_fifty_milliseconds_fails() -> None:
    verdicts = [c["verdict"] for c in updating_checks(measured(0.049, 0.051, 1.0, 10))]
    assert verdicts == ["HOLDS", "FAILS", "HOLDS", "HOLDS"]


def test_few_requests_do_not_decide_what_users_see() -> None:
    few = updating_checks(measured(0.01, 0.01, 1.2, REQUESTS_FOR_P90 - 1))
    many = updating_checks(measured(0.01, 0.01, 1.2, REQUESTS_FOR_P90))
    assert [found[2]["verdict"] for found in (few, many)] == ["INCONCLUSIVE", "FAILS"]
