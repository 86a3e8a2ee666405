"""`python -m bench.kill`: time in which the kill switch gives everything back, trial by trial.

    a trial  the guest is leased and steps -> (the scheduler is killed) -> the switch is pressed,
             and again -> nothing of the guest is left -> its node proves the stop -> pressed a
             third time, nothing starts -> all is restored

So many --trials with the control plane, then as many without it. Writes kill.json and kill.txt.
Exit code 0, 1 when a trial missed the deadline or pressing the switch again changed something, 2
for bad input or a bench that does not work.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.common.checks import text_table
from bench.common.processes import BenchProcess, ProcessFleet, scheduler_command
from bench.common.report import OUT, machine, parser_of, put_both, reported, say
from elastic_scheduler.capacity import parse_policy
from executor import ControlPage, GuestState, HostState
from executor.control_page.page import PAGE_FOLDER
from rose.addresses import free_ports
from rose.errors import ConfigError, RoseError, UnavailableError
from rose.node.guest.guest_record import running_guests
from rose.operate.client import PolicyClient
from rose.process.child import group_alive
from rose.process.procfs import group_bytes, group_cpu_s
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_blocking_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from slo import percentile

PROG = "bench.kill"
# Limit of each trial, and memory that its guest holds.
DEADLINE_S, GUEST_BYTES = 5.0, 256 << 20
NODE, GUEST = "serving-0", "guest"
START_S = 60.0
POLL_S = 0.005
# A guest is at work once this many steps of its life were seen.
STEPS = 20
DUTY_WINDOW_S = 0.1
# After the third press: longer than a daemon needs to notice that a guest may start.
QUIET_S = 0.5
# The moment of the press within ticks and polls is anybody's.
MOST_DELAY_S = 0.5


class TrialError(RoseError):
    """The bench itself does not work; no trial says anything about the switch."""


class SwitchWay(StrEnum):
    """Ways to press the kill switch."""

    STORE = "store key"
    FILE = "dropped file"
    SIGNAL = "signal"


UP, DOWN = (SwitchWay.STORE, SwitchWay.FILE, SwitchWay.SIGNAL), (SwitchWay.FILE, SwitchWay.SIGNAL)


class Trial(msgspec.Struct, frozen=True):
    """One press; seconds from before it. again: the change by a further press, "" for none.

    duty_before: share of a core that the guest used just before. It is behind everybody else, and
    on a busy machine that may be little.
    """

    plane: str
    way: str
    held_bytes: int
    duty_before: float
    gone_s: float
    proved_s: float
    proved_bytes: int
    proved_duty: float
    deadline_s: float
    again: str = ""

    @property
    def in_time(self) -> bool:
        """True if all of it was given back, and measured so, by the deadline."""
        measured = self.proved_bytes == 0 and self.proved_duty == 0
        return measured and max(self.gone_s, self.proved_s) <= self.deadline_s


def rows_of(trials: list[Trial]) -> list[dict[str, Any]]:
    """Return a row for each plane and way, then one of all."""
    kinds = dict.fromkeys((each.plane, each.way) for each in trials)
    rows = [
        _row(plane, way, [t for t in trials if (t.plane, t.way) == (plane, way)])
        for plane, way in kinds
    ]
    return [*rows, _row("all", "all", trials)]


def _row(plane: str, way: str, trials: list[Trial]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "plane": plane,
        "way": way,
        "trials": len(trials),
        "in_time": sum(t.in_time for t in trials),
    }
    for kind in ("gone", "proved"):
        seconds = [getattr(t, f"{kind}_s") for t in trials]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0)):
            row[f"{kind}_{name}_s"] = round(percentile(seconds, share), 3)
    return row | {
        "held_bytes_least": min(t.held_bytes for t in trials),
        "duty_before_p50": round(percentile([t.duty_before for t in trials], 0.5), 3),
        "changed_again": sum(bool(t.again) for t in trials),
    }


@dataclass
class NodeEvents:
    """A node's event log, read as it grows."""

    path: Path
    _read: int = 0

    def __post_init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def of(self, *names: str) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read += len(whole) + 1
                self.seen += [json.loads(line) for line in whole.splitlines()]
        return [each for each in self.seen if each["event"] in names]


class KillBench(ProcessFleet):
    """A scheduler, a node and its guest, for trials. Context manager."""

    def __init__(self, folder: Path, deadline_s: float, guest_bytes: int, seed: int = 0) -> None:
        super().__init__(folder)
        self._deadline_s = deadline_s
        self._random = random.Random(seed)  # noqa: S311 - moments, not secrets
        self._run_dir = folder / "run"
        self._port, guest_port = free_ports(2)
        self._address = f"127.0.0.1:{self._port}"
        self._client = PolicyClient(self._address)
        self._page = ControlPage.create(folder / "page")
        self._seat = self._page.take_host()
        self._seat.write(HostState(heartbeat_ns=time.monotonic_ns()))
        self._seat.start()
        self._events = NodeEvents(folder / "logs" / f"events-{NODE}.jsonl")
        # This policy leases all offers: one that learns from revocations would stop to lease a
        # guest that is killed every few seconds.
        options = ("--cooldown-s=0", "--policy=spot")
        argv = scheduler_command(self._port, folder, *options)
        log = folder / "scheduler.log"
        self._scheduler = self.add(BenchProcess("scheduler", argv, log).start())
        config = self._node_config(guest_port, guest_bytes)
        self._node = self.launch("node", "bench.kill.guest", f"--config={config}")
        self._group = 0

    def start(self) -> None:
        """Register a job and put the policy in force."""
        self._until(self._registers, START_S, "the scheduler answers")
        policy = {"name": "kill-trials", "mode": "Active"}
        deadline = {"reclaimDeadline": f"{round(self._deadline_s * 1e3)}ms"}
        self._client.apply(parse_policy(json.dumps(policy | deadline)))

    def close(self) -> None:
        super().close()
        for guest in running_guests(self._run_dir).values():
            with suppress(ProcessLookupError):
                os.killpg(guest.identity.pid, signal.SIGKILL)
        self._seat.close()
        self._page.close()

    def trial(self, way: SwitchWay, *, plane_up: bool) -> Trial:
        """Press once, then restore everything. Raises TrialError where the bench is broken."""
        group = self._at_work()
        held, duty = group_bytes(group) or 0, self._duty(group)
        time.sleep(self._random.uniform(0, MOST_DELAY_S))
        if not plane_up:
            self._scheduler.kill()
        if not group_alive(group):
            raise TrialError(f"the guest ended by itself; see {self._events.path}")
        proofs, starts = len(self._proofs()), len(self._events.of("engine_started"))
        pressed_s = time.monotonic()
        self._press(way)
        again = self._pressed_again(way)
        self._until(
            lambda: not group_alive(group) and group_bytes(group) == 0, START_S, "the guest is gone"
        )
        gone_s = time.monotonic() - pressed_s
        self._until(lambda: len(self._proofs()) > proofs, START_S, "the stop is proved")
        proof = self._proofs()[proofs]
        again = again or self._pressed_again(way)
        time.sleep(QUIET_S)
        if running_guests(self._run_dir) or len(self._events.of("engine_started")) > starts:
            again = again or "a guest started"
        if not plane_up:
            self._scheduler.start()
            self._until(self._registers, START_S, "the scheduler is back")
        self._release(way)
        return Trial(
            plane="up" if plane_up else "down",
            way=way.value,
            held_bytes=held,
            duty_before=duty,
            gone_s=gone_s,
            proved_s=float(proof["t_s"]) - pressed_s,
            proved_bytes=int(proof["held_bytes"]),
            proved_duty=float(proof["duty"]),
            deadline_s=self._deadline_s,
            again=again,
        )

    # ---- the switch ----

    def _press(self, way: SwitchWay) -> int:
        """Press it; return the leases that it released, where that is known."""
        match way:
            case SwitchWay.STORE:
                return self._client.stop(pb.HARVEST_MODE_OFF)
            case SwitchWay.FILE:
                (self._run_dir / "KILL").touch()
            case SwitchWay.SIGNAL:
                self._node.send(signal.SIGUSR1)
        return 0

    def _pressed_again(self, way: SwitchWay) -> str:
        """Press it once more; return what that changed."""
        released = self._press(way)
        return f"released {released} leases again" if released else ""

    def _release(self, way: SwitchWay) -> None:
        if way is SwitchWay.STORE:
            self._client.stop(pb.HARVEST_MODE_ACTIVE)
        else:
            (self._run_dir / "KILL").unlink()

    def _proofs(self) -> list[dict[str, Any]]:
        return self._events.of("stop_proved")

    # ---- the guest ----

    def _at_work(self) -> int:
        """Return the process group of a new guest, once it steps under a lease."""
        life: tuple[int, int] | None = None

        def works() -> bool:
            nonlocal life
            record = running_guests(self._run_dir).get(GUEST)
            now = record.identity.pid if record else 0
            steps = (self._page.guest.peek() or GuestState()).step_seq
            if not now or now == self._group:
                return False
            # The page shows the steps of an earlier life until this one writes.
            if life is None or life[0] != now or steps < life[1]:
                life = now, steps
            return steps >= life[1] + STEPS

        self._until(works, START_S, "the guest is leased and works")
        assert life is not None
        self._group = life[0]
        return self._group

    def _duty(self, group: int) -> float:
        began_s, began = time.monotonic(), group_cpu_s(group)
        time.sleep(DUTY_WINDOW_S)
        return (group_cpu_s(group) - began) / (time.monotonic() - began_s)

    def _until(self, holds: Callable[[], bool], within_s: float, what: str) -> None:
        """Return once it holds. Raises TrialError; the control plane may be down meanwhile."""
        deadline_s = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline_s:
                raise TrialError(f"not within {within_s:g} s: {what}; logs are in {self.folder}")
            time.sleep(POLL_S)

    # ---- processes ----

    def _registers(self) -> bool:
        """Return True if a leader takes the job: again is as good as once."""
        with make_blocking_channel(self._address) as channel, suppress(Exception):
            job = pb.RegisterJobRequest(job="job", max_staleness=1)
            SchedulerStub(channel).RegisterJob(job, timeout=1)
            return True
        return False

    def _node_config(self, guest_port: int, guest_bytes: int) -> Path:
        model = self.folder / "model"
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model / name).write_text("{}")
        guest = {"id": GUEST, "kind": "guest", "model_dir": str(model), "port": guest_port}
        config = {
            "node": NODE,
            "scheduler": self._address,
            "run_dir": str(self._run_dir),
            "log_dir": str(self.folder / "logs"),
            "unsigned": True,
            "host": {"page": str(self._page.path), "pid": os.getpid()},
            "replicas": [guest | {"kv_bytes": guest_bytes, "reclaim_s": self._deadline_s}],
        }
        path = self.folder / "node.json"
        path.write_text(json.dumps(config))
        return path


def trials(folder: Path, each: int, deadline_s: float, guest_bytes: int) -> Iterator[Trial]:
    """Yield `each` trials with the control plane up, then as many without it; ways by turns."""
    with KillBench(folder, deadline_s, guest_bytes) as bench:
        bench.start()
        for plane_up, ways in ((True, UP), (False, DOWN)):
            for number in range(each):
                try:
                    yield bench.trial(ways[number % len(ways)], plane_up=plane_up)
                except UnavailableError as error:
                    raise TrialError(f"{error}; logs are in {folder}") from error


progress = partial(say, "kill")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, print the table, keep it."""
    args = parser_of(__doc__, PROG, OUT, trials=100).parse_args(argv)
    # Started processes are ended by any end of this one.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return reported(PROG, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.trials < 1:
        raise ConfigError("--trials: at least 1")
    folder = Path(tempfile.mkdtemp(prefix="rose-kill-", dir=PAGE_FOLDER))
    done: list[Trial] = []
    for trial in trials(folder, args.trials, DEADLINE_S, GUEST_BYTES):
        done.append(trial)
        progress(f"{len(done)}/{2 * args.trials}: {_line(trial)}")
    shutil.rmtree(folder)
    rows = rows_of(done)
    settings = {
        "trials_each": args.trials,
        "deadline_s": DEADLINE_S,
        "guest_bytes": GUEST_BYTES,
        "engine": "a stand-in that holds memory and burns a core",
        "niceness": os.nice(0),
    }
    result = {"settings": settings, "machine": machine(), "rows": rows, "trials": done}
    put_both(args.out, "kill", result, table(rows))
    total = rows[-1]
    return int(total["in_time"] < total["trials"] or total["changed_again"] > 0)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out percentiles of each kind in seconds, and the trials within the deadline."""
    head = (
        *("control plane", "switch", "trials", "gone p50", "p99", "worst"),
        *("proved p50", "p99", "worst", "in time", "changed by a second press"),
    )
    lines = [
        (
            row["plane"],
            row["way"],
            str(row["trials"]),
            *(f"{value:.2f} s" for name, value in row.items() if name.endswith("_s")),
            f"{row['in_time']}/{row['trials']}",
            str(row["changed_again"]),
        )
        for row in rows
    ]
    total = rows[-1]
    held = (
        f"Each guest was leased, stepped, and held {total['held_bytes_least'] >> 20} MiB or more;"
        f" in the median it used {total['duty_before_p50']:.0%} of a core.\n"
        "gone: no process and no byte of it is left, as the kernel says;"
        " proved: its node measured 0 bytes and duty 0.\n"
    )
    return text_table(f"Kill switch, reclaimDeadline {DEADLINE_S:g} s", head, lines) + held


def _line(trial: Trial) -> str:
    again = f", pressed again: {trial.again}" if trial.again else ""
    late = "" if trial.in_time else " LATE"
    return (
        f"{trial.plane}, {trial.way}: gone after {trial.gone_s:.2f} s, proved after"
        f" {trial.proved_s:.2f} s{late}{again}"
    )


if __name__ == "__main__":
    sys.exit(main())
