"""Operator's subcommands of `rose`: status, explain, jobs, harvest, revoke, kill, unkill.

`rose status` prints a snapshot of the cluster as tables. `rose explain TRAJECTORY` prints where its
turns were placed, and why. Failures of calls to the scheduler become errors that a person reads.
"""

import argparse
import http.client
import queue
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from executor import explained
from rose.contract.gateway import EXPLAIN, Choosing, Explanation
from rose.errors import BAD_BYTES, ConfigError, RefusedError, RoseError, UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_blocking_channel
from rose.rpc.leader_channel import CONNECT_S, LeaderFinder, hint_of
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.security.certificates import (
    CertificateFiles,
    add_certificate_options,
    taken_certificates,
)
from rose.security.tokens import TokenFile

PIPE_WIDTH = 160  # columns when nobody watches: wide enough that no cell is cut


def show(snapshot: pb.SnapshotReply, console: Console | None = None) -> None:
    """Print one line about the cluster, then replicas, hosts and guests."""
    console = console or console_of()
    console.print(summary(snapshot), markup=False, highlight=False)
    for trouble in snapshot.troubles:
        console.print(f"scheduler: {trouble}", markup=False, highlight=False)
    for table in (_capacity(snapshot), _replicas(snapshot), _hosts(snapshot), _guests(snapshot)):
        if table.row_count:
            console.print(table)


def summary(snapshot: pb.SnapshotReply) -> str:
    """`harvest OFF, job grpo at version 3 (staleness <= 1), 2 replicas, 1 leased`."""
    mode = _mode(snapshot.harvest)
    own = ", ".join(f"{each.replica} {_mode(each.mode)}" for each in snapshot.overrides)
    jobs = ", ".join(
        f"job {job.job} at version {job.latest_version}"
        f" (staleness <= {job.max_staleness}{_demand(job)})"
        for job in snapshot.jobs
    )
    leased = sum(replica.leased for replica in snapshot.replicas)
    stalled = snapshot.store_stalled_s
    waits = f", nothing new is leased: its store has not answered for {stalled:.0f} s"
    return (
        f"harvest {mode}{f' ({own})' if own else ''}, {jobs or 'no job'},"
        f" {len(snapshot.replicas)} replicas, {leased} leased{waits if stalled else ''}"
    )


def _demand(job: pb.JobView) -> str:
    if not job.demand_known:
        return ""
    rate = f"{job.made_tok_s:.0f} tokens/s"
    return f"; {job.turns} turns, {job.owed_tokens:.0f} tokens owed, {rate}"


def console_of() -> Console:
    """Make a console for tables, wide where nobody watches."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _mode(mode: "pb.HarvestMode.ValueType") -> str:
    return pb.HarvestMode.Name(mode).removeprefix("HARVEST_MODE_")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _held(replica: pb.Replica) -> str:
    """`3`, and of weights that its lease is not for `3 of other`."""
    foreign = replica.held_job and replica.job and replica.held_job != replica.job
    version = str(replica.policy_version)
    return f"{version} of {escape(replica.held_job)}" if foreign else version


def _capacity(snapshot: pb.SnapshotReply) -> Table:
    """Nodes under capacity policies; nothing where no operator applied one."""
    table = _table("nodes", "node", "policy", "mode", "would be", "held back by")
    for row in snapshot.capacity:
        table.add_row(
            escape(row.node),
            row.policy_mode,
            _mode(row.mode),
            _mode(row.would),
            escape("; ".join(row.limits) or "-"),
        )
    return table


def _replicas(snapshot: pb.SnapshotReply) -> Table:
    table = _table(
        "replicas",
        "replica",
        "kind",
        "node",
        "healthy",
        "version",
        "lease",
        "state",
        "expires in",
        "why",
    )
    leases = {lease.replica: lease for lease in snapshot.leases}
    for replica in snapshot.replicas:
        lease = leases.get(replica.id)
        table.add_row(
            escape(replica.id),
            pb.ReplicaKind.Name(replica.kind).removeprefix("REPLICA_KIND_").lower(),
            escape(replica.node),
            "yes" if replica.healthy else "no",
            _held(replica),
            f"epoch {lease.epoch}" if lease else "-",
            lease.state if lease else "-",
            f"{lease.expires_in_s:.1f} s" if lease else "-",
            escape(lease.why) if lease else "-",
        )
    return table


def _hosts(snapshot: pb.SnapshotReply) -> Table:
    table = _table(
        "hosts", "node", "running", "waiting", "TTFT p95 / target", "TPOT p95 / target", "requests"
    )
    for host in snapshot.hosts:
        table.add_row(
            escape(f"{host.node}/{host.host}" if host.host else host.node),
            str(host.running),
            str(host.waiting),
            f"{host.ttft_p95_s * 1e3:.0f} / {host.ttft_target_s * 1e3:.0f} ms",
            f"{host.tpot_p95_s * 1e3:.1f} / {host.tpot_target_s * 1e3:.0f} ms",
            f"{host.window_requests} in {host.window_s:.0f} s",
        )
    return table


def _guests(snapshot: pb.SnapshotReply) -> Table:
    table = _table("engines", "replica", "state", "grant", "why", "running", "tokens", "duty")
    for guest in snapshot.guests:
        table.add_row(
            escape(guest.replica),
            f"{guest.state}, {guest.restarts} restarts",
            guest.mode,
            escape(guest.reason),
            str(guest.running),
            str(guest.tokens_total),
            f"{guest.duty:.0%}",
        )
    whys = sorted({guest.reason for guest in snapshot.guests if guest.reason})
    table.caption = escape("\n".join(explained(why) for why in whys))
    return table


DEFAULT_SCHEDULER = "127.0.0.1:7400"
CALL_TIMEOUT_S = 5.0

Reply = TypeVar("Reply")
_SAID_NO = {
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


class SchedulerClient:
    """Operator's client of a scheduler.

    Raises `UnavailableError` when it does not answer and `RefusedError` when it says no.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = CALL_TIMEOUT_S,
        certificates: CertificateFiles | None = None,
    ) -> None:
        self._finder = LeaderFinder(address)
        self._address = address
        self._timeout_s = timeout_s
        self._certificates = certificates

    def snapshot(self) -> pb.SnapshotReply:
        """Everything the scheduler knows right now."""
        return self._call(lambda stub: stub.Snapshot(pb.SnapshotRequest(), timeout=self._timeout_s))

    def set_harvest(self, mode: "pb.HarvestMode.ValueType", replica: str) -> int:
        """Set the mode of one replica, or of the cluster (""); returns the leases it released."""
        request = pb.SetHarvestRequest(mode=mode, replica=replica)
        return self._call(lambda stub: stub.SetHarvest(request, timeout=self._timeout_s)).released

    def end_job(self, job: str) -> int:
        """End a job; returns the leases that this releases."""
        request = pb.EndJobRequest(job=job)
        return self._call(lambda stub: stub.EndJob(request, timeout=self._timeout_s)).released

    def drop_job(self, job: str, *, force: bool = False) -> int:
        """Forget a job's chain and run; returns how many versions are forgotten."""
        request = pb.DropJobRequest(job=job, force=force)
        return self._call(lambda stub: stub.DropJob(request, timeout=self._timeout_s)).versions

    def revoke(self, replica: str, reason: str) -> int:
        """End the replica's lease; returns its epoch."""
        request = pb.RevokeRequest(replica=replica, reason=reason)
        return self._call(lambda stub: stub.Revoke(request, timeout=self._timeout_s)).epoch

    def _call(self, ask: Callable[[SchedulerStub], Reply]) -> Reply:
        """The leader's answer. A call is made again only if it was surely not carried out."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            found, hint = False, ""
            with make_blocking_channel(self._finder.address, self._certificates) as channel:
                # Of one that is alone the failed call itself says why it cannot be reached.
                if _connects(channel) or len(self._finder.addresses) == 1:
                    try:
                        return ask(SchedulerStub(channel))
                    except grpc.RpcError as error:
                        named = hint_of(error)
                        if named is None:
                            raise self._meaning(error.code(), error.details()) from error
                        found, hint = True, named
            self._finder.missed(hint)
            pause_s = self._finder.pause_s
            alone = len(self._finder.addresses) == 1 and not found
            if alone or time.monotonic() + pause_s >= until_s:
                raise self._meaning(grpc.StatusCode.UNAVAILABLE, None)
            time.sleep(pause_s)

    def _meaning(self, code: grpc.StatusCode, details: str | None) -> RoseError:
        if code in _SAID_NO:
            return RefusedError(details)
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return ConfigError(details)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return UnavailableError(
                f"no scheduler answers at {self._address} as the leader; start `rose scheduler`"
                f" or give --scheduler HOST:PORT{self._hint(details or '')}"
            )
        return UnavailableError(
            f"{self._address} answers, but not as a scheduler ({code.name}); check --scheduler"
        )

    def _hint(self, details: str) -> str:
        """What a handshake that came to nothing may have lacked: TLS says little of it."""
        if not any(word in details for word in ("Socket closed", "andshake", "erification")):
            return ""
        if self._certificates is None:
            return "; if it asks for certificates, give --ca, --certificate and --key"
        return (
            "; it may have refused the certificate, or be none of this cluster's: see `rose certs"
            " show`"
        )


def _connects(channel: grpc.Channel) -> bool:
    """Whether somebody is there, within a moment."""
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    channel.subscribe(states.put, try_to_connect=True)
    until_s = time.monotonic() + CONNECT_S
    try:
        while True:
            state = states.get(timeout=max(0.0, until_s - time.monotonic()))
            if state is grpc.ChannelConnectivity.READY:
                return True
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return False
    except queue.Empty:
        return False
    finally:
        channel.unsubscribe(states.put)


DEFAULT_GATEWAY = "http://127.0.0.1:8000"
EXPLAIN_TIMEOUT_S = 5.0
# A choice in a large fleet weighs a dozen replicas; the cheapest few say why.
SHOWN = 5


def explain(
    gateway: str,
    subject: str,
    job: str = "",
    token: str = "",
    certificates: CertificateFiles | None = None,
) -> int:
    """Print each remembered choice, oldest first. Raises RoseError when there is nothing to say."""
    for decision in _ask(gateway, subject, job, token, certificates):
        sys.stdout.write(line_of(decision) + "\n")
    return 0


def line_of(decision: Choosing) -> str:
    """`12.0 s ago  q1  -> guest-0: cheapest; 9 tokens expected (guest-0 0.41 s, own-1 0.5 s)`."""
    cheapest = sorted(decision.weighed, key=lambda pair: pair[1])[:SHOWN]
    costs = ", ".join(f"{name} {cost_s:.3g} s" for name, cost_s in cheapest)
    long = ", likely among the longest" if decision.is_long else ""
    return (
        f"{decision.age_s:8.1f} s ago  {decision.request_id or '-'}"
        f"  -> {decision.replica or 'wait'}: {decision.why};"
        f" {decision.expected_tokens} tokens expected{long} ({costs or 'nobody'})"
    )


def _ask(
    gateway: str, subject: str, job: str, token: str, certificates: CertificateFiles | None
) -> list[Choosing]:
    base = gateway.rstrip("/")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise ConfigError(f"--gateway {gateway} is no URL; write http://HOST:PORT")
    query = f"?{urllib.parse.urlencode({'job': job})}" if job else ""
    url = f"{base}{EXPLAIN}{urllib.parse.quote(subject, safe='')}{query}"
    asked = urllib.request.Request(url, headers=_bearing(token))  # noqa: S310 - checked
    context = certificates.client_context() if certificates else None
    try:
        with urllib.request.urlopen(  # noqa: S310 - checked
            asked, timeout=EXPLAIN_TIMEOUT_S, context=context
        ) as reply:
            return msgspec.json.decode(reply.read(), type=Explanation).decisions
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            raise RefusedError(
                f"the gateway remembers no choice for {subject!r}: name a request id or a session"
                " of one of its latest turns"
            ) from error
        if error.code in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise RefusedError(
                f"{base} answers HTTP {error.code}; give a --token-file of the turns' job, or a"
                " certificate"
            ) from error
        raise RefusedError(f"{base} answers HTTP {error.code}; is it a rose gateway?") from error
    except (OSError, *BAD_BYTES, http.client.HTTPException) as error:
        raise ConfigError(
            f"no gateway answers at {base} ({error}); start one, or give --gateway"
        ) from error


def _bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


if TYPE_CHECKING:
    # argparse offers this type to annotations only.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

KILL_FILE = "KILL"
MODES = {
    "off": pb.HARVEST_MODE_OFF,
    "hold": pb.HARVEST_MODE_HOLD,
    "drain": pb.HARVEST_MODE_HOLD_AND_DRAIN,
    "active": pb.HARVEST_MODE_ACTIVE,
}


def add_operator_commands(subparsers: "Subparsers") -> None:
    """Add them to the command line; `args.run` is what carries one out."""
    status = subparsers.add_parser("status", help="replicas, leases, hosts and guests right now")
    add_scheduler_options(status)
    status.set_defaults(run=_status)

    why = subparsers.add_parser("explain", help="say where turns were placed lately, and why")
    why.add_argument("subject", metavar="TRAJECTORY", help="a session, or one turn's request id")
    why.add_argument(
        "--gateway", default=DEFAULT_GATEWAY, metavar="URL", help=f"default {DEFAULT_GATEWAY}"
    )
    why.add_argument("--token-file", type=Path, metavar="FILE", help="of `rose token issue --out`")
    add_certificate_options(why)
    why.add_argument("--job", default="", metavar="J", help="whose it is, where there are several")
    why.set_defaults(run=_explain)

    jobs = subparsers.add_parser("jobs", help="list, show, end or drop registered jobs")
    verbs = ("list", "show", "end", "drop")
    jobs.add_argument("do", nargs="?", choices=verbs, default="list", help="default list")
    jobs.add_argument("job", nargs="?", default="", metavar="JOB", help="which one")
    jobs.add_argument(
        "--force", action="store_true", help="drop a job though its trainer lives, and fence that"
    )
    add_scheduler_options(jobs)
    jobs.set_defaults(run=_jobs)

    harvest = subparsers.add_parser("harvest", help="say how much may be lent")
    harvest.add_argument("mode", choices=MODES, help="off and drain also end what is lent")
    harvest.add_argument("--replica", default="", metavar="R", help="only this one (default: all)")
    add_scheduler_options(harvest)
    harvest.set_defaults(run=_harvest)

    revoke = subparsers.add_parser("revoke", help="end a replica's lease now")
    revoke.add_argument("replica", metavar="REPLICA")
    revoke.add_argument("--reason", default="operator", metavar="TEXT", help="for the event log")
    add_scheduler_options(revoke)
    revoke.set_defaults(run=_revoke)

    for name, run, what in (
        ("kill", _kill, "end all guests of a node now, whatever else is down"),
        ("unkill", _unkill, "let them start again"),
    ):
        parser = subparsers.add_parser(name, help=what)
        parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the node's run folder")
        if run is _kill:
            parser.add_argument(
                "--within",
                type=_positive_seconds,
                default=5.0,
                metavar="S",
                help="by when everything must be back (default 5)",
            )
        parser.set_defaults(run=run)


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 600:
        raise argparse.ArgumentTypeError(f"{text} is no time of up to 600 s")
    return seconds


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Add `--scheduler`, and what it may ask for."""
    parser.add_argument(
        "--scheduler",
        default=DEFAULT_SCHEDULER,
        metavar="HOST:PORT",
        help=f"several with commas find the one that leads (default {DEFAULT_SCHEDULER})",
    )
    add_certificate_options(parser)


def _client(args: argparse.Namespace) -> SchedulerClient:
    return SchedulerClient(args.scheduler, certificates=taken_certificates(vars(args)))


def _status(args: argparse.Namespace) -> int:
    # Imported here: only this command draws tables.

    show(_client(args).snapshot())
    return 0


def _explain(args: argparse.Namespace) -> int:
    token = TokenFile(args.token_file).token() if args.token_file else ""
    certificates = taken_certificates(vars(args))
    return explain(args.gateway, args.subject, args.job, token, certificates)


def _jobs(args: argparse.Namespace) -> int:
    # Imported here: it is built on the client above.
    from rose.cli.jobs import run_jobs

    return run_jobs(args, _client(args))


def _harvest(args: argparse.Namespace) -> int:
    released = _client(args).set_harvest(MODES[args.mode], args.replica)
    whom = args.replica or "all replicas"
    return _say(f"harvest of {whom}: {args.mode}; {released} leases are being released")


def _revoke(args: argparse.Namespace) -> int:
    epoch = _client(args).revoke(args.replica, args.reason)
    return _say(f"{args.replica}: lease of epoch {epoch} revoked")


def _kill(args: argparse.Namespace) -> int:
    # Imported here: only this command looks at processes.
    from rose.node.guest.kill_switch import end_guests

    file = _kill_file(args.folder)
    ended = end_guests(args.folder, file, args.within)
    if ended.barred:
        _say(f"{file} is set: no guest starts until `rose unkill {args.folder}` takes it back")
    else:
        _say(f"{file} cannot be written and no daemon runs: one that starts may start guests anew")
    for guest in ended.guests:
        _say(f"{guest.name} (process {guest.pid}) {guest.outcome}")
    return 0 if ended.barred and all(guest.in_time for guest in ended.guests) else 1


def _unkill(args: argparse.Namespace) -> int:
    file = _kill_file(args.folder)
    try:
        file.unlink()
    except FileNotFoundError:
        return _say(f"{file} was not set")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be removed ({error.strerror}); check its owner"
        ) from error
    return _say(f"{file} is gone: guests may start again")


def _kill_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the run folder of a node")
    return folder / KILL_FILE


def _say(line: str) -> int:
    sys.stdout.write(line + "\n")
    return 0
