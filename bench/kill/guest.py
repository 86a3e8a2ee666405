"""`python -m bench.kill.guest --config FILE`: a node whose guests' engines are stand-ins.

`python -m bench.kill.guest PORT BYTES` is such an engine, which the node starts in place of vLLM.
The engine holds memory and burns a core, and computes nothing. Two processes, as vLLM's: one
answers the node, and the core steps where the gate of a real guest lets it.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

from executor import ControlPage
from executor.guest.gate_client import EngineLoad, GateClient, KvMapped
from executor.step_decision import Run
from rose.contract.replica import ADMIT
from rose.engines import EngineSpec, launch, process_spec
from rose.engines.launch import SECRET
from rose.main import node
from rose.process.child import ProcessSpec

STEP_S = 0.004
IDLE_S = 0.005
TURNS = 4
GRANULES = 16


class Core:
    """The engine core: `admitting` is a byte that both processes see."""

    def __init__(self, admitting: mmap.mmap, size: int) -> None:
        self._admitting = admitting
        self._held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, size, mmap.PAGESIZE):
            self._held[page] = 1
        granules = KvMapped(size, GRANULES, GRANULES, size // GRANULES)
        self._gate = GateClient(ControlPage.open(os.environ["ROSE_CONTROL_PAGE"]), granules)

    def run(self) -> NoReturn:
        # The node looks for it by this name, which is vLLM's.
        Path("/proc/self/comm").write_text("VLLM::EngineCore")
        while True:
            load = EngineLoad(TURNS if self._admitting[0] else 0, 0, 0)
            if not load.running:
                self._gate.idle(load)
                time.sleep(IDLE_S)
            elif isinstance(self._gate.ask(load), Run):
                self._gate.scheduled(load, TURNS)
                until_s = time.monotonic() + STEP_S
                while time.monotonic() < until_s:
                    continue
                self._gate.stepped(load, TURNS, TURNS, TURNS)


class Handler(BaseHTTPRequestHandler):
    """Answers of a replica to its node; `admitting` and `epoch` are those of the process."""

    admitting = mmap.mmap(-1, 1)
    epoch = 0

    def do_GET(self) -> None:
        """Answer with its state, whatever is asked."""
        state = {"policy_version": 0, "proven": True, "epoch": Handler.epoch, "warm": True}
        turns = TURNS if self.admitting[0] else 0
        counts = {"running": turns, "waiting": 0, "tokens_total": 0}
        self._answer(200, state | counts | {"admitting": bool(self.admitting[0])})

    def do_POST(self) -> None:
        """Admit or drain."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ[SECRET]}":
            self._answer(401, {"error": {"type": "no_secret", "message": "not its node"}})
            return
        running = TURNS if self.admitting[0] else 0
        Handler.epoch, self.admitting[0] = body["epoch"], self.path == ADMIT
        self._answer(200, {"aborted": running})

    def log_message(self, *_: object) -> None:
        """Log nothing: a trial's log is the node's."""

    def _answer(self, status: int, body: Mapping[str, object]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def serve(port: int, size: int) -> None:
    """Run an engine."""
    if os.fork() == 0:
        Core(Handler.admitting, size).run()
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def standin_spec(spec: EngineSpec) -> ProcessSpec:
    """Return the same process with another program; its place and its end stay as they are."""
    program = (sys.executable, "-m", "bench.kill.guest", str(spec.port), str(spec.kv_bytes))
    return replace(process_spec(spec), argv=program)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        serve(int(sys.argv[1]), int(sys.argv[2]))
    launch.process_spec = standin_spec
    sys.exit(node.main())
