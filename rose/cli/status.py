"""`rose status`: a snapshot as tables."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rose.rpc import rose_pb2 as pb

PIPE_WIDTH = 160  # columns when nobody watches: wide enough that no cell is cut


def show(snapshot: pb.SnapshotReply, console: Console | None = None) -> None:
    """Print one line about the cluster, then replicas, hosts and guests."""
    console = console or _console()
    console.print(summary(snapshot), markup=False, highlight=False)
    for trouble in snapshot.troubles:
        console.print(f"scheduler: {trouble}", markup=False, highlight=False)
    for table in (_replicas(snapshot), _hosts(snapshot), _guests(snapshot)):
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


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _mode(mode: "pb.HarvestMode.ValueType") -> str:
    return pb.HarvestMode.Name(mode).removeprefix("HARVEST_MODE_")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
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
            str(replica.policy_version),
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
            escape(host.node),
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
    return table
