"""What is done to a fleet, at random and from a seed: kill, freeze, revoke, kill a gateway."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from rose.bench.chaos.fleet import Fleet, GatewayProcess, Replica

WEIGHTS = {"revoke": 6, "freeze": 2, "kill": 1, "kill_gateway": 1}


@dataclass
class Faults:
    """Goes on until `until_s` (monotonic); afterwards everything is up again, or is being started.

    One replica always stays untouched: with none at all turns wait, which proves nothing.
    """

    fleet: Fleet
    seed: int
    mean_pause_s: float = 0.8
    counts: Counter[str] = field(default_factory=Counter)
    _busy: set[str] = field(default_factory=set)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def run(self, until_s: float) -> None:
        """Disturb. Raises what went wrong while something was started anew."""
        dice = random.Random(self.seed)  # noqa: S311 - a seed makes a failure repeatable
        while (now_s := time.monotonic()) < until_s:
            pause_s = min(dice.expovariate(1 / self.mean_pause_s), until_s - now_s)
            await asyncio.sleep(pause_s)
            self._begin(dice)
            for task in self._tasks:
                if task.done():
                    task.result()
        for replica in self.fleet.replicas:
            if replica.up:
                replica.signal(signal.SIGCONT)

    async def settle(self) -> None:
        """Wait until all that was killed is up again."""
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Leave what is being started as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, dice: random.Random) -> None:
        kind = dice.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        length_s = dice.uniform(0.2, 3.0)
        if kind == "kill_gateway":
            gateways = self.fleet.gateways
            gateway = dice.choice(gateways)
            if len(gateways) > 1 and not any(g.url in self._busy for g in gateways):
                self._start(kind, gateway.url, self._restart_gateway(gateway))
            return
        free = [r for r in self.fleet.replicas if r.spec.name not in self._busy]
        if len(free) < 2:
            return
        replica = dice.choice(free)
        work = {"revoke": self._revoke, "freeze": self._freeze, "kill": self._kill}[kind]
        self._start(kind, replica.spec.name, work(replica, length_s))

    def _start(self, kind: str, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.counts[kind] += 1
        self._busy.add(name)
        task = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._busy.discard(name))
        self._tasks.append(task)

    async def _revoke(self, replica: Replica, length_s: float) -> None:
        await replica.drain()
        await asyncio.sleep(length_s / 4)
        await replica.admit()

    async def _freeze(self, replica: Replica, length_s: float) -> None:
        replica.signal(signal.SIGSTOP)
        await asyncio.sleep(length_s)
        replica.signal(signal.SIGCONT)

    async def _kill(self, replica: Replica, length_s: float) -> None:
        del length_s
        await replica.kill()
        await replica.start()

    async def _restart_gateway(self, gateway: GatewayProcess) -> None:
        gateway.kill()
        await gateway.start(self.fleet.http)
