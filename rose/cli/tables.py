"""Tables and lines about a fleet that several commands share, from the read model alone."""

from collections.abc import Iterable, Sequence

from rose.command_line.output import Said, Table, Tone, TonedText, ago, bytes_of, share_of
from rose.operate.fleet import (
    Capacity,
    Fleet,
    HostRow,
    Job,
    Mode,
    NodeState,
    NodeStatus,
    ReplicaRow,
    names,
)

_TONES = {
    "attached": Tone.GOOD,
    "silent": Tone.CARE,
    "away": Tone.BAD,
    "healthy": Tone.GOOD,
    "starting": Tone.CARE,
    "backoff": Tone.CARE,
    "failed": Tone.BAD,
    "run": Tone.GOOD,
    "throttle": Tone.CARE,
    "freeze": Tone.CARE,
    "drain": Tone.CARE,
    "kill": Tone.BAD,
    "active": Tone.GOOD,
    "hold": Tone.CARE,
    "off": Tone.FAINT,
}
# A latency this close to its target is coloured.
CLOSE = 0.8
NEAR_FULL = 0.8


def toned(word: str) -> TonedText:
    """Return a state's word, or `-`, in the state's colour."""
    return TonedText(word or "-", _TONES.get(word, Tone.PLAIN))


def summary(fleet: Fleet) -> str:
    """Return the fleet in one line: `harvest ACTIVE, job grpo at version 3 (staleness <= 1), 2
    replicas, 1 leased`.
    """
    own = ", ".join(f"{name} {_loud(mode)}" for name, mode in sorted(fleet.overrides.items()))
    jobs = ", ".join(
        f"job {job.name} at version {job.version} (staleness <= {job.max_staleness}{_demand(job)})"
        for job in fleet.jobs
    )
    leased = sum(replica.lease is not None for replica in fleet.replicas)
    stalled = (
        f", nothing new is leased: its store has not answered for {fleet.store_stalled_s:.0f} s"
        if fleet.store_stalled_s
        else ""
    )
    return (
        f"harvest {_loud(fleet.harvest)}{f' ({own})' if own else ''}, {jobs or 'no job'},"
        f" {len(fleet.replicas)} replicas, {leased} leased{stalled}"
    )


def _loud(mode: Mode) -> str:
    return mode.value.upper()


def _demand(job: Job) -> str:
    if job.turns is None or job.owed_tokens is None or job.made_tok_s is None:
        return ""
    return f"; {job.turns} turns, {job.owed_tokens:.0f} tokens owed, {job.made_tok_s:.0f} tokens/s"


def headlines(fleet: Fleet) -> tuple[Said, ...]:
    """Return the summary line, then a line for each thing that an operator should look at:
    troubles, silent nodes, other releases.
    """
    lines: list[Said] = [TonedText(summary(fleet), Tone.HEAD)]
    lines += [TonedText(f"scheduler: {trouble}", Tone.BAD) for trouble in fleet.troubles]
    for state, tone, what in (
        (NodeState.SILENT, Tone.CARE, "attached, and silent"),
        (NodeState.AWAY, Tone.BAD, "known, and not attached"),
    ):
        found = [node for node in fleet.nodes if node.state is state]
        if found:
            lines.append(TonedText(f"{len(found)} nodes are {what}: {names(found)}", tone))
    if skewed := fleet.skewed:
        lines.append(
            TonedText(
                f"{len(skewed)} nodes are not of the scheduler's release ({fleet.release}):"
                f" {_releases(skewed)}; upgrade them, or the scheduler",
                Tone.CARE,
            )
        )
    return tuple(lines)


def _releases(nodes: Iterable[NodeStatus]) -> str:
    by: dict[str, list[NodeStatus]] = {}
    for node in nodes:
        by.setdefault(node.release or "an older one", []).append(node)
    return "; ".join(f"{release}: {names(found)}" for release, found in sorted(by.items()))


# ---- nodes ----

NODE_COLUMNS = (
    "NODE", "STATE", "RELEASE", "HEARD", "MODE", "LENDS", "TTFT P95/TARGET", "TPOT P95/TARGET",
    "BUSY", "KV", "RUN+WAIT", "GUESTS", "HELD BACK BY",
)  # fmt: skip


def nodes_table(fleet: Fleet, nodes: Sequence[NodeStatus]) -> Table:
    """Return a table with a row for each host of each node: latencies against their targets, load,
    and lent capacity.
    """
    replicas = fleet.by_node()
    return Table(
        NODE_COLUMNS,
        tuple(
            _node_row(fleet, node, host, replicas[node.name])
            for node in nodes
            for host in node.hosts or (None,)
        ),
        "nodes",
        frozenset({"HEARD", "BUSY", "KV", "RUN+WAIT", "GUESTS"}),
        ("RELEASE", "HEARD", "RUN+WAIT", "BUSY", "GUESTS", "LENDS", "KV", "STATE", "MODE"),
    )


def _node_row(
    fleet: Fleet, node: NodeStatus, host: HostRow | None, replicas: Sequence[ReplicaRow]
) -> tuple[Said, ...]:
    capacity = node.capacity
    leased = [r for r in replicas if r.is_guest and r.lease is not None]
    return (
        host_name(node, host),
        toned(node.state.value),
        node.release or "-",
        ago(node.heard_s),
        _mode(fleet, capacity),
        lends(capacity),
        ttft(host),
        tpot(host),
        share_of(host.busy_share if host else None),
        kv(host),
        f"{host.running}+{host.waiting}" if host else "-",
        str(len(leased)),
        "; ".join(capacity.limits) if capacity and capacity.limits else "-",
    )


def _mode(fleet: Fleet, capacity: Capacity | None) -> Said:
    if capacity is None:
        return toned(fleet.harvest.value)
    if capacity.mode is capacity.would:
        return toned(capacity.mode.value)
    return TonedText(f"{capacity.mode.value}, would {capacity.would.value}", Tone.FAINT)


def lends(capacity: Capacity | None) -> str:
    """Return the capacity that a node lends now, or would lend, as `38.0 GiB, 61%`; `-` if
    unknown.
    """
    if capacity is None or (capacity.lend_bytes is None and capacity.lend_compute is None):
        return "-"
    return f"{bytes_of(capacity.lend_bytes)}, {share_of(capacity.lend_compute)}"


def ttft(host: HostRow | None) -> Said:
    """Return a host's p95 TTFT and target as `120 / 2000 ms`, coloured by its distance from the
    target; `-` without a host.
    """
    if host is None:
        return "-"
    return _latency(host, host.ttft_p95_s, host.ttft_target_s, 0)


def tpot(host: HostRow | None) -> Said:
    """Return a host's p95 TPOT and target as `31.0 / 150 ms`, coloured by its distance from the
    target; `-` without a host.
    """
    if host is None:
        return "-"
    return _latency(host, host.tpot_p95_s, host.tpot_target_s, 1)


def _latency(host: HostRow, at_s: float, target_s: float, digits: int) -> Said:
    target = f"{target_s * 1e3:.0f} ms"
    if not host.window_requests and not at_s:
        return TonedText(f"idle / {target}", Tone.FAINT)
    text = f"{at_s * 1e3:.{digits}f} / {target}"
    if target_s <= 0 or at_s < CLOSE * target_s:
        return TonedText(text, Tone.GOOD)
    return TonedText(text, Tone.CARE) if at_s <= target_s else TonedText(f"{text} MISSED", Tone.BAD)


def host_name(node: NodeStatus, host: HostRow | None) -> str:
    """Return the node's name, `serving-0`, or `serving-0/chat` for a host that has a name of its
    own.
    """
    return f"{node.name}/{host.name}" if host and host.name else node.name


def kv(host: HostRow | None) -> Said:
    """Return the share of the host's KV cache that is in use, as `61%`; `-` if unknown."""
    share = host.kv_share if host else None
    if share is None:
        return "-"
    return TonedText(share_of(share), Tone.CARE if share > NEAR_FULL else Tone.PLAIN)


# ---- replicas ----

REPLICA_COLUMNS = (
    "REPLICA", "KIND", "NODE", "HEALTHY", "JOB", "VERSION", "LEASE", "EXPIRES", "ENGINE", "GRANT",
    "DUTY", "KV", "RUN+WAIT", "TOKENS", "WHY",
)  # fmt: skip


def replicas_table(replicas: Sequence[ReplicaRow], title: str = "replicas") -> Table:
    """Return a table with a row for each replica: its job, lease, engine and load, and the reason
    for its state.
    """
    return Table(
        REPLICA_COLUMNS,
        tuple(map(_replica_row, replicas)),
        title,
        frozenset({"VERSION", "EXPIRES", "DUTY", "KV", "RUN+WAIT", "TOKENS"}),
        ("KIND", "TOKENS", "RUN+WAIT", "EXPIRES", "VERSION", "KV", "ENGINE", "NODE", "LEASE"),
    )


def _replica_row(replica: ReplicaRow) -> tuple[Said, ...]:
    lease, engine = replica.lease, replica.engine
    whys = [lease.why if lease else ""]
    if engine:
        whys = [engine.why, engine.late and f"not at the newest weights: {engine.late}", *whys]
        whys += [engine.kv_kept and f"gives no KV memory back: {engine.kv_kept}"]
    return (
        replica.name,
        replica.kind,
        replica.node or "-",
        TonedText("yes", Tone.GOOD) if replica.healthy else TonedText("no", Tone.CARE),
        lease.job if lease and lease.job else replica.job or "-",
        version(replica),
        f"epoch {lease.epoch}, {lease.state}" if lease else "-",
        f"{lease.expires_in_s:.1f} s" if lease else "-",
        engine_state(replica),
        toned(engine.grant) if engine else "-",
        share_of(engine.duty if engine else None),
        bytes_of(engine.kv_bytes) if engine and engine.kv_bytes else "-",
        f"{engine.running}+{engine.waiting}" if engine else "-",
        str(engine.tokens_total) if engine else "-",
        "; ".join(why for why in whys if why) or "-",
    )


def engine_state(replica: ReplicaRow) -> Said:
    """Return the state of a replica's engine, with its number of restarts if it has any; `-`
    without an engine.
    """
    if replica.engine is None:
        return "-"
    cell = toned(replica.engine.state)
    again = replica.engine.restarts
    return TonedText(f"{cell.text}, {again} restarts", Tone.CARE) if again else cell


def version(replica: ReplicaRow) -> str:
    """Return the version of weights that a replica holds: `3`, or `3 of JOB` if they are not its
    lease's job's.
    """
    of = f" of {replica.held_job}" if replica.held_job else ""
    return f"{replica.version}{of}"
