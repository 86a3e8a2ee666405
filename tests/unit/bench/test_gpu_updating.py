"""A guest's versions on a card: weights on disk, steps of them, and what figures mean."""

import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.limits import REQUESTS_FOR_P90, updating_checks
from rose.bench.gpu.models import SHAPES
from rose.bench.gpu.serve import weights_file
from rose.bench.gpu.serve.stamped import StampedTurns
from rose.bench.gpu.serve.versions import CHANGED, GuestVersions, stepped
from rose.bench.gpu.serve.weights_file import checkpoint_name, write_weights
from weight_transfer import Receiver, SigningKey, read_chunk, read_safetensors
from weight_transfer.manifest import Manifest

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
        patch.setattr(weights_file, "_weights", None)
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
        manifest = Manifest.from_json(versions._store.manifest_path(version).read_bytes())
        chunks = {ref.id: read_chunk(versions._store.chunks_dir, ref.id) for ref in manifest.chunks}
        receiver.commit(receiver.stage(manifest, chunks, key.verify_key, manifest.created_s))
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
