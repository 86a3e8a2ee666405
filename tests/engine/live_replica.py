"""A real gated replica behind its HTTP contract, and one client of it."""

import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from standin_node import StandInNode
from tiny_model import VOCABULARY
from vllm_versions import run_by

from rose.engines import EngineRole, EngineSpec
from weight_transfer.publisher import Publisher
from weight_transfer.signing import SigningKey
from weight_transfer.store import ChunkStore
from weight_transfer.tensors import TensorBits, tensor_bits, tensor_of

START_S = 200.0
PROMPT = [(7 * k + 3) % VOCABULARY for k in range(70)]
Lines = list[dict[str, Any]]


@dataclass
class Engine:
    """The process, and the newest version that was published for it."""

    url: str
    node: StandInNode
    store: ChunkStore
    publisher: Publisher
    active: dict[str, TensorBits]
    version: int = 0
    epochs: Iterator[int] = field(default_factory=lambda: count(1))


@dataclass
class Replica:
    """One client of the engine."""

    engine: Engine
    http: aiohttp.ClientSession

    async def call(self, path: str, body: object = None) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        url = f"{self.engine.url}/rose/v1/{path}"
        async with self.http.request(method, url, json=body) as answer:
            return answer.status, await answer.json()

    async def admit(self) -> int:
        epoch = next(self.engine.epochs)
        assert (await self.call("admit", {"epoch": epoch}))[0] == 200
        return epoch

    async def stream(
        self, tokens: list[int], max_tokens: int, salt: str | None = None, **sampling: Any
    ) -> AsyncIterator[dict[str, Any]]:
        body = {
            "request_id": "turn",
            "token_ids": tokens,
            "sampling": {"temperature": 0.0, "max_tokens": max_tokens, **sampling},
            "cache_salt": salt,
        }
        async with self.http.post(f"{self.engine.url}/rose/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                yield json.loads(line)

    async def lines(self, tokens: list[int], max_tokens: int, **how: Any) -> Lines:
        return [line async for line in self.stream(tokens, max_tokens, **how)]

    async def prepared(self) -> None:
        """Wait until an update would not have to wait for the worker's own start."""
        assert (await self.call("weights/audit", {}))[0] == 200

    def publish(self, seed: int) -> dict[str, str]:
        """The next version, based on the newest published one; returns the body that applies it."""
        import torch

        torch.manual_seed(seed)
        new = {}
        for name, bits in self.engine.active.items():
            weight = tensor_of(bits)
            new[name] = tensor_bits(name, weight + 0.05 * torch.randn_like(weight))
        parent, store = self.engine.version, self.engine.store
        self.engine.publisher.publish(parent + 1, parent, self.engine.active, new)
        self.engine.version, self.engine.active = parent + 1, new
        return {
            "manifest": str(store.manifest_path(parent + 1)),
            "chunks": str(store.chunks_dir),
        }

    async def apply(self, paths: dict[str, str]) -> dict[str, Any]:
        status, report = await self.call("weights/apply", paths)
        assert status == 200, report
        assert report["digest_ok"]
        assert report["probe_ok"]
        return dict(report)


def tokens_of(lines: Lines) -> list[int]:
    return [token for line in lines for token in line.get("token_ids", [])]


def versions_of(lines: Lines) -> list[int]:
    return [line["version"] for line in lines for _ in line.get("token_ids", [])]


def sampled(lines: Lines) -> list[tuple[int, float]]:
    """Tokens with their logprobs, however they were cut into chunks."""
    pairs = (
        zip(line.get("token_ids", ()), line.get("logprobs", ()), strict=True) for line in lines
    )
    return [pair for pairs_of_line in pairs for pair in pairs_of_line]


def first_logprob(lines: Lines) -> float:
    logprob: float = lines[0]["logprobs"][0]
    return logprob


def forge(manifest: Path) -> Path:
    """The manifest under another trainer's name, its signature left as it was."""
    plain = json.loads(manifest.read_bytes())
    forged = manifest.with_name("forged.json")
    forged.write_text(json.dumps(plain | {"trainer": "somebody else"}))
    return forged


def replica_spec(
    root: Path, port: int, page: Path, key: SigningKey, python: str | None = None
) -> EngineSpec:
    """A gated guest in fp32 that serves `root/model`."""
    return EngineSpec(
        name="guest-0",
        role=EngineRole.GUEST,
        model_dir=root / "model",
        port=port,
        log=root / "engine.log",
        dtype="float32",
        stream_interval=4,
        control_page=page,
        orphan_s=2.0,
        verify_key=key.verify_key.hex,
        extra_args=("--skip-tokenizer-init",),
        **run_by(python, root),
    )


def wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    import urllib.error
    import urllib.request

    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise AssertionError(f"not ready in time: {log.read_text()[-4000:]}")
