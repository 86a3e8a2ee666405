"""Engines of one host contract: processes of their own session, ended as a group."""

import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from contract_engines import ContractEngine, PromptOutput
from tiny_model import save_tiny_model

from rose.addresses import free_port
from rose.engines import EngineRole, EngineSpec, process_spec
from tests.harness.waiting import until

START_S = 300.0


@dataclass
class StartedEngine:
    """One engine that was started."""

    engine: ContractEngine
    spec: EngineSpec
    process: "subprocess.Popen[bytes]"

    @property
    def said(self) -> str:
        return self.spec.log.read_text(errors="replace")

    def complete(self, prompt: list[int], tokens: int, request_id: str) -> PromptOutput:
        return self.engine.complete(self.spec, prompt, tokens, request_id)

    def burst(self, prompts: Sequence[list[int]], tokens: int, name: str) -> list[list[int]]:
        """All at once, in their order."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [
                pool.submit(self.complete, prompt, tokens, f"{name}-{number}")
                for number, prompt in enumerate(prompts)
            ]
            return [one.result().tokens for one in asked]

    def wait(self) -> None:
        """Return once it answers."""

        def healthy() -> bool:
            assert self.process.poll() is None, self.said[-4_000:]
            try:
                with urllib.request.urlopen(f"{self.spec.url}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        until(healthy, START_S, f"{self.spec.name} serves", every_s=0.25)

    def kill(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class HostStage:
    """Engines of the tiny model that one contract is shown with."""

    engine: ContractEngine
    folder: Path
    started: list[StartedEngine] = field(default_factory=list)

    def start(self, name: str, role: EngineRole, **given: object) -> StartedEngine:
        """Start one; `wait` for it."""
        spec = self.engine.spec(self.folder, name, role, free_port(), **given)
        process = process_spec(spec)
        with spec.log.open("wb") as log:
            popen = subprocess.Popen(
                process.argv,
                env={**os.environ, **process.env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(StartedEngine(self.engine, spec, popen))
        return self.started[-1]


@contextmanager
def host_stage(engine: ContractEngine, folder: Path) -> Iterator[HostStage]:
    """A folder with the model; whatever was started is gone afterwards."""
    save_tiny_model(folder / "model", dtype="float32")
    stage = HostStage(engine, folder)
    try:
        yield stage
    finally:
        for each in stage.started:
            each.kill()
