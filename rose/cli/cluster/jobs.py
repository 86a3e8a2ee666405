"""`rose jobs`: the registered jobs, their owners, and the version that each replica serves.

rose jobs [list]      a row for each job
rose jobs show JOB    its run, its versions, and the version that each of its replicas serves
rose jobs end JOB     release its leases; its name and newest version are kept
rose jobs drop JOB    besides, forget its chain and its run; refused while a run lives
"""

import argparse
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from rose.cli.options import add_dry_run, add_scheduler_options, client_of
from rose.cli.tables import version
from rose.command_line.output import (
    Said,
    Table,
    Tone,
    TonedText,
    View,
    add_output_options,
    say,
    show,
)
from rose.command_line.parser import Parser
from rose.errors import ConfigError, RefusedError
from rose.operate.fleet import Fleet, Job, ReplicaRow, fleet_of

COLUMNS: Final = (
    "JOB", "MODEL", "VERSION", "STALENESS", "WEIGHT", "REPLICAS", "GUESTS", "TURNS", "RUN",
)  # fmt: skip
RIGHT: Final = frozenset({"VERSION", "WEIGHT", "REPLICAS", "TURNS"})


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose jobs`."""
    made = Parser(prog)
    verbs = ("list", "show", "end", "drop")
    made.add_argument("do", nargs="?", choices=verbs, default="list", help="default list")
    made.add_argument("job", nargs="?", default="", metavar="JOB", help="which one")
    made.add_argument(
        "--force", action="store_true", help="drop a job though its trainer lives, and fence that"
    )
    add_dry_run(made)
    add_scheduler_options(made)
    add_output_options(made, watch=True)
    made.set_defaults(run=_run)
    return made


def _run(args: argparse.Namespace) -> int:
    _check(args)
    scheduler = client_of(args)
    if args.do in ("list", "show"):
        view = show_job if args.do == "show" else list_jobs
        show(args, lambda: view(fleet_of(scheduler.snapshot()), args.job))
        return 0
    before = fleet_of(scheduler.snapshot())
    if args.dry_run:
        say(_would(args.do, _known(before, args.job)))
    elif args.do == "end":
        released = scheduler.end_job(args.job)
        say(f"job {args.job} is ended; {released} leases are being released")
    else:
        job = next((each for each in before.jobs if each.name == args.job), None)
        versions = scheduler.drop_job(args.job, force=args.force)
        say(f"job {args.job} is dropped: {_dropped(job, versions)}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.do == "list" and args.job:
        raise ConfigError(f"`rose jobs list` lists all of them; leave {args.job!r} out")
    if args.do != "list" and not args.job:
        raise ConfigError(
            f"say which job to {args.do}: `rose jobs {args.do} JOB`; `rose jobs` lists them"
        )
    if args.force and args.do != "drop":
        raise ConfigError(
            f"--force is of `rose jobs drop`; `rose jobs {args.do}` has no use for it"
        )
    acts = args.do in ("end", "drop")
    if args.dry_run and not acts:
        raise ConfigError(f"`rose jobs {args.do}` changes nothing; leave --dry-run out")
    if acts and args.watch is not None:
        raise ConfigError(f"--watch looks; `rose jobs {args.do}` acts, so leave it out")


def _would(do: str, job: Job) -> str:
    leases = f"{job.leased} leases would be released"
    if do == "end":
        return f"job {job.name} would be ended; {leases}"
    lives = (
        "; refused without --force, since its run lives"
        if job.run and job.run.state == "live"
        else ""
    )
    return f"job {job.name} would be dropped: its {job.chain} versions forgotten; {leases}{lives}"


def _dropped(before: Job | None, versions: int) -> str:
    said = [f"{versions} versions are forgotten"]
    if before is not None and before.run is not None:
        fenced = ", which is fenced" if before.run.state == "live" else ""
        said.append(f"its run was that of {before.run.holder}{fenced}")
    if before is not None:
        said.append(f"{before.leased} leases are being released")
        if before.version:
            said.append(f"a new run's first version is {before.version + 1}")
    return "; ".join(said)


def jobs_table(jobs: Sequence[Job], title: str = "") -> Table:
    """Return a table with a row for each job: model, version, limits, replicas, turns, and the
    state of its trainer's run.
    """
    return Table(COLUMNS, tuple(map(_row, jobs)), title, RIGHT)


def _row(job: Job) -> tuple[Said, ...]:
    bounds = [most for most in (job.max_guests, job.quota) if most is not None]
    quota = f" of {min(bounds)}" if bounds else ""
    return (
        job.name,
        job.model or "-",
        str(job.version),
        f"<= {job.max_staleness}",
        f"{job.weight:g}",
        str(job.leased),
        f"{job.guests}{quota}",
        "unknown" if job.turns is None else str(job.turns),
        _run_state(job),
    )


def list_jobs(fleet: Fleet, _: str) -> View:
    """Return a view with a table of all jobs. The second argument is not used."""
    held = tuple(f"job {job.name}: {job.held_back}" for job in fleet.jobs if job.held_back)
    lines = held if fleet.jobs else ("no job is registered",)
    return View(fleet.jobs, lines, (jobs_table(fleet.jobs),))


def show_job(fleet: Fleet, name: str) -> View:
    """Return a view of one job: its run, its versions, and a table of its replicas.

    Raises RefusedError for an unknown job.
    """
    job = _known(fleet, name)
    rows = [row for row in fleet.replicas if row.job == name]
    table = Table(
        ("REPLICA", "KIND", "NODE", "SERVES", "STATE"),
        tuple(
            (
                row.name,
                row.kind,
                row.node,
                version(row),
                TonedText("serving", Tone.GOOD) if row.healthy else TonedText("syncing", Tone.CARE),
            )
            for row in rows
        ),
    )
    data = {"job": job, "replicas": rows}
    held = (f"quota: {job.held_back}",) if job.held_back else ()
    return View(data, (_run_line(job), _chain_line(job), _served(rows), *held), (table,))


def _known(fleet: Fleet, name: str) -> Job:
    job = next((each for each in fleet.jobs if each.name == name), None)
    if job is None:
        raise RefusedError(f"job {name} is not registered; `rose jobs` lists those that are")
    return job


def _run_state(job: Job) -> Said:
    if job.run is None:
        return "none yet" if job.standing else "-"
    return TonedText(job.run.state, Tone.GOOD if job.run.state == "live" else Tone.CARE)


def _run_line(job: Job) -> str:
    if job.run is None:
        standing = "no trainer has registered it: dedicated replicas only"
        return f"job {job.name}: {standing if job.standing else 'its trainer names no run'}"
    run = job.run
    since = datetime.fromtimestamp(run.since_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    state = "ended" if run.state == "ended" else f"last sign {run.silent_s:.0f} s ago"
    if run.state == "silent":
        state += ", so another may begin"
    return f"job {job.name}: run {run.run} of {run.holder}, since {since}; {state}"


def _chain_line(job: Job) -> str:
    model = job.model or "what replicas start with"
    if not job.chain:
        return f"versions: none yet; version 0 is {model}"
    begins = f"a base, version {job.first_version}" if job.base else model
    return f"versions: newest {job.version}; {job.chain} known, from {begins} on"


def _served(rows: Iterable[ReplicaRow]) -> str:
    counts: dict[int, int] = {}
    for row in rows:
        if row.healthy:
            counts[row.version] = counts.get(row.version, 0) + 1
    each = [f"version {number} by {count}" for number, count in sorted(counts.items())]
    return f"served: {', '.join(each) or 'by no replica'}"
