"""`rose jobs`: the registered jobs, whose they are, and which replica serves which version.

rose jobs [list]      a row for each job
rose jobs show JOB    its run, its versions, and what each of its replicas serves
rose jobs end JOB     its leases are released; name and newest version are kept
rose jobs drop JOB    besides, its chain and its run are forgotten; refused while a run lives
"""

import argparse
import sys
from collections.abc import Iterable
from datetime import UTC, datetime

from rich.markup import escape
from rich.table import Table

from rose.cli.commands import SchedulerClient, console_of
from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2 as pb


def run_jobs(args: argparse.Namespace, scheduler: SchedulerClient) -> int:
    """Carry out `rose jobs`. Raises `RoseError`."""
    if args.do == "list":
        if args.job:
            raise ConfigError(f"`rose jobs list` lists all of them; leave {args.job!r} out")
        return list_jobs(scheduler.snapshot())
    if not args.job:
        raise ConfigError(
            f"say which job to {args.do}: `rose jobs {args.do} JOB`; `rose jobs` lists them"
        )
    if args.force and args.do != "drop":
        raise ConfigError(
            f"--force is of `rose jobs drop`; `rose jobs {args.do}` has no use for it"
        )
    match args.do:
        case "show":
            return show_job(scheduler.snapshot(), args.job)
        case "end":
            released = scheduler.end_job(args.job)
            return _say(f"job {args.job} is ended; {released} leases are being released")
    before = next((each for each in scheduler.snapshot().jobs if each.job == args.job), None)
    versions = scheduler.drop_job(args.job, force=args.force)
    return _say(f"job {args.job} is dropped: {_dropped(before, versions)}")


def _dropped(before: pb.JobView | None, versions: int) -> str:
    said = [f"{versions} versions are forgotten"]
    if before is not None and before.HasField("run"):
        fenced = ", which is fenced" if before.run.live else ""
        said.append(f"its run was that of {before.run.holder}{fenced}")
    if before is not None:
        said.append(f"{before.leased} leases are being released")
        if before.latest_version:
            said.append(f"a new run's first version is {before.latest_version + 1}")
    return "; ".join(said)


def list_jobs(snapshot: pb.SnapshotReply) -> int:
    """Print a row for each job: what it has, what it may have, and whether a trainer lives."""
    if not snapshot.jobs:
        return _say("no job is registered")
    names = ("job", "model", "version", "staleness", "weight", "replicas", "guests", "turns", "run")
    table = Table(*names, box=None)
    for job in snapshot.jobs:
        quota = f" of {job.max_guests}" if job.max_guests else ""
        table.add_row(
            escape(job.job),
            escape(job.model or "-"),
            str(job.latest_version),
            f"<= {job.max_staleness}",
            f"{job.weight:g}",
            str(job.leased),
            f"{job.guests}{quota}",
            str(job.turns) if job.demand_known else "unknown",
            _run_state(job),
        )
    console_of().print(table)
    return 0


def show_job(snapshot: pb.SnapshotReply, name: str) -> int:
    """Print a job's run, its versions, and which replica serves which. RefusedError for none."""
    job = next((each for each in snapshot.jobs if each.job == name), None)
    if job is None:
        raise RefusedError(f"job {name} is not registered; `rose jobs` lists those that are")
    console = console_of()
    rows = [row for row in snapshot.replicas if row.job == name]
    for line in (_run_line(job), _chain_line(job), _served(rows)):
        console.print(line, markup=False, highlight=False)
    if rows:
        table = Table("replica", "kind", "node", "serves", "state", box=None)
        for row in rows:
            kind = pb.ReplicaKind.Name(row.kind).removeprefix("REPLICA_KIND_").lower()
            foreign = row.held_job not in ("", name)
            serves = f"{row.policy_version} of {row.held_job}" if foreign else row.policy_version
            state = "serving" if row.healthy else "syncing"
            table.add_row(escape(row.id), kind, escape(row.node), escape(str(serves)), state)
        console.print(table)
    return 0


def _run_state(job: pb.JobView) -> str:
    if not job.HasField("run"):
        return "none yet" if job.standing else "-"
    return "ended" if job.run.ended else "live" if job.run.live else "silent"


def _run_line(job: pb.JobView) -> str:
    if not job.HasField("run"):
        standing = "no trainer has registered it: dedicated replicas only"
        return f"job {job.job}: {standing if job.standing else 'its trainer names no run'}"
    run = job.run
    since = datetime.fromtimestamp(run.since_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    state = f"last sign {run.silent_s:.0f} s ago"
    if run.ended:
        state = "ended"
    elif not run.live:
        state += ", so another may begin"
    return f"job {job.job}: run {run.run} of {run.holder}, since {since}; {state}"


def _chain_line(job: pb.JobView) -> str:
    model = job.model or "what replicas start with"
    if not job.chain:
        return f"versions: none yet; version 0 is {model}"
    begins = f"a base, version {job.first_version}" if job.base else model
    return f"versions: newest {job.latest_version}; {job.chain} known, from {begins} on"


def _served(rows: Iterable[pb.Replica]) -> str:
    counts: dict[int, int] = {}
    for row in rows:
        if row.healthy:
            counts[row.policy_version] = counts.get(row.policy_version, 0) + 1
    each = [f"version {version} by {count}" for version, count in sorted(counts.items())]
    return f"served: {', '.join(each) or 'by no replica'}"


def _say(line: str) -> int:
    sys.stdout.write(line + "\n")
    return 0
