"""Host, ROSE guest and stock guest of one run: started, checked, stopped."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose.engines import EngineProcess, EngineSpec
from rose.errors import EngineStartError


@dataclass(slots=True, kw_only=True)
class EngineSet:
    """Engines by name; whoever starts one puts it into `running`."""

    ports: Mapping[str, int]
    running: dict[str, EngineProcess] = field(default_factory=dict)

    def url(self, name: str) -> str:
        """Address of an engine."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def headers(self, name: str) -> dict[str, str]:
        """What it asks for of whoever controls it."""
        return self.running[name].headers

    def pid(self, name: str) -> int | None:
        """Its API process while it runs."""
        engine = self.running.get(name)
        return engine.process.pid if engine and engine.process.returncode is None else None

    async def start_together(
        self, specs: Iterable[EngineSpec], timeout_s: float, logs: Path
    ) -> None:
        """Start all at once. Raises EngineStartError for the first that does not come up."""
        for spec in specs:
            self.running[spec.name] = await EngineProcess.start(spec)
        await await_all(self.running, timeout_s, logs)

    def check(self) -> None:
        """Raise when an engine ended by itself."""
        for name, engine in self.running.items():
            if engine.process.returncode is not None:
                raise EngineStartError(
                    f"engine {name} ended: {engine.last_words()}; see {engine.spec.log}"
                )

    async def stop(self) -> None:
        """End all."""
        await asyncio.gather(*(engine.stop() for engine in self.running.values()))
        self.running.clear()


async def await_all(engines: Mapping[str, EngineProcess], timeout_s: float, logs: Path) -> None:
    """Return once all serve. Raises EngineStartError as soon as one cannot, or when time is up."""
    waiting = {
        asyncio.create_task(engine.wait_healthy(timeout_s), name=name)
        for name, engine in engines.items()
    }
    done, late = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    for task in done:
        task.result()
    if late:
        names = ", ".join(sorted(task.get_name() for task in late))
        raise EngineStartError(
            f"not ready after {timeout_s:.0f} s: {names}; see {logs}/engine-*.log"
        )
