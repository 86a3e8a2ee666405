"""`python -m bench.trainers.turns_measure`: a trainer's request of turns, ROSE beside stock.

    request 0:  to the gateway, to one that asks replicas turn by turn, to the stock vLLM
    request 1:  in another order, …

One `/v1/completions` with a group for each of some prompts, as TRL's server mode sends it, answered
whole. Both gateways lead to the same replica; the engines have the same settings, and one idles
while the other one is asked. Beside the time of a request stands the processor time that each
process spent on it. Writes turns.json and turns.txt. Exit code 0, 1 when the ratio is above its
limit, 2 for a bench that does not work.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.common.checks import text_table
from bench.common.report import machine, put_both, reported
from bench.trainers.engines import (
    PairedEngines,
    measuring_parser,
    ratio_of_medians,
    ratio_text,
    windows_of,
)
from bench.trainers.policy import save_policy
from rose.addresses import free_port
from rose.client.blocking import LoopThread
from rose.contract.gateway import JOB_HEADER
from rose.errors import EngineStartError

PROG = "bench.trainers.turns_measure"
MOST_RATIO = 1.1
PROMPTS, GROUP, TOKENS, PROMPT_TOKENS = 4, 8, 16, 8
# The first requests warm caches up; a window of requests is one unit of chance.
WARM, WINDOW = 10, 10
ROSE, SINGLE, STOCK = "ROSE", "turn by turn", "stock vLLM"
ARMS = (ROSE, SINGLE, STOCK)


@dataclass
class TurnsArm:
    """One address that requests go to, and the processes behind it."""

    name: str
    url: str
    headers: dict[str, str]
    model: str
    processes: dict[str, psutil.Process]
    times_s: list[float] = field(default_factory=list)
    spent_s: dict[str, float] = field(default_factory=dict)

    def ask(self, body: dict[str, Any]) -> float:
        """Return the seconds of a whole answer. EngineStartError where it is not all turns."""
        asked = json.dumps({**body, "model": self.model}).encode()
        before_s = {name: _cpu_s(process) for name, process in self.processes.items()}
        began_s = time.perf_counter()
        self._connection.request("POST", "/v1/completions", asked, self.headers)
        answer = self._connection.getresponse()
        text = answer.read()
        took_s = time.perf_counter() - began_s
        choices = json.loads(text).get("choices", []) if answer.status == 200 else []
        if [len(each["token_ids"]) for each in choices] != [body["max_tokens"]] * PROMPTS * GROUP:
            raise EngineStartError(f"{self.name} answers {answer.status}: {text[:300]!r}")
        for name, process in self.processes.items():
            spent_s = _cpu_s(process) - before_s[name]
            self.spent_s[name] = self.spent_s.get(name, 0.0) + spent_s
        return took_s

    def open(self) -> None:
        """Connect; the connection is kept, as trainers keep theirs."""
        self._connection = HTTPConnection(urlsplit(self.url).netloc, timeout=60.0)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _server_of(port: int) -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        line = process.cmdline()
        if f"--port={port}" in line and any("api_server" in each for each in line):
            return process
    raise EngineStartError(f"no engine's server has port {port}")


def _with_core(server: psutil.Process) -> dict[str, psutil.Process]:
    cores = [child for child in server.children(recursive=True) if "EngineCor" in child.name()]
    return {"server": server, "core": cores[0]} if cores else {"server": server}


def arms_of(engines: PairedEngines, single_port: int) -> list[TurnsArm]:
    stack = engines.stack
    headers = {"Content-Type": "application/json"}
    job = {**headers, JOB_HEADER: stack.job}
    replica = _with_core(_server_of(stack.engine_ports[0]))
    gateways = {
        ROSE: (stack.gateway, psutil.Process(stack.members["gateway"].pid)),
        SINGLE: (f"http://127.0.0.1:{single_port}", psutil.Process(stack.members[SINGLE].pid)),
    }
    arms = [
        TurnsArm(name, url, job, str(stack.model), {"gateway": process, **replica})
        for name, (url, process) in gateways.items()
    ]
    stock = _with_core(_server_of(engines.spec.port))
    arms.append(TurnsArm(STOCK, engines.spec.url, headers, engines.spec.name, stock))
    for arm in arms:
        arm.open()
    return arms


def measure(arms: Sequence[TurnsArm], requests: int, tokens: int) -> None:
    """Ask all of them, in turn, each request in another order."""
    for number in range(WARM + requests):
        prompts = [
            [2 + (7 * number + 3 * prompt + place) % 200 for place in range(PROMPT_TOKENS)]
            for prompt in range(PROMPTS)
        ]
        body = {
            "prompt": prompts,
            "n": GROUP,
            "max_tokens": tokens,
            "temperature": 1.0,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if number == WARM:
            for arm in arms:
                arm.spent_s.clear()
        for at in range(len(arms)):
            arm = arms[(number + at) % len(arms)]
            took_s = arm.ask(body)
            if number >= WARM:
                arm.times_s.append(took_s)


def summary(arms: Sequence[TurnsArm]) -> dict[str, Any]:
    """Return times of a request and processor time spent on it, beside the stock engine's."""
    stock = arms[-1].times_s
    found: dict[str, Any] = {"arms": {}, "requests": len(stock)}
    for arm in arms:
        found["arms"][arm.name] = {
            "request_s": median(arm.times_s),
            "ratio": ratio_of_medians(windows_of(arm.times_s, stock, WINDOW)),
            "spent_s": {name: each / len(arm.times_s) for name, each in arm.spent_s.items()},
        }
    found["holds"] = found["arms"][ROSE]["ratio"].value <= MOST_RATIO
    return found


def table(found: dict[str, Any]) -> str:
    rows = []
    for name, each in found["arms"].items():
        spent = [
            f"{each['spent_s'][part] * 1e3:.1f}" if part in each["spent_s"] else "-"
            for part in ("gateway", "server", "core")
        ]
        ratio = "1" if name == STOCK else ratio_text(each["ratio"])
        rows.append((name, f"{each['request_s'] * 1e3:.1f}", ratio, *spent))
    head = ("way", "request, ms", "of stock's", "gateway CPU, ms", "server CPU, ms", "core CPU, ms")
    return text_table(f"{PROMPTS * GROUP} turns a request", head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = measuring_parser(__doc__, PROG, requests=200, tokens=TOKENS).parse_args(argv)
    return reported("turns", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    loop = LoopThread("rose-bench")
    folder = Path(tempfile.mkdtemp(prefix="rose-turns-"))
    try:
        model = save_policy(folder / "model")
        engines = PairedEngines(folder, model, loop, unpacked=args.unpacked)
        single_port = free_port()
        engines.stack.add_gateway(SINGLE, single_port, "--turns-per-request=1")
        with engines:
            engines.stack.wait_ready(gateway=f"http://127.0.0.1:{single_port}")
            arms = arms_of(engines, single_port)
            measure(arms, args.requests, args.tokens)
    except OSError as error:
        raise EngineStartError(str(error)) from error
    finally:
        loop.stop()
    found = summary(arms)
    times_s = {arm.name: arm.times_s for arm in arms}
    result = {"summary": found, "unpacked": args.unpacked, "machine": machine()}
    put_both(args.out, "turns", {**result, "times_s": times_s}, table(found))
    return int(not found["holds"])


if __name__ == "__main__":
    sys.exit(main())
