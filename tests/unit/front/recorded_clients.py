"""Calls of prime-rl's, slime's and AReaL's own client files, recorded: what was asked and answered.

A line of JSON for each call in `tests/traces/front/clients.jsonl`, with names in place of addresses
and folders: each client makes an update and a turn, one after the other. They are made by the
unchanged files (`scripts/trainer-clients`), through a proxy to a front, and played back where those
files are not.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.trainers.stack import QUIET, ROOT

RECORDS = ROOT / "tests/traces/front/clients.jsonl"
CLIENTS = ("prime", "slime", "areal", "areal-vllm")
TOKENS = [7, 8, 9, 10, 11, 12]
DRIVE_S = 240.0


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call; bodies are JSON, None where there is none."""

    method: str
    path: str
    body: Any
    status: int
    answer: Any


@dataclass(slots=True)
class Names:
    """Values that differ from run to run, and their names in a record."""

    places: dict[str, str] = field(default_factory=dict)

    def hidden(self, text: str) -> str:
        """The text with names; longer places go first, since one may begin as another does."""
        for name in sorted(self.places, key=lambda each: -len(self.places[each])):
            text = text.replace(self.places[name], name)
        return text

    def shown(self, text: str) -> str:
        """The text of this run."""
        for name, place in self.places.items():
            text = text.replace(name, place)
        return text


class TurnsGateway:
    """Answers turns in each engine's words, always with the same tokens."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.turns: list[tuple[str, Any]] = []

    async def handle(self, http: web.Request) -> web.Response:
        if http.path == "/health":
            health = {"status": "ok", "troubles": [], "log_dropped": 0, "unversioned": {}}
            return web.json_response({**health, "replicas": 1})
        if http.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": self._model}]})
        self.turns.append((http.path, await http.json()))
        if http.path == "/generate":
            logprobs = [[-0.5, token, None] for token in TOKENS]
            finish = {"type": "length", "length": len(TOKENS)}
            meta = {"finish_reason": finish, "output_token_logprobs": logprobs}
            return web.json_response({"text": "", "output_ids": TOKENS, "meta_info": meta})
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if http.path == "/v1/completions":
            tokens = [f"token_id:{token}" for token in TOKENS]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": [-0.5] * len(TOKENS)}
            return web.json_response({"choices": [choice | {"text": ""}]})
        return web.json_response({"choices": [choice | {"token_ids": TOKENS}]})


class Recorder:
    """A proxy that notes each call and its answer."""

    def __init__(self, front: str) -> None:
        self._front = front
        self.calls: list[RecordedCall] = []

    async def _pass_on(self, http: web.Request) -> web.Response:
        raw = await http.read()
        # Whom the caller asked: the front names itself in some answers.
        headers = {"Host": http.host, "Content-Type": http.content_type}
        async with (
            aiohttp.ClientSession(self._front) as session,
            session.request(http.method, http.rel_url, data=raw, headers=headers) as answer,
        ):
            answered = await answer.read()
        self.calls.append(
            RecordedCall(
                http.method,
                http.rel_url.raw_path_qs,
                json.loads(raw) if raw else None,
                answer.status,
                json.loads(answered) if answered else None,
            )
        )
        return web.Response(body=answered, status=answer.status, content_type=answer.content_type)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields its URL."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{any:.*}", self._pass_on)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")


def drive(clients: Path, front: str, model: Path, saved: Path) -> None:
    """Let the clients' own files make an update and a turn each."""
    program = [sys.executable, "-m", "tests.trainers.drive_front", str(clients), front, front]
    done = subprocess.run(
        [*program, str(model), str(saved), "0", *CLIENTS],
        cwd=ROOT,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=DRIVE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]


def read() -> list[RecordedCall]:
    """All that is recorded, with names."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines()
    return [RecordedCall(**json.loads(line)) for line in lines]


def written(calls: list[RecordedCall], names: Names) -> str:
    """The record's lines."""
    lines = [
        json.dumps(
            {name: getattr(call, name) for name in RecordedCall.__slots__}, ensure_ascii=False
        )
        for call in calls
    ]
    return names.hidden("\n".join(lines) + "\n")
