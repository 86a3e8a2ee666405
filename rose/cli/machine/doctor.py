"""`rose doctor [--config FILE] [--scheduler HOST:PORT]`: checks of a node, or of a cluster.

Without a file the cluster is checked, by its scheduler's word; with one the machine, and the
cluster if a scheduler is named.

Host: its page, its publisher, its process, its clock. Node: daemon, scheduler, guests, kill switch,
engines' plugins, placement, ports, disk. GPUs: driver, card, other users, MPS, and the parts that a
guest needs to return memory.

Exit code 0 without faults, 1 with any, 2 when the file cannot be used, 4 when no scheduler answers.
"""

import argparse
import grp
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import ParamSpec

from executor import ControlPage, PageError
from executor.control_page.host_description import HostDescription
from executor.control_page.page import (
    BEAT_STALE_NS,
    LAYOUT_VERSION,
    check_folder,
    on_disk,
    strictest,
)
from executor.engine_surfaces import VERSIONS, Support
from executor.freeze_reason import explained
from rose.addresses import is_loopback, taken
from rose.cli.options import DEFAULT_SCHEDULER
from rose.command_line.parser import Parser
from rose.engines import EngineKind
from rose.engines.launch import (
    MIN_FREE_BYTES_PER_ENGINE,
    broken_plugins,
    check_memory,
    check_model,
    engine_bytes,
)
from rose.errors import RefusedError, RoseError
from rose.node.config import DiscoverConfig, HostConfig, NodeConfig, ReplicaConfig
from rose.node.discovery import look
from rose.node.guest.cpu_placement import CgroupRefusedError, guest_cgroup
from rose.node.guest.guest_record import running_guests
from rose.node.guest.memory_gauges import Gpus, control_daemon_at, insist_mps, pipe_folder
from rose.node.host import HostProcess, publishers_on
from rose.nvml import Card, Client, version_text
from rose.operate.client import PolicyClient, SchedulerClient
from rose.process import launcher
from rose.process.filelock import holder_of
from rose.process.procfs import group_members
from rose.security.certificates import add_certificate_options, taken_certificates


class Severity(StrEnum):
    """Severity of a finding.

    NOTE: it works, with something that an operator should know. WRONG: it does not work.
    """

    OK = "ok"
    NOTE = "note"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Finding of one check.

    what: the finding. do: the next thing to do, "" if it is OK. subject: the part that was checked.
    """

    level: Severity
    what: str
    do: str = ""
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6} {self.subject}: {self.what}" + (f"; {self.do}" if self.do else "")

    def about(self, subject: str) -> "Diagnosis":
        """Return the same finding about another subject."""
        return replace(self, subject=subject)


def ok(what: str) -> Diagnosis:
    """Return a finding that a part works. what: its state."""
    return Diagnosis(Severity.OK, what)


def note(what: str, do: str) -> Diagnosis:
    """Return a finding that a part works, with something that an operator should know and do."""
    return Diagnosis(Severity.NOTE, what, do)


def wrong(what: str, do: str) -> Diagnosis:
    """Return a finding that a part does not work, with what to do."""
    return Diagnosis(Severity.WRONG, what, do)


def refused(error: Exception | str, otherwise: str = "") -> Diagnosis:
    """Return an error as a WRONG finding.

    What to do is the error's text after the first semicolon, or `otherwise`.
    """
    what, _, do = str(error).partition("; ")
    return wrong(what, do or otherwise)


Args = ParamSpec("Args")


def checked(
    subject: str, check: Callable[Args, Diagnosis], *args: Args.args, **more: Args.kwargs
) -> Diagnosis:
    """Run a check and return its finding about `subject`; an exception in the check becomes a WRONG
    finding.
    """
    try:
        return check(*args, **more).about(subject)
    except RoseError as error:
        return refused(error, "look at it").about(subject)
    except Exception as error:  # noqa: BLE001 -- whatever a broken machine throws is a finding
        first = (str(error).splitlines() or ["no message"])[0]
        what = f"cannot be checked ({type(error).__name__}: {first})"
        return wrong(what, "look at it").about(subject)


# Grants are written fifty times a second; a host in a step writes at its end, which may be late.
GRANT_STALE_S = 1.0
HOST_STALE_S = 30.0
_NS = 1e9


def host_checks(host: HostConfig, *, daemon_runs: bool) -> Iterator[Diagnosis]:
    """Yield the findings about one host: its page, process, seat, heartbeats and clock.

    daemon_runs: check the daemon's heartbeat too.
    """
    yield checked("page", _page, host)
    if not host.name:  # one that was found holds its seat
        yield checked("host", _alive, host)
    if host.page.exists():
        yield checked("host seat", _seat, host)
        yield checked("host heartbeat", _heartbeat, host)
        if (said := _described(host)) is not None and said.engine:
            yield _engine(said).about("host engine")
        if daemon_runs:
            yield checked("grant heartbeat", _grant, host)
    yield checked("clock", _clock, host.pid)


def _open(host: HostConfig) -> ControlPage:
    return ControlPage.open(host.page, host.page_group)


def _page(host: HostConfig) -> Diagnosis:
    path = host.page
    try:
        check_folder(path.parent)
        if not path.exists():
            return note(f"none at {path}", "whoever starts first, host or node, makes it")
        with _open(host) as page:
            owner = f"layout {LAYOUT_VERSION}, made by process {page.owner_pid}"
            return ok(f"{path}, {owner}, {_access(path)}")
    except PageError as error:
        return refused(error, "delete it, then start host and node again")


def _access(path: Path) -> str:
    """Return the user or group that may map the page, as text."""
    status = path.stat()
    if not status.st_mode & 0o070:
        return f"for uid {status.st_uid} alone"
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return f"for group {group} (mode {stat.S_IMODE(status.st_mode):o})"


def _alive(host: HostConfig) -> Diagnosis:
    pid = host.pid
    if pid is None:
        return note("no pid is given", "set host.pid, or any engine on the page is the host")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return wrong(f"process {pid} is gone", "start the host, write its pid to host.pid")
    except PermissionError:
        if not host.page_group:
            do = "run the node as that user, or name a host.page_group that both are in"
            return wrong(f"process {pid} is another user's", do)
        return ok(f"process {pid} lives, as another user's")
    return ok(f"process {pid} lives")


_NAMES = {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}
# Ways to start a host that publishes, and reasons for which a tested version does not.
_PUBLISHES = {
    kind: (
        f"ROSE_ROLE=host and ROSE installed beside {name}; {name.upper()}_PLUGINS, where it is set,"
        " names rose_host"
    )
    for kind, name in _NAMES.items()
}
_BREAKS = {
    EngineKind.VLLM: "data parallelism over several machines, servers or Ray",
    EngineKind.SGLANG: "speculative decoding, disaggregation, dp_size or pp_size above 1",
}


def _seat(host: HostConfig) -> Diagnosis:
    """Return a finding: WRONG unless a live process publishes on the host's page and no other
    engine serves unobserved.
    """
    with _open(host) as page:
        view = page.host_view()
    if view.vetoed:
        what = "an engine serves on this page that cannot publish there; guests are frozen"
        do = (
            f"look at the host's log: an untested {_NAMES[host.engine]}, a ROSE_ variable it cannot"
            f" read, {_BREAKS[host.engine]}, or a second engine core"
        )
        return wrong(what, do)
    if not view.seated:
        silent = [number for number, core in enumerate(view.cores) if not core.seated]
        what = "no process publishes on this page; guests are frozen"
        if 0 < len(silent) < len(view.cores):
            of = f"{silent[0]} of {len(view.cores)}"
            what = f"engine core {of} does not publish on this page; guests are frozen"
        do = (
            f"start the host with {_PUBLISHES[host.engine]};"
            " start it again if the page was deleted since"
        )
        return wrong(what, do)
    if doubt := HostProcess(host.pid).doubt(*view.seats):
        do = "write to host.pid the process that started the host, and start the node again"
        return wrong(f"who publishes is not the host ({doubt})", do)
    holders = ", ".join(str(seat.pid) for seat in view.seats if seat)
    return ok(f"held by process {holders}" if holders else "held")


def _described(host: HostConfig) -> HostDescription | None:
    """Return what the host that publishes now says of itself; None if it says nothing."""
    with suppress(PageError), _open(host) as page:
        view = page.host_view()
        if view.seated and view.seat is not None:
            return HostDescription.current(host.page, view.seat.taken_ns)
    return None


def _engine(said: HostDescription) -> Diagnosis:
    """Return a finding about the host's engine: a NOTE if ROSE is not tested with it, or it cannot
    do what it was asked for.
    """
    what = "; ".join([f"{said.engine} is {said.support}", *said.lacks])
    if said.lacks:
        return note(what, "the host serves all the same; its log has the reason in full")
    if said.support != Support.TESTED:
        return note(what, f"ROSE is not tested with it; set {VERSIONS}=tested to refuse it")
    return ok(what)


def _heartbeat(host: HostConfig) -> Diagnosis:
    with _open(host) as page:
        first = page.seat.read()
        cores = page.cores[: first.cores if first else 1]
        states = [state for core in cores if (state := core.state.read())]
        seats = [seat for core in cores if (seat := core.seat.read())]
    if not len(states) == len(seats) == len(cores):
        do = f"start it with {_PUBLISHES[host.engine]}"
        return wrong("the host has never written to its page", do)
    now_ns = time.monotonic_ns()
    state = strictest(states)
    beat_s = (now_ns - min(seat.beat_ns for seat in seats)) / _NS
    if beat_s * _NS > BEAT_STALE_NS:
        do = "look at the host's log: it hangs, or its plugin gave up; guests are frozen"
        return wrong(f"its process is silent for {beat_s:.0f} s", do)
    age_s = (now_ns - state.heartbeat_ns) / _NS
    if not state.idle and age_s > HOST_STALE_S:
        what = f"busy, and silent for {age_s:.0f} s"
        return wrong(what, "look at the host's log: it hangs, or its plugin gave up")
    what = "idle" if state.idle else f"{state.running} running, {state.waiting} waiting"
    return ok(f"{what}, last written {max(0.0, age_s):.1f} s ago")


def _grant(host: HostConfig) -> Diagnosis:
    with _open(host) as page:
        grant = page.grant.read()
    age_s = (time.monotonic_ns() - grant.heartbeat_ns) / _NS if grant else float("inf")
    if grant is None or age_s > GRANT_STALE_S:
        do = "is it stopped? `kill -CONT` it or start the node again; its guest is frozen meanwhile"
        return wrong(f"the daemon is silent for {age_s:.1f} s", do)
    return ok(f"{grant.mode.name.lower()}: {explained(grant.reason)}")


def _clock(pid: int | None) -> Diagnosis:
    if time.time() < os.path.getmtime(__file__) - 86_400:
        return wrong("the wall clock is wrong", "set it: manifests expire by it")
    if pid is None:
        return ok("plausible")
    theirs, ours = (_time_namespace(p) for p in (str(pid), "self"))
    if theirs is None:
        return note("the host's time namespace cannot be read", "run as the host's user")
    if theirs != ours:
        do = "share the host's time namespace: times on the page are CLOCK_MONOTONIC"
        return wrong("host and node count time differently", do)
    return ok("shared with the host")


def _time_namespace(pid: str) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/time").readlink())
    except OSError:
        return None


MIN_FREE_DISK_BYTES = 1 << 30
SCHEDULER_TIMEOUT_S = 2.0
# A process in the kernel's background class waits for an idle core.
ATTEMPT_TIMEOUT_S = 60.0
_LOOK = "import os;print(int(os.sched_getscheduler(0)==os.SCHED_IDLE), os.getpriority(0,0))"


def daemon_of(config: NodeConfig) -> int | None:
    """Return the process id of the daemon that runs this node; None if none does."""
    return holder_of(config.run_dir / "daemon.lock")


def node_checks(config: NodeConfig, gpus: Gpus) -> Iterator[Diagnosis]:
    """Yield the findings of all checks of a node but those of its hosts and GPUs."""
    running = set(running_guests(config.run_dir)) if config.run_dir.is_dir() else set()
    yield checked("daemon", _daemon, config)
    yield checked("kill switch", _kill_switch, config)
    yield checked("certificates", _certificates, config)
    yield checked("scheduler", _scheduler, config)
    for replica in config.replicas:
        host = config.host if replica.kind == "guest" else None
        headroom = host.headroom_bytes if host else 0
        runs = replica.id in running
        yield checked(replica.id, _replica, replica, headroom, runs, gpus)
        if host is not None and not replica.gpus:
            yield checked(f"{replica.id} gives back", _gives_back, replica)
    for python, extra_env, engine in _interpreters(config):
        yield checked("plugins", _plugins, python, extra_env, engine)
    if config.replicas:
        yield checked("proxy", _proxy, config)
    yield checked("placement", _placement, config)
    if config.metrics_port and daemon_of(config) is None:
        yield checked("metrics", _port, config.metrics_port)
    yield checked("disk", _disk, config)


def _daemon(config: NodeConfig) -> Diagnosis:
    pid = daemon_of(config)
    if pid is None:
        return note("none runs", "start `rose node --config FILE`")
    return ok(f"process {pid}")


def _kill_switch(config: NodeConfig) -> Diagnosis:
    if config.kill_file.exists():
        what = f"{config.kill_file} is set: no guest runs"
        return wrong(what, f"take it back with `rose unkill {config.run_dir}`")
    if (config.host or config.discover) and on_disk(config.run_dir):
        what = f"{config.run_dir} is on a disk: while it hangs, `rose kill` waits and guests freeze"
        return wrong(what, "put run_dir beside the page, weights_dir on the disk")
    return ok("not set")


def _certificates(config: NodeConfig) -> Diagnosis:
    files = config.certificates.files
    if files is None:
        return note("none", "fine on loopback; see `certificates` elsewhere")
    troubles = files.troubles()
    if troubles:
        return refused(troubles[0])
    return ok(f"{files.identity}, until {files.until}")


def _scheduler(config: NodeConfig) -> Diagnosis:
    address = config.scheduler
    try:
        SchedulerClient(address, SCHEDULER_TIMEOUT_S, config.certificates.files).snapshot()
    except RefusedError:
        # A node's certificate may not read a snapshot, so an answer is all that is checked.
        return ok(f"{address} answers")
    except RoseError as error:
        return refused(error, "check `scheduler` in the node's file")
    return ok(f"{address} answers")


def _replica(replica: ReplicaConfig, headroom: int, runs: bool, gpus: Gpus) -> Diagnosis:
    check_model(replica.model_dir, tokenizer=replica.tokenizer)
    if runs:
        return ok(f"runs on port {replica.port}")
    if not replica.gpus:
        ranks, copies = replica.ranks, replica.data_parallel
        needed = engine_bytes(replica.model_dir, replica.kv_bytes, ranks, copies)
        check_memory(f"{replica.id}: processes, weights and KV", needed, headroom)
    else:
        needed = replica.ranks * MIN_FREE_BYTES_PER_ENGINE
        check_memory(f"{replica.id}: processes", needed, headroom)
        gpus.insist_room(replica, headroom)
    return _port(replica.port)


def _interpreters(
    config: NodeConfig,
) -> Collection[tuple[str, Mapping[str, str], EngineKind]]:
    """Return (interpreter, environment, engine) of the replicas, once for each interpreter,
    PYTHONPATH and engine.
    """
    found = {}
    for replica in config.replicas:
        python, env = str(replica.engine_python or sys.executable), replica.extra_env
        key = python, env.get("PYTHONPATH"), replica.engine
        found[key] = (python, env, replica.engine)
    return found.values()


def _plugins(python: str, extra_env: Mapping[str, str], engine: EngineKind) -> Diagnosis:
    """Return a finding: WRONG if a plugin of the engine, ROSE's or another's, cannot be imported in
    its interpreter.
    """
    broken, name = broken_plugins(python, extra_env, engine), _NAMES[engine]
    if not broken:
        return ok(f"all plugins of {name} load in {python}")
    first = broken[0]
    others = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
    what = (
        f"{first.distribution} names the plugin {first.name} of {name}, and {first.module} cannot"
        f" be imported ({first.why}){others}"
    )
    do = (
        f"install {first.distribution} again for {python}, or delete its stale *.egg-info in"
        f" {first.folder}"
    )
    return wrong(what, do)


def _proxy(config: NodeConfig) -> Diagnosis:
    """Return a finding on the way from gateways of other machines to this node's replicas, through
    its proxy.
    """
    proxy = config.proxy
    if proxy is None:
        hosts = [address.rpartition(":")[0] for address in config.scheduler.split(",")]
        if all(is_loopback(host.strip("[]")) for host in hosts):
            return ok("none: scheduler and gateways are on this machine")
        do = "name an address of this machine in `proxy`, where gateways are on others"
        return note("none: gateways of other machines do not reach its replicas", do)
    if daemon_of(config) is None:
        return _port(proxy.port, proxy.host)
    try:
        socket.create_connection((proxy.host, proxy.port), SCHEDULER_TIMEOUT_S).close()
    except OSError as error:
        what = f"{proxy.host} port {proxy.port}: {error.strerror or error}"
        return wrong(what, f"{config.log_dir / 'proxy.log'} says why")
    return ok(f"listens on {proxy.host} port {proxy.port}")


def _port(port: int, host: str = "127.0.0.1") -> Diagnosis:
    if why := taken(port, host):
        do = "end what listens there (`ss -ltnp`) or choose another port"
        return wrong(f"port {port}: {why}", do)
    return ok(f"can be started on port {port}")


def _placement(config: NodeConfig) -> Diagnosis:
    share = "background" if any(not r.gpus for r in config.replicas) else "aside"
    attempt = subprocess.run(  # noqa: S603 -- our own program, placed as a guest is
        [
            *(sys.executable, "-I", "-S", str(launcher.__file__), f"share={share}", "--"),
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
        return wrong("a guest cannot be put behind the host", do)
    share = "SCHED_IDLE" if idle else f"nice {nice}"
    if config.cgroup is None:
        return ok(f"{share}, no cgroup of its own")
    try:
        guest_cgroup(config.cgroup, "rose-doctor").rmdir()
    except CgroupRefusedError as error:
        return wrong(f"{share}; {error}", "or guests run without one")
    return ok(f"{share} and a cgroup below {config.cgroup}")


def _disk(config: NodeConfig) -> Diagnosis:
    for folder in (config.run_dir, config.weights.parent, config.log_dir):
        if not folder.is_dir():
            return note(f"{folder} is not there yet", "the daemon makes it")
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            return wrong(f"{folder}: {error.strerror}", "give it to the node's user")
    weights = config.weights
    kept = sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())
    needed = max(MIN_FREE_DISK_BYTES, (config.receiver.disk_bytes or 0) - kept)
    free = shutil.disk_usage(weights.parent).free
    if free < needed:
        what = f"{free / 2**30:.1f} GiB are free, {needed / 2**30:.1f} GiB may be needed"
        return wrong(what, "make room or lower `receiver.disk_bytes`")
    return ok(f"{free / 2**30:.0f} GiB free, {kept / 2**20:.0f} MiB of weights in {weights}")


GIB = 1 << 30
# Memory that a driver keeps for itself on an idle card.
DRIVERS_OWN_BYTES = 2 << 30
_LOOK_FOR_CUDA = (
    "from importlib.util import find_spec; print(find_spec('cuda.bindings') is not None)"
)


def gpu_checks(config: NodeConfig, gpus: Gpus) -> Iterator[Diagnosis]:
    """Yield the findings about every GPU that the node's file names, and about the parts of its
    replicas that use one.
    """
    replicas = [replica for replica in config.replicas if replica.gpus]
    named = [gpu for replica in replicas for gpu in replica.gpus]
    if config.host:
        named.extend(config.host.gpus)
    if not named:
        return
    yield checked("gpu", _usable, config, gpus)
    for device in dict.fromkeys(named):
        try:
            card = gpus.card(device)
        except RoseError:
            continue  # That is what is wrong above.
        yield checked(f"gpu {device}", _card, card)
        yield checked(f"gpu {device} load", _load, config, gpus, card)
    for replica in replicas:
        yield checked(f"{replica.id} mps", _mps, replica)
        if replica.kind == "guest":
            yield checked(f"{replica.id} gives back", _gives_back, replica)
            if replica.core is not None or replica.cores:
                yield checked(f"{replica.id} core", _pinned, replica)


def _usable(config: NodeConfig, gpus: Gpus) -> Diagnosis:
    try:
        gpus.insist_all(config)
        if config.host and config.host.page.exists():
            with _open(config.host) as page:
                gpus.insist_used(config.host, publishers_on(page))
    except RoseError as error:
        return refused(error, "see what nvidia-smi says")
    return ok("every replica has a card that it can run on")


def _card(card: Card) -> Diagnosis:
    what = f"{card.name}, driver {card.driver}, CUDA {version_text(card.cuda)}, {card.uuid}"
    if card.persistence is False:
        return note(f"{what}, persistence off", "its owner may turn it on: starts are slow")
    return ok(what)


def _load(config: NodeConfig, gpus: Gpus, card: Card) -> Diagnosis:
    """Return a finding: a NOTE if other processes than host and guests are on the card, or its
    clocks are reduced, as far as the driver tells.
    """
    usage, clients = gpus.reader.usage(card), gpus.reader.clients(card)
    what = f"{usage.free_bytes / GIB:.1f} of {card.memory_bytes / GIB:.1f} GiB free"
    if not clients and usage.used_bytes > DRIVERS_OWN_BYTES:
        do = "run the node in the machine's process namespace, or the ladder goes by pages alone"
        return note(f"{what}, and none of its processes is seen from here", do)
    others = _others(config, clients)
    if others:
        pids = ", ".join(map(str, others))
        do = "end it, or expect less: it is neither gated nor asked for memory"
        return note(f"{what}, and another process is on it (pid {pids})", do)
    if usage.slowed:
        return note(f"{what}, slowed by {', '.join(usage.slowed)}", "look at power, heat")
    return ok(what)


def _others(config: NodeConfig, clients: tuple[Client, ...]) -> list[int]:
    leaders = [record.identity.pid for record in running_guests(config.run_dir).values()]
    known = {pid for leader in leaders for pid, _ in group_members(leader)}
    if config.host and config.host.pid is not None:
        known |= {pid for pid, _ in group_members(os.getpgid(config.host.pid))}
    return [client.pid for client in clients if client.pid not in known]


def _mps(replica: ReplicaConfig) -> Diagnosis:
    if replica.wants_mps:
        pipes = insist_mps(replica)
        do = "know that a fatal fault of one client ends every client of that GPU, the host too"
        return note(f"a client of the control daemon at {pipes}", do)
    pipes = pipe_folder({})
    if control_daemon_at(pipes):
        what = f"a control daemon is at {pipes}, and this replica is no client of it"
        if replica.kind == "guest":
            return note(what, "it then takes turns with the host; see mps_priority")
    return ok("off")


def _gives_back(replica: ReplicaConfig) -> Diagnosis:
    if (why := replica.kept_kv(replica.model_dir)) is not None:
        cuda = 'set "kv_backend": "cuda", which gates its start as well'
        do = cuda if why.startswith("kv_backend") else "its memory comes back when it ends"
        return note(why, do)
    if not replica.gpus:
        return ok("KV pages of the machine")
    python = str(replica.engine_python or sys.executable)
    found = subprocess.run(  # noqa: S603 -- the operator's own interpreter
        [python, "-c", _LOOK_FOR_CUDA],
        env={**os.environ, **replica.extra_env},
        capture_output=True,
        text=True,
        timeout=ATTEMPT_TIMEOUT_S,
        check=False,
    )
    if found.stdout.strip() != "True":
        what = f"{python} has no cuda-bindings, which kv_backend cuda needs"
        return wrong(what, "install rose-rollout[cuda] there")
    return ok("KV pages, through cuda-bindings")


def _pinned(replica: ReplicaConfig) -> Diagnosis:
    cores = ", ".join(map(str, replica.cores or (replica.core,)))
    what = f"it is pinned to core {cores}: its launches wait for that core alone"
    return note(what, "leave `core` and `cores` out on a GPU")


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose doctor`."""
    parser = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=_run)
    parser.add_argument("--config", type=Path, help="a node's JSON file: check this machine")
    parser.add_argument(
        "--discover", type=Path, metavar="DIR", help="the folder in which the node finds its hosts"
    )
    parser.add_argument(
        "--scheduler",
        metavar="HOST:PORT",
        help=f"check the cluster (without --config: that of {DEFAULT_SCHEDULER})",
    )
    add_certificate_options(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    subjects: list[tuple[str, Iterator[Diagnosis]]] = []
    if args.config is not None:
        config = NodeConfig.load(args.config, args.discover)
        subjects.append((f"node {config.node}", diagnose(config)))
    if args.config is None or args.scheduler is not None:
        subjects.append(("cluster", _of_cluster(args)))
    return int(sum(_reported(*subject) for subject in subjects) > 0)


def _of_cluster(args: argparse.Namespace) -> Iterator[Diagnosis]:
    # Imported here: it is built on the findings above.
    from rose.cli.cluster.fleet_doctor import diagnose_fleet

    certificates = taken_certificates(vars(args))
    return diagnose_fleet(PolicyClient(args.scheduler or DEFAULT_SCHEDULER, 5.0, certificates))


def _reported(subject: str, findings: Iterator[Diagnosis]) -> bool:
    """Print each finding as it comes, then a summary; return True if one of them is WRONG."""
    found = list[Diagnosis]()
    for finding in findings:
        found.append(finding)
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
    wrong = sum(finding.level is Severity.WRONG for finding in found)
    sys.stdout.write(f"{subject}: {len(found)} checks, {wrong} wrong\n")
    return wrong > 0


def diagnose(config: NodeConfig, gpus: Gpus | None = None) -> Iterator[Diagnosis]:
    """Yield the findings of all checks of a node; failures become findings, and nothing is
    changed.
    """
    gpus = gpus or Gpus()
    if config.discover:
        config = yield from discovery_checks(config, config.discover, gpus)
    elif config.host:
        yield from host_checks(config.host, daemon_runs=daemon_of(config) is not None)
    yield from gpu_checks(config, gpus)
    yield from node_checks(config, gpus)


def discovery_checks(
    config: NodeConfig, discover: DiscoverConfig, gpus: Gpus
) -> Generator[Diagnosis, None, NodeConfig]:
    """Yield findings about the hosts in a shared folder; return the node's configuration without a
    host.
    """
    seen = look(discover.folder, discover.page_group)
    for page, reason in seen.unusable.items():
        unusable = refused(reason, "its host serves on, and has no guest")
        yield unusable.about(f"host {page.stem!r}")
    if not seen.hosts:
        do = "give hosts ROSE_ROLE=host and ROSE_HOST_DIR, the folder as they see it"
        yield note(f"none in {discover.folder}", do).about("hosts")
    daemon_runs = daemon_of(config) is not None
    for slot, found in enumerate(seen.hosts.values()):
        yield ok(f"{found.name} serves {found.said.model}").about("hosts")
        if not found.alone:
            do = "give each host GPUs of its own"
            yield wrong("another host is on one of its GPUs", do).about(f"{found.name} guest")
        host = found.config(discover)
        for finding in host_checks(host, daemon_runs=daemon_runs and bool(config.guests)):
            yield finding.about(f"{found.name} {finding.subject}")
        try:
            yield from gpu_checks(config.with_host(host, slot), gpus)
        except RoseError as error:
            yield refused(error, "it is watched, and has no guest").about(f"{found.name} guest")
    return config.with_host(None)
