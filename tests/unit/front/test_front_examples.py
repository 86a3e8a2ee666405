"""Examples of trainers that use the front say what front and gateway take."""

import os
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
from aiohttp import web
from front_cases import save_checkpoint

from rose.integrations.front.settings import parse_front
from tests.harness.policies import trainer_environment
from tests.harness.web_server import served

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slime_is_started_with_a_front_as_engine_and_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "rose", 'printf "%s\\n" "$@" > front; exec sleep 60')
    stand_in(tmp_path, "trainer", 'printf "%s\\n" "$@" > trained')
    # The front is up once it was called.
    stand_in(tmp_path, "curl", "test -s front")
    subprocess.run(
        [EXAMPLES / "slime.sh", "trainer", "--lr", "1e-6"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        check=True,
        timeout=60,
    )
    for name, value in trainer_environment(save_checkpoint(tmp_path / "model")).items():
        monkeypatch.setenv(name, value)
    command, *options = (tmp_path / "front").read_text().splitlines()
    settings = parse_front(options)
    given = (tmp_path / "trained").read_text().splitlines()
    assert command == "front"
    assert given[:2] == ["--lr", "1e-6"]
    assert f"127.0.0.1:{settings.port}" in given
    assert str(settings.port) in given
    assert given[-1] == str(tmp_path / settings.weights_roots[0])


def test_prime_rls_file_has_the_clients_addresses() -> None:
    told = tomllib.loads((EXAMPLES / "prime_rl.toml").read_text())
    client = told["orchestrator"]["model"]["client"]
    assert told["weight_broadcast"] == {"type": "filesystem"}
    assert client["base_url"].endswith("/v1")
    assert len(client["admin_base_url"]) == 1


async def test_rewards_are_in_the_order_of_their_texts_and_a_refusal_is_its_line() -> None:
    jobs = set()

    async def classify(http: web.Request) -> web.Response:
        jobs.add((http.method, http.path, http.headers["X-Rose-Job"]))
        texts = (await http.json())["input"]
        if "refuse" in texts:
            return web.json_response({"error": {"message": "no replica"}}, status=503)
        return web.json_response({"data": [{"probs": [float(text)]} for text in texts]})

    rewards = runpy.run_path(str(EXAMPLES / "reward_model.py"))["rewards"]
    async with served(classify) as url:
        assert await rewards([str(k) for k in range(40)], url) == [float(k) for k in range(40)]
        with pytest.raises(RuntimeError, match="no replica"):
            await rewards(["refuse"], url)
    assert jobs == {("POST", "/classify", "reward")}
