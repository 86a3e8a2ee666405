"""A guest's versions on a card: weights on disk, steps of them, and what figures mean."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.common.tiny_models import changed
from bench.gpu.models import SHAPES, write_weights
from bench.gpu.pieces import REQUESTS_FOR_P90, PieceError, updating_checks
from bench.gpu.updating import CHANGED, GuestClient, GuestVersions, StampedTurns
from weight_transfer import Receiver, SigningKey, read_chunk, read_safetensors
from weight_transfer.format.manifest import Manifest

TINY = SHAPES["tiny"]


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
    for name, bits in changed(base, CHANGED, 3).items():
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
        turns = StampedTurns(GuestClient(http, str(server.make_url("")).rstrip("/")), 8)
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
        turns = StampedTurns(GuestClient(http, str(server.make_url("")).rstrip("/")), 8)
        with pytest.raises(PieceError, match="is stamped"):
            await turns.turn()
    await server.close()


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
    verdicts = [c.verdict for c in updating_checks(measured(0.049, 0.051, 1.0, 10))]
    assert verdicts == ["HOLDS", "FAILS", "HOLDS", "HOLDS"]


def test_few_requests_do_not_decide_what_users_see() -> None:
    few = updating_checks(measured(0.01, 0.01, 1.2, REQUESTS_FOR_P90 - 1))
    many = updating_checks(measured(0.01, 0.01, 1.2, REQUESTS_FOR_P90))
    assert [found[2].verdict for found in (few, many)] == ["INCONCLUSIVE", "FAILS"]
