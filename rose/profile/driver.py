"""Driver of a profile run: run batches of turns on an engine and return its logged step times.

The engine is started as a node would start a guest of the same sizes. There is neither host nor
node, so `OpenGrant` writes their sections: an idle host and one grant.

freeze ──► turns posted ──► all are seen waiting ──► allow ──► every turn ends ──► new records read

Without the freeze the first turns of a batch would be steps ahead of the last.
"""

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from executor import ControlPage, Grant, GrantMode, GuestState, HostState
from executor.step_log import HEADER, STEP, STEP_LOG, StepRecord, read_step_log, used_bytes
from rose.addresses import free_port
from rose.contract.replica import (
    ADMIT,
    GENERATE,
    STATE,
    EpochBody,
    GenerateBody,
    ReplicaState,
    Sampling,
)
from rose.engines import Device, EngineKind, EngineProcess, EngineRole, EngineSpec, module_path
from rose.errors import BAD_BYTES, EngineStartError
from rose.node.guest.memory_gauges import Gpus, card_environment
from rose.profile.plan import DECODE_STEPS, Batch, LoggedStep, steps_of

TICK_S = 0.02
TTL_NS = 500_000_000


class OpenGrant(threading.Thread):
    """Thread that keeps a grant alive on a control page of its own, with an idle host."""

    def __init__(self, page: ControlPage, token_budget: int, max_sequences: int) -> None:
        super().__init__(name="rose-open-grant", daemon=True)
        self._page = page
        self._host = page.take_host()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._grant = Grant(GrantMode.RUN, token_budget, max_sequences, epoch=1, reason="profile")

    def run(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                self._write()

    def freeze(self) -> None:
        """Freeze the guest at once: no further step begins."""
        with self._lock:
            self._grant = replace(self._grant, mode=GrantMode.FREEZE)
            self._write()

    def allow(self, token_budget: int) -> None:
        """Allow steps of up to `token_budget` tokens at once."""
        with self._lock:
            self._grant = replace(self._grant, mode=GrantMode.RUN, token_budget=token_budget)
            self._write()

    def guest(self) -> GuestState:
        """Return the guest's published state; zeroes before the first."""
        return self._page.guest.peek() or GuestState()

    def stop(self) -> None:
        """End the thread, so that the grant expires, and release the host's seat."""
        self._ended.set()
        self.join()
        self._host.close()

    def _write(self) -> None:
        now_ns = time.monotonic_ns()
        self._host.write(HostState(heartbeat_ns=now_ns))
        self._host.beat(now_ns)
        self._page.grant.write(replace(self._grant, heartbeat_ns=now_ns, expiry_ns=now_ns + TTL_NS))


LOG = "engine.log"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the engine under measurement."""
    parser.add_argument("--port", type=positive, metavar="N", help="default: a free one")
    parser.add_argument("--core", type=int, metavar="N", help="CPU core, as in the node's file")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16")
    parser.add_argument("--device", metavar="GPU", help="its index or UUID; default: the CPU")
    parser.add_argument(
        "--engine-python", type=Path, metavar="FILE", help="interpreter that has its engine"
    )
    parser.add_argument(
        "--engine",
        type=EngineKind,
        choices=list(EngineKind),
        default=EngineKind.VLLM,
        help="vllm (the default) or sglang",
    )
    parser.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="on a GPU"
    )


def spec_of(args: argparse.Namespace, folder: Path, gpus: Gpus) -> EngineSpec:
    """Return the specification of the engine to start; it logs its steps in `folder`.

    Raises CardError if the requested GPU cannot be used.
    """
    on_gpu = args.device is not None
    named = card_environment(gpus.cards([_device(args.device)])) if on_gpu else {}
    return EngineSpec(
        name="profile",
        role=EngineRole.GUEST,
        model_dir=args.model,
        port=args.port or free_port(),
        log=folder / LOG,
        cores=() if args.core is None else (args.core,),
        dtype=args.dtype,
        kv_bytes=args.kv_bytes,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        stream_interval=DECODE_STEPS,
        control_page=folder / "page",
        python=args.engine_python,
        device=Device.CUDA if on_gpu else Device.CPU,
        enforce_eager=not (on_gpu and args.cuda_graphs),
        extra_env={STEP_LOG: str(folder / "steps"), **named, **_paths(args, folder)},
        # Turns are token ids; a cached prefix would make a prefill shorter than stated.
        extra_args=("--skip-tokenizer-init", _UNCACHED[args.engine]),
        engine=args.engine,
    )


_UNCACHED: Final = {
    EngineKind.VLLM: "--no-enable-prefix-caching",
    EngineKind.SGLANG: "--disable-radix-cache",
}


def _paths(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the environment variables with which another interpreter finds ROSE, or {}."""
    if args.engine is EngineKind.VLLM or args.engine_python is None:
        return {}
    return {"PYTHONPATH": module_path(folder / "metadata")}


def positive(text: str) -> int:
    """Return the positive integer in `text`. Raises ArgumentTypeError if it is not positive."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _device(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


# The first run of a batch pays for kernels and pages that no later one pays for.
RUNS, UNCOUNTED_RUNS = 3, 1
WAITING_S = 20.0
POLL_S = 0.005
ENDS_S = 5.0


class UnfinishedTurnError(Exception):
    """Error: a turn did not finish; the message is the last line of its stream."""


class ProfileDriver:
    """Driver of one engine under measurement; raises EngineStartError if the engine fails."""

    def __init__(
        self,
        engine: EngineProcess,
        grant: OpenGrant,
        http: aiohttp.ClientSession,
        logs: Path,
        vocabulary: int,
    ) -> None:
        """Bind the driver to a started engine.

        logs: the folder that ROSE_STEP_LOG named. vocabulary: number of token ids for random
        prompts.
        """
        self._engine = engine
        self._grant = grant
        self._http = http
        self._logs = logs
        self._vocabulary = vocabulary
        self._rng = random.Random(0)  # noqa: S311 -- prompts, not secrets
        self._names = count()
        self._read = 0

    async def admit(self) -> int:
        """Open the replica for turns; return the number of tokens that its KV cache holds."""
        url, headers = self._engine.spec.url, self._engine.headers
        try:
            body = msgspec.json.encode(EpochBody(1))
            async with self._http.post(url + ADMIT, data=body, headers=headers) as answer:
                answer.raise_for_status()
            async with self._http.get(url + STATE) as answer:
                state = msgspec.json.decode(await answer.read(), type=ReplicaState)
                return state.kv_tokens
        except (aiohttp.ClientError, TimeoutError, *BAD_BYTES) as error:
            raise await self._failed(error) from error

    async def runs(self, batch: Batch) -> list[list[LoggedStep]]:
        """Run a batch UNCOUNTED_RUNS + RUNS times; return the logged steps of each counted run."""
        found = []
        for number in range(UNCOUNTED_RUNS + RUNS):
            steps = steps_of(batch, await self._run(batch))
            if number >= UNCOUNTED_RUNS:
                found.append(steps)
        return found

    async def _run(self, batch: Batch) -> Sequence[StepRecord]:
        self._grant.freeze()
        turns = [asyncio.create_task(self._turn(batch)) for _ in range(batch.sequences)]
        try:
            await self._until_waiting(batch.sequences, turns)
            self._grant.allow(batch.token_budget)
            await asyncio.gather(*turns)
        except (aiohttp.ClientError, TimeoutError, UnfinishedTurnError) as error:
            raise await self._failed(error) from error
        finally:
            for turn in turns:
                turn.cancel()
        return self._new_records()

    async def _until_waiting(self, sequences: int, turns: Sequence["asyncio.Task[None]"]) -> None:
        async with asyncio.timeout(WAITING_S):
            while self._grant.guest().waiting < sequences:
                for turn in turns:
                    if turn.done():
                        turn.result()
                await asyncio.sleep(POLL_S)

    async def _turn(self, batch: Batch) -> None:
        tokens = [self._rng.randrange(self._vocabulary) for _ in range(batch.prompt_tokens)]
        name, sampling = f"profile-{next(self._names)}", Sampling(max_tokens=DECODE_STEPS)
        body = msgspec.json.encode(GenerateBody(name, tokens, sampling))
        async with self._http.post(self._engine.spec.url + GENERATE, data=body) as answer:
            lines = (await answer.read()).splitlines()
            if answer.status != 200 or not lines or b'"length"' not in lines[-1]:
                said = lines[-1].decode(errors="replace") if lines else f"HTTP {answer.status}"
                raise UnfinishedTurnError(said)

    def _new_records(self) -> list[StepRecord]:
        path = next(self._logs.glob("steps-guest-*.bin"), None)
        if path is None:
            raise EngineStartError(f"the engine wrote no step log; see {self._engine.spec.log}")
        with path.open("rb") as file:
            header = file.read(HEADER.size)
            records = read_step_log(header + file.read(used_bytes(header) - HEADER.size))
        fresh, self._read = records[self._read :], len(records)
        return [record for record in fresh if record.kind == STEP]

    async def _failed(self, error: Exception) -> EngineStartError:
        spec = self._engine.spec
        # Its last turns break off a moment before it ends.
        await asyncio.wait((asyncio.ensure_future(self._engine.process.wait()),), timeout=ENDS_S)
        if self._engine.process.returncode is None:
            return EngineStartError(f"the engine does not do its turns: {error!r}; see {spec.log}")
        return EngineStartError(
            f"the engine ended while it was profiled: {self._engine.last_words()}; see {spec.log}"
        )
