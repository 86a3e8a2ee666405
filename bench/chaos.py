"""`python -m bench.chaos`: turns on real engines that are killed, frozen and revoked.

Writes chaos.json. Exit code 0, 1 when a turn was lost, doubled or wrong, 2 for bad input.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from bench.common.processes import BenchProcess, gateway_command
from bench.common.report import OUT, parser_of, put, reported
from bench.common.tiny_models import FLEET_MODEL
from rose.addresses import free_ports
from rose.client import Retry, RolloutClient, RolloutError, Sampling, Turn
from rose.engines import EngineRole, EngineSpec
from rose.engines.launch import EngineProcess
from rose.node.replica_client import ReplicaClient

PROG = "bench.chaos"
START_S = 240.0
GATEWAY_S = 60.0
SEQUENCES = 128
REPLICA_ARGS = ("--skip-tokenizer-init",)
# Engines of a fleet answer to one name, as engines behind a router do.
STOCK_ARGS = ("--served-model-name=policy",)
WEIGHTS = {"revoke": 6, "freeze": 2, "kill": 1, "kill_gateway": 1}
PROMPTS = 24
OUTPUT_TOKENS = 300
FEWEST_TOKENS = 100
FAULTS_KEPT = 5
# A turn waits out the start of a gateway, and of an engine where it is the last one.
PATIENT = Retry(tries=60, first_s=0.05, max_s=1.0)
TURN_S = 240.0


@dataclass
class ChaosReplica:
    """A real engine and the epochs of the node that it does not have here."""

    spec: EngineSpec
    http: aiohttp.ClientSession
    engine: EngineProcess | None = None
    epoch: int = 0
    up: bool = False

    async def start(self) -> None:
        self.engine = await EngineProcess.start(self.spec)
        await self.engine.wait_healthy(START_S)
        if self.spec.role.is_replica:
            await self.admit()
        self.up = True

    async def drain(self) -> int:
        """Revoke: all its turns end here; returns how many."""
        self.epoch += 1
        return await self._client.drain(self.epoch, "chaos")

    async def admit(self) -> None:
        self.epoch += 1
        await self._client.admit(self.epoch)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group of the engine."""
        assert self.engine is not None
        with suppress(ProcessLookupError):
            os.killpg(self.engine.process.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left."""
        self.up = False
        self.signal(signal.SIGKILL)
        await self.stop()

    async def stop(self) -> None:
        if self.engine is not None:
            self.signal(signal.SIGCONT)
            await self.engine.stop()

    @property
    def _client(self) -> ReplicaClient:
        assert self.engine is not None
        engine = self.engine
        return ReplicaClient(self.http, self.spec.url, lambda: engine.headers)


@dataclass
class ChaosFleet:
    """Replicas and gateways of one run. Async context manager.

    `replicas` that are given run already and go on afterwards; without them `count` are started.
    With the role STOCK the engines know nothing of ROSE, and cannot be drained or admitted.
    """

    folder: Path
    model_dir: Path
    count: int
    gateways_count: int = 2
    gateway_options: Sequence[str] = ()
    role: EngineRole = EngineRole.DEDICATED
    replicas: list[ChaosReplica] = field(default_factory=list)
    gateways: list[BenchProcess] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    _own: list[ChaosReplica] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        # Engines hang up after 5 s without a request.
        connector = aiohttp.TCPConnector(keepalive_timeout=2.0)
        timeout = aiohttp.ClientTimeout(total=30)
        self.http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            if not self.replicas:
                ports = free_ports(self.count)
                self._own = [self._replica(f"replica-{k}", port) for k, port in enumerate(ports)]
                self.replicas = [*self._own]
            await asyncio.gather(*(replica.start() for replica in self._own))
            for number, port in enumerate(free_ports(self.gateways_count)):
                self.gateways.append(self._gateway(number, port))
                self.urls.append(f"http://127.0.0.1:{port}")
            await asyncio.gather(*(self.start_gateway(k) for k in range(self.gateways_count)))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def start_gateway(self, number: int) -> None:
        """Start a gateway; return once it knows a replica. Raises EngineStartError."""
        gateway = self.gateways[number].start()
        health = f"{self.urls[number]}/health"
        await asyncio.to_thread(gateway.wait_answers, health, 1, GATEWAY_S)

    async def _close(self) -> None:
        for gateway in self.gateways:
            gateway.kill()
        for replica in self._own:
            await replica.stop()
        await self.http.close()

    def _replica(self, name: str, port: int) -> ChaosReplica:
        spec = EngineSpec(
            name=name,
            role=self.role,
            model_dir=self.model_dir,
            port=port,
            log=self.folder / f"{name}.log",
            dtype="float32",
            max_model_len=FLEET_MODEL.max_positions,
            max_num_seqs=SEQUENCES,
            stream_interval=4,
            extra_args=REPLICA_ARGS if self.role.is_replica else STOCK_ARGS,
            extra_env={"CUDA_VISIBLE_DEVICES": ""},
        )
        return ChaosReplica(spec, self.http)

    def _gateway(self, number: int, port: int) -> BenchProcess:
        urls = {replica.spec.name: replica.spec.url for replica in self.replicas}
        options = ("--max-attempts=64", *self.gateway_options)
        argv = gateway_command(port, urls, SEQUENCES, *options)
        return BenchProcess(f"gateway-{number}", argv, self.folder / f"gateway-{number}.log")


@dataclass
class Faults:
    """Faults until `until_s` (monotonic); afterwards everything is up again, or is being started.

    One replica always stays untouched: with none at all turns wait, which proves nothing.
    """

    fleet: ChaosFleet
    seed: int
    mean_pause_s: float = 0.8
    counts: Counter[str] = field(default_factory=Counter)
    _busy: set[str] = field(default_factory=set)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def run(self, until_s: float) -> None:
        """Disturb. Raises the error of a process that could not be started anew."""
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

    async def cancel(self) -> None:
        """Leave what is being started as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, dice: random.Random) -> None:
        kind = dice.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        length_s = dice.uniform(0.2, 3.0)
        if kind == "kill_gateway":
            urls = self.fleet.urls
            number = dice.randrange(len(urls))
            if len(urls) > 1 and not any(url in self._busy for url in urls):
                self._start(kind, urls[number], self._restart_gateway(number))
            return
        free = [r for r in self.fleet.replicas if r.spec.name not in self._busy]
        if len(free) < 2:
            return
        replica = dice.choice(free)
        self._start(kind, replica.spec.name, self._disturb(kind, replica, length_s))

    def _start(self, kind: str, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.counts[kind] += 1
        self._busy.add(name)
        task = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._busy.discard(name))
        self._tasks.append(task)

    async def _disturb(self, kind: str, replica: ChaosReplica, length_s: float) -> None:
        if kind == "revoke":
            await replica.drain()
            await asyncio.sleep(length_s / 4)
            await replica.admit()
        elif kind == "freeze":
            replica.signal(signal.SIGSTOP)
            await asyncio.sleep(length_s)
            replica.signal(signal.SIGCONT)
        else:
            await replica.kill()
            await replica.start()

    async def _restart_gateway(self, number: int) -> None:
        self.fleet.gateways[number].kill()
        await self.fleet.start_gateway(number)


def prompts() -> list[list[int]]:
    return [
        [(7 * k + 5 * p + 3) % FLEET_MODEL.vocabulary for k in range(40 + p)]
        for p in range(PROMPTS)
    ]


async def undisturbed(client: RolloutClient) -> list[Turn]:
    """Return the turns as they have to be: the longest answer to every prompt."""
    whole = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    turns = [client.generate(p, whole, request_id=f"plain-{k}") for k, p in enumerate(prompts())]
    return await asyncio.gather(*turns)


@dataclass
class ChaosFindings:
    """Counts of turns and of their faults; every count but the first three has to be zero."""

    asked: int = 0
    delivered: int = 0
    moved: int = 0
    lost: int = 0
    doubled: int = 0
    wrong_tokens: int = 0
    unstamped: int = 0
    gaps: int = 0
    notes: list[str] = field(default_factory=list)
    _ids: Counter[str] = field(default_factory=Counter)

    def note(self, fault: str) -> None:
        """Keep the first few faults in words."""
        if len(self.notes) < FAULTS_KEPT:
            self.notes.append(fault)

    def add(self, turn: Turn, expected: Turn, tokens: int) -> None:
        """Count one delivered turn and its faults."""
        self.delivered += 1
        self.moved += len(turn.segments) > 1 or turn.attempts > 1
        self._ids[turn.request_id] += 1
        self.doubled += self._ids[turn.request_id] > 1
        if turn.token_ids != expected.token_ids[:tokens] or len(turn.logprobs) != tokens:
            self.wrong_tokens += 1
            pairs = zip(turn.token_ids, expected.token_ids[:tokens], strict=False)
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            at = sum(1 for _ in same)
            self.note(
                f"{turn.request_id}: {len(turn.token_ids)} of {tokens} tokens, the first other one"
                f" at {at}; {turn.segments}"
            )
        self.gaps += not _covers([s[2:] for s in turn.segments], tokens)
        stamped = [(a, b) for version, a, b in turn.versions if version >= 0]
        if not _covers(stamped, tokens):
            self.unstamped += 1
            self.note(f"{turn.request_id}: stamps {turn.versions}")

    @property
    def faults(self) -> int:
        return self.lost + self.doubled + self.wrong_tokens + self.unstamped + self.gaps


def _covers(spans: Sequence[tuple[int, int]], tokens: int) -> bool:
    at = 0
    for start, end in spans:
        if start != at or end <= start:
            return False
        at = end
    return at == tokens


@dataclass
class ChaosTrainer:
    """Trainer that streams half of its turns, and takes the other half whole."""

    client: RolloutClient
    expected: Sequence[Turn]
    seed: int
    findings: ChaosFindings = field(default_factory=ChaosFindings)

    async def run(self, in_flight: int, until_s: float) -> None:
        """Begin turns until `until_s`, then wait for all of them."""
        ids = itertools.count()
        await asyncio.gather(*(self._worker(k, ids, until_s) for k in range(in_flight)))

    async def _worker(self, number: int, ids: "itertools.count[int]", until_s: float) -> None:
        dice = random.Random(self.seed * 1_000 + number)  # noqa: S311 - repeatable
        while time.monotonic() < until_s:
            which, tokens = dice.randrange(PROMPTS), dice.randint(FEWEST_TOKENS, OUTPUT_TOKENS)
            name = f"chaos-{next(ids)}"
            self.findings.asked += 1
            try:
                turn = await self._turn(name, which, tokens, streamed=dice.random() < 0.5)
            except RolloutError as error:
                self.findings.lost += 1
                self.findings.note(f"{name}: {type(error).__name__}: {error}")
                continue
            self.findings.add(turn, self.expected[which], tokens)

    async def _turn(self, name: str, which: int, tokens: int, *, streamed: bool) -> Turn:
        prompt, sampling = prompts()[which], Sampling(temperature=0.0, max_tokens=tokens)
        if not streamed:
            return await self.client.generate(prompt, sampling, request_id=name, session_id=name)
        got: list[int] = []
        async with self.client.stream(prompt, sampling, request_id=name, session_id=name) as stream:
            async for chunk in stream:
                got += chunk.token_ids
        if tuple(got) != stream.turn.token_ids:
            self.findings.doubled += 1
            self.findings.note(f"{name}: the chunks are not the turn")
        return stream.turn


async def chaos(fleet: ChaosFleet, seconds: float, in_flight: int, seed: int) -> dict[str, object]:
    """Disturb a running fleet, with `in_flight` turns all the time; return the findings."""
    async with RolloutClient(fleet.urls, TURN_S, retry=PATIENT) as client:
        expected = await undisturbed(client)
        trainer, faults = ChaosTrainer(client, expected, seed), Faults(fleet, seed)
        until_s = time.monotonic() + seconds
        progressing = asyncio.create_task(_progress(trainer, faults))
        try:
            await asyncio.gather(faults.run(until_s), trainer.run(in_flight, until_s))
        finally:
            progressing.cancel()
            await faults.cancel()
        progress = client.progress()
    found = {name: value for name, value in asdict(trainer.findings).items() if name != "_ids"}
    return {
        "seconds": seconds,
        "in_flight": in_flight,
        "seed": seed,
        "faults_done": dict(faults.counts),
        "client_tries_repeated": progress.repeated_tries,
        "faults_found": trainer.findings.faults,
        **found,
    }


async def _progress(trainer: ChaosTrainer, faults: Faults) -> None:
    while True:
        await asyncio.sleep(10)
        found = trainer.findings
        sys.stderr.write(
            f"chaos: {found.delivered} of {found.asked} turns, {found.moved} moved,"
            f" {found.faults} faults; {dict(faults.counts)}\n"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults, print the findings, keep them."""
    numbers: dict[str, float] = {"seconds": 180.0, "in_flight": 200, "replicas": 3, "seed": 0}
    args = parser_of(__doc__, PROG, OUT, **numbers).parse_args(argv)
    return reported(PROG, lambda: asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    folder = args.out / "chaos"
    folder.mkdir(parents=True, exist_ok=True)
    FLEET_MODEL.save(folder / "model")
    async with ChaosFleet(folder, folder / "model", args.replicas) as fleet:
        found = await chaos(fleet, args.seconds, args.in_flight, args.seed)
    put(found, args.out / "chaos.json", shown=False)
    for name, value in found.items():
        sys.stdout.write(f"{name:>24}  {value}\n")
    return int(bool(found["faults_found"]))


if __name__ == "__main__":
    sys.exit(main())
