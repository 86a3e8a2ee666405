"""KillBench: a real host under load, a real scheduler and node daemon with a real guest at work."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
from tiny_model import VOCABULARY, save_tiny_model

from executor import ControlPage, GuestState
from rose.addresses import free_ports
from rose.engines import EngineRole, EngineSpec, process_spec
from rose.node.guest.guest_record import running_guests
from rose.process.child import group_alive
from rose.rpc import rose_pb2 as pb
from rose.rpc.rose_pb2_grpc import SchedulerStub
from tests.harness.waiting import until

START_S = 240.0
NODE, GUEST = "serving-0", "guest"


@dataclass
class HostLoad:
    """Users of the host: two streams of requests. Every answer is kept.

    A user thinks for longer than an answer took: whatever machine this is, its host has idle time,
    without which no guest works.
    """

    port: int
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._run, args=(k,)) for k in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, stream: int) -> None:
        n = 0
        while not self._ended.is_set():
            n += 1
            began_s = time.monotonic()
            try:
                self._ask([(5 * k + n + stream) % VOCABULARY for k in range(60)])
                self.latencies_s.append(time.monotonic() - began_s)
            except (OSError, AssertionError, ValueError) as error:
                self.failures.append(repr(error))
            self._ended.wait(max(0.05, 1.5 * (time.monotonic() - began_s)))

    def _ask(self, prompt: list[int]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = {"model": "host", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        extra = {"detokenize": False, "return_token_ids": True}
        connection.request("POST", "/v1/completions", json.dumps(body | extra), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        assert len(answer["choices"][0]["token_ids"]) == 24, answer


@dataclass
class GuestLoad:
    """Rollouts: turn after turn, whatever becomes of each."""

    port: int
    tokens: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._run, args=(k,)) for k in range(4)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, stream: int) -> None:
        n = 0
        while not self._ended.is_set():
            n += 1
            with suppress(OSError, ValueError, http.client.HTTPException):
                self._turn(f"turn-{stream}-{n}", stream + n)
            self._ended.wait(0.05)

    def _turn(self, name: str, shift: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3)
        sampling = {"temperature": 0.0, "max_tokens": 400, "min_tokens": 400}
        tokens = [(7 * k + shift) % VOCABULARY for k in range(50)]
        body = {"request_id": name, "token_ids": tokens, "sampling": sampling}
        try:
            connection.request("POST", "/rose/v1/generate", json.dumps(body))
            for line in connection.getresponse():
                self.tokens += len(json.loads(line).get("token_ids", []))
        finally:
            connection.close()


class KillBench:
    """Everything but who dies."""

    def __init__(
        self,
        folder: Path,
        orphan_s: float,
        host: dict[str, Any] | None = None,
        guest: dict[str, Any] | None = None,
    ) -> None:
        """`host`, `guest`: fields of EngineSpec and of the node's file that differ."""
        self.folder = folder
        self._host_fields, self._guest_fields = host or {}, guest or {}
        self.run_dir = folder / "run"
        save_tiny_model(folder / "model", dtype="bfloat16")
        self.page = ControlPage.create(folder / "page")
        self.scheduler_port, self.host_port, self.guest_port = free_ports(3)
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.host = self._start_host()
        self.scheduler = self._start_scheduler()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.scheduler_port}")
        self.stub = SchedulerStub(self._channel)
        (folder / "node.json").write_text(json.dumps(self._node(orphan_s)))
        self.host_load = HostLoad(self.host_port)
        self.guest_load = GuestLoad(self.guest_port)

    def start(self) -> None:
        self.spawn()
        until(self._host_answers, START_S, "the host serves")
        self.stub.RegisterJob(
            pb.RegisterJobRequest(job="job", max_staleness=1), timeout=30, wait_for_ready=True
        )
        self.host_load.start()
        self.guest_load.start()

    def close(self) -> None:
        self.host_load.stop()
        self.guest_load.stop()
        for daemon in self.daemons:
            with suppress(ProcessLookupError):
                daemon.send_signal(signal.SIGCONT)
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(30)
        for process in (self.scheduler, self.host):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._channel.close()
        self.page.close()

    def spawn(self, *options: str) -> "subprocess.Popen[bytes]":
        """A node daemon."""
        argv = [sys.executable, str(Path(__file__).parents[1] / "short_daemon.py")]
        argv += ["--config", str(self.folder / "node.json"), *options]
        with (self.folder / "daemon.log").open("ab") as log:
            daemon = subprocess.Popen(argv, stderr=log, process_group=0)
        self.daemons.append(daemon)
        return daemon

    def at_work(self) -> int:
        """The guest's process group, once it is leased and makes tokens under the host's load.

        Counted for one process under one lease: what the page and the scheduler's table say of an
        earlier guest stays there until the next one, or the node's next report, replaces it.
        """
        life: int | None = None
        begun = made = 0

        def works() -> bool:
            nonlocal life, begun, made
            record = running_guests(self.run_dir).get(GUEST) if self._leased() else None
            now = record.identity.pid if record else None
            made = self.guest().tokens_total
            if now is None or now != life or made < begun:
                life, begun = now, made
            return life is not None and made > begun + 50

        try:
            # Each look costs a call, and cores are what the guest waits for.
            until(works, START_S, "the guest is leased and makes tokens", every_s=0.1)
        except AssertionError as error:
            error.add_note(f"group {life}, {made - begun} tokens, {self.guest()}")
            error.add_note(self._last_words())
            raise
        assert life is not None
        return life

    def guest(self) -> GuestState:
        return self.page.guest.peek() or GuestState()

    def noted(self, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / f"events-{NODE}.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["event"] == event]

    def granted_epoch(self) -> int:
        """Return the epoch of the newest lease that the scheduler has granted."""
        lines = (self.folder / "logs" / "events-scheduler.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return max(e["epoch"] for e in events if e["event"] == "lease_granted")

    def row(self) -> pb.Replica | None:
        rows = self.stub.Snapshot(pb.SnapshotRequest(), timeout=10).replicas
        return rows[0] if rows else None

    def resident_bytes(self, group: int) -> int:
        """Memory of a process group."""
        total = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == group:
                    total += process.memory_info().rss
        return total

    def engine_core(self, group: int) -> int:
        """The process in which the guest's steps run."""
        children = psutil.Process(group).children(recursive=True)
        return next(child.pid for child in children if "EngineCore" in child.name())

    def last_step_after(self, moment_ns: int, watch_s: float) -> float:
        """Seconds from a moment until the guest's last step ended, watched for so long."""
        last_seq, last_ns = self.guest().step_seq, moment_ns
        until_s = time.monotonic() + watch_s
        while time.monotonic() < until_s:
            state = self.guest()
            if state.step_seq != last_seq or state.in_step:
                last_seq, last_ns = state.step_seq, time.monotonic_ns()
            time.sleep(0.001)
        return (last_ns - moment_ns) / 1e9

    def gone(self, group: int, within_s: float) -> float:
        return until(lambda: not group_alive(group), within_s, "the guest is gone")

    def _last_words(self) -> str:
        """Return the logs of a failed run."""
        logs = sorted((self.folder / "logs").glob("events-*.jsonl"))
        ends = [(log.name, log.read_text().splitlines()[-12:]) for log in logs]
        worst_s = max(self.host_load.latencies_s, default=0.0)
        host = f"host: {len(self.host_load.latencies_s)} answers, worst {worst_s:.2f} s"
        return "\n".join([host, *(line for name, end in ends for line in (name, *end))])

    def _leased(self) -> bool:
        with suppress(grpc.RpcError):
            row = self.row()
            return bool(row and row.leased and row.healthy)
        return False

    def _host_answers(self) -> bool:
        assert self.host.poll() is None, (self.folder / "host.log").read_text()[-4000:]
        connection = http.client.HTTPConnection("127.0.0.1", self.host_port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            time.sleep(0.2)
            return False
        finally:
            connection.close()

    def _start_host(self) -> "subprocess.Popen[bytes]":
        plain = EngineSpec(
            name="host",
            role=EngineRole.HOST,
            model_dir=self.folder / "model",
            port=self.host_port,
            log=self.folder / "host.log",
            control_page=self.page.path,
            extra_args=("--skip-tokenizer-init",),
        )
        spec = process_spec(replace(plain, **self._host_fields))
        with (self.folder / "host.log").open("wb") as log:
            return subprocess.Popen(
                spec.argv, env={**os.environ, **spec.env}, stdout=log, stderr=log, process_group=0
            )

    def _start_scheduler(self) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", "rose.main.scheduler", f"--port={self.scheduler_port}"]
        argv += [f"--store={self.folder / 'store'}", f"--log-dir={self.folder / 'logs'}"]
        argv += ["--harvest=ACTIVE", "--cooldown-s=0.2"]
        with (self.folder / "scheduler.log").open("wb") as log:
            return subprocess.Popen(argv, stdout=log, stderr=log, process_group=0)

    def _node(self, orphan_s: float) -> dict[str, object]:
        guest = {
            "id": GUEST,
            "kind": "guest",
            "model_dir": str(self.folder / "model"),
            "port": self.guest_port,
            "slack_share": 1.0,
            "orphan_s": orphan_s,
            "stream_interval": 4,
        } | self._guest_fields
        return {
            "node": NODE,
            "scheduler": f"127.0.0.1:{self.scheduler_port}",
            "run_dir": str(self.run_dir),
            "log_dir": str(self.folder / "logs"),
            "unsigned": True,
            "host": {"page": str(self.page.path), "pid": self.host.pid},
            "replicas": [guest],
        }
