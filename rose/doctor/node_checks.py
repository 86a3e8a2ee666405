"""The node's side: daemon, scheduler, guests, kill switch, placement, ports, disk."""

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rose import placement
from rose.cli.client import SchedulerClient
from rose.doctor.finding import Finding, checked, note, ok, wrong
from rose.engines.preflight import (
    MIN_FREE_BYTES_PER_ENGINE,
    check_memory,
    check_model,
    engine_bytes,
)
from rose.errors import RoseError
from rose.filelock import holder_of
from rose.node.claim import tenures
from rose.node.config import NodeConfig
from rose.node.engine_config import ReplicaConfig
from rose.node.gpu import Gpus
from rose.node.placed import CgroupRefusedError, guest_cgroup

MIN_FREE_DISK_BYTES = 1 << 30
SCHEDULER_TIMEOUT_S = 2.0
ATTEMPT_TIMEOUT_S = 10.0
_LOOK = "import os;print(int(os.sched_getscheduler(0)==os.SCHED_IDLE), os.getpriority(0,0))"


def daemon_of(config: NodeConfig) -> int | None:
    """The process that runs this node."""
    return holder_of(config.run_dir / "daemon.lock")


def node_checks(config: NodeConfig, gpus: Gpus) -> Iterator[Finding]:
    """Findings about everything but the host and what GPUs are."""
    running = set(tenures(config.run_dir)) if config.run_dir.is_dir() else set()
    yield checked("daemon", partial(_daemon, config))
    yield checked("kill switch", partial(_kill_switch, config))
    yield checked("scheduler", partial(_scheduler, config.scheduler))
    for replica in config.replicas:
        host = config.host if replica.kind == "guest" else None
        headroom = host.headroom_bytes if host else 0
        runs = replica.id in running
        yield checked(replica.id, partial(_replica, replica, headroom, runs, gpus))
    yield checked("placement", partial(_placement, config))
    if config.metrics_port and daemon_of(config) is None:
        yield checked("metrics", partial(_port, "metrics", config.metrics_port))
    yield checked("disk", partial(_disk, config))


def _daemon(config: NodeConfig) -> Finding:
    pid = daemon_of(config)
    if pid is None:
        return note("daemon", "none runs", "start `rose node --config FILE`")
    return ok("daemon", f"process {pid}")


def _kill_switch(config: NodeConfig) -> Finding:
    if config.kill_file.exists():
        what = f"{config.kill_file} is set: no guest runs"
        return wrong("kill switch", what, f"take it back with `rose unkill {config.run_dir}`")
    return ok("kill switch", "not set")


def _scheduler(address: str) -> Finding:
    try:
        SchedulerClient(address, SCHEDULER_TIMEOUT_S).snapshot()
    except RoseError as error:
        what, _, do = str(error).partition("; ")
        return wrong("scheduler", what, do or "check `scheduler` in the node's file")
    return ok("scheduler", f"{address} answers")


def _replica(replica: ReplicaConfig, headroom: int, runs: bool, gpus: Gpus) -> Finding:
    try:
        check_model(replica.model_dir)
        if runs:
            return ok(replica.id, f"runs on port {replica.port}")
        if replica.device is None:
            needed = engine_bytes(replica.model_dir, replica.kv_bytes)
            check_memory(f"{replica.id}: processes, weights and KV", needed, headroom)
        else:
            check_memory(f"{replica.id}: processes", MIN_FREE_BYTES_PER_ENGINE, headroom)
            gpus.insist_room(replica, headroom)
    except RoseError as error:
        what, _, do = str(error).partition("; ")
        return wrong(replica.id, what, do)
    return _port(replica.id, replica.port)


def _port(owner: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            what = f"port {port}: {error.strerror}"
            return wrong(owner, what, "end what listens there (`ss -ltnp`) or choose another port")
    return ok(owner, f"can be started on port {port}")


def _placement(config: NodeConfig) -> Finding:
    share = "background" if any(r.device is None for r in config.replicas) else "aside"
    attempt = subprocess.run(  # noqa: S603 -- our own program, placed as a guest is
        [
            *(sys.executable, "-I", "-S", str(placement.__file__), f"share={share}", "--"),
            *(sys.executable, "-I", "-S", "-c", _LOOK),
        ],
        capture_output=True,
        text=True,
        timeout=ATTEMPT_TIMEOUT_S,
        check=True,
    )
    idle, nice = map(int, attempt.stdout.split())
    if not idle and nice <= 0:
        do = "allow sched_setscheduler or setpriority (seccomp, capabilities), or a cgroup"
        return wrong("placement", "a guest cannot be put behind the host", do)
    share = "SCHED_IDLE" if idle else f"nice {nice}"
    if config.cgroup is None:
        return ok("placement", f"{share}, no cgroup of its own")
    try:
        guest_cgroup(config.cgroup, "rose-doctor").rmdir()
    except CgroupRefusedError as error:
        return wrong("placement", f"{share}; {error}", "or guests run without one")
    return ok("placement", f"{share} and a cgroup below {config.cgroup}")


def _disk(config: NodeConfig) -> Finding:
    for folder in (config.run_dir, config.log_dir):
        if not folder.is_dir():
            return note("disk", f"{folder} is not there yet", "the daemon makes it")
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            return wrong("disk", f"{folder}: {error.strerror}", "give it to the node's user")
    weights = config.run_dir / "weights"
    kept = sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())
    needed = max(MIN_FREE_DISK_BYTES, (config.receiver.disk_bytes or 0) - kept)
    free = shutil.disk_usage(config.run_dir).free
    if free < needed:
        what = f"{free / 2**30:.1f} GiB are free, {needed / 2**30:.1f} GiB may be needed"
        return wrong("disk", what, "make room or lower `receiver.disk_bytes`")
    return ok("disk", f"{free / 2**30:.0f} GiB free, {_megabytes(weights, kept)}")


def _megabytes(weights: Path, kept: int) -> str:
    return f"{kept / 2**20:.0f} MiB of weights in {weights}"
