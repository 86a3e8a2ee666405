"""Panels of the fleet: each answers one question, with each figure's bound beside it.

What no scheduler knows is not drawn: reclaim times, weight bytes and store latencies are in
Prometheus, whose dashboards say them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from elastic_scheduler import HarvestMode
from rose.dashboard.history import FEWEST_REQUESTS, Spent
from rose.dashboard.journal import ASKED, Decision
from rose.dashboard.model import STATES, Model, NodeRow
from rose.dashboard.text import NO_DATA, clock, count, day, latency, share, size, span
from rose.dashboard.urls import url
from rose.dashboard.views.page import Bar, Cell, Chart, Column, Facts, Line, Note, Panel, Row, Table
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.observed import LeaseSeen

GIB: Final = 1 << 30
# Points of a chart that its table shows.
FIGURES: Final = 15
MOST_JOBS: Final = 48
# Texts of the operator's stops; `rose resume` ends each of them.
STOPS: Final = {
    HarvestMode.HOLD: Cell(
        "Held by the operator: no new leases; `rose resume` ends the hold", "warn"
    ),
    HarvestMode.HOLD_AND_DRAIN: Cell(
        "Draining by the operator: leases are given back; `rose resume` ends it", "warn"
    ),
    HarvestMode.OFF: Cell(
        "Stopped by the operator: guests are ended; `rose resume` ends it", "bad"
    ),
}
UNKNOWN = Cell(NO_DATA, "quiet")


def mode_of(model: Model) -> Cell:
    """Return the cluster's mode in a sentence."""
    look = model.look
    if look.observed is None:
        if look.leader and look.leader != look.me:
            return Cell(f"Standby: the scheduler at {look.leader} leads, ask its dashboard", "warn")
        return Cell("Standby: no scheduler is known to lead; nothing new is lent", "bad")
    if model.seen.stop in STOPS:
        return STOPS[model.seen.stop]
    if model.seen.acts:
        return Cell("Active: what policies allow is lent", "good")
    if model.seen.policies:
        return Cell("Advisory: nothing is lent; what would be lent is shown", "quiet")
    return Cell("Off: no capacity policy is in force, so nothing is lent", "quiet")


def cluster(model: Model) -> Panel:
    """Is it on, and is it worth it?"""
    act = model.look.journal.last_act
    parts = tuple(
        (state, Cell(count(number), STATES[state], url("/nodes", state=state), value=float(number)))
        for state, number in model.states.items()
    )
    lent = Cell(f"{size(model.lent_bytes)} of {size(model.lendable_bytes)} that policies allow")
    working = model.working_guests
    used = (
        NO_DATA
        if working is None
        else f"{working:.1f} guests' worth of {_hosts(model.lendable_gpus)}"
    )
    late = Cell(
        f"{model.late} of {len(model.nodes)}, at most 0",
        "bad" if model.late else "good",
        url("/nodes", state="late") if model.late else "",
    )
    facts = (
        ("KV memory lent", lent),
        ("Compute used", Cell(used)),
        ("Guest tokens", Cell(_rate(model.history.fleet_tok_s(), "tokens/s"))),
        ("Hosts over their target", late),
        ("Gateways that report", Cell(count(model.seen.gateways))),
        ("Last change by an operator", _act(act, model.look.since_s)),
    )
    return Panel(
        "cluster",
        "Cluster",
        "Is it on, and is it worth it?",
        (Bar("states", "Nodes by state", parts), Facts("sums", facts), fleet_chart(model)),
    )


def fleet_chart(model: Model) -> Chart:
    """Lent memory and tokens, with hosts that miss a target under the same axis."""
    times, lines = model.history.fleet()
    newest = model.history.newest_of_fleet()
    columns = ("Time", "KV lent", "Tokens/s", "Late hosts", "Nodes lending")
    rows = tuple(
        Row(
            str(at_s),
            (
                Cell(clock(at_s or 0.0)),
                Cell(size(lines[0][at])),
                Cell(count(lines[1][at])),
                Cell(count(lines[2][at])),
                Cell(count(lines[3][at])),
            ),
        )
        for at, at_s in sparse(times)
    )
    return Chart(
        "fleet",
        "Lent memory, tokens, and hosts over their target",
        "/series",
        (
            Line("KV lent (GiB)", "GiB", "guest"),
            Line("tokens/s", "tok/s", "work"),
            Line("late hosts", "hosts", "host"),
        ),
        (newest[0], gib(newest[1]), newest[2], newest[3]),
        figures("fleet-figures", "Fleet", columns, rows),
    )


def budget(model: Model) -> Panel:
    rows = []
    minute = model.history.minute
    for name, ledger in sorted(model.history.ledgers.items()):
        left = model.look.budget_left.get(name)
        hour, hours = ledger.burn(minute, 60), ledger.burn(minute, 360)
        lent, alone = ledger.spent(minute, 60)
        rows.append(
            Row(
                name,
                (
                    Cell(name or "(no deployment)"),
                    Cell(share(ledger.objective)),
                    Cell(share(left), "bad" if left is not None and left <= 0 else ""),
                    _burn(hour),
                    _burn(hours),
                    Cell(_empty(left, hours)),
                    Cell(_missed(lent)),
                    Cell(_missed(alone)),
                ),
            )
        )
    columns = (
        Column("Deployment"),
        Column("Objective", number=True),
        Column("Left of 30 days", number=True),
        Column("Burn, 1 h (at most 1)", number=True, hint="1 spends the budget in 30 days"),
        Column("Burn, 6 h (at most 1)", number=True),
        Column("Empty in", number=True, hint="at the rate of the last 6 h"),
        Column("Missed beside a guest, 1 h", number=True),
        Column("Missed without one, 1 h", number=True),
    )
    table = Table(
        "budgets", "SLO budgets by deployment", columns, tuple(rows), "No host has said anything."
    )
    return Panel("budget", "Budget", "How long can this go on?", (table,))


def hosts(model: Model, rows: tuple[NodeRow, ...], key: str = "nodes") -> Table:
    """Does anyone pay for it? A row for each node, the host beside its guests."""
    columns = (
        Column("Node"),
        Column("State"),
        Column("TTFT p95 / target", number=True),
        Column("TPOT p95 / target", number=True),
        Column("Host busy", number=True),
        Column("Waiting", number=True),
        Column("Guests"),
        Column("Duty", number=True, hint="share of the time in which leased guests made steps"),
        Column("KV lent", number=True),
        Column("Would lend", number=True),
        Column("Why not more"),
    )
    return Table(key, "Nodes", columns, tuple(map(_node, rows)), "No node is like that.")


def guests_of(row: NodeRow) -> str:
    """Guests by what they do: `2 run, 1 freeze`."""
    counted: dict[str, int] = {}
    for each in row.guests:
        word = each.state if each.state not in ("", "healthy") else each.mode or "idle"
        counted[word] = counted.get(word, 0) + 1
    return ", ".join(f"{number} {word}" for word, number in sorted(counted.items())) or "none"


def leases(found: Iterable[tuple[LeaseSeen, str, str]]) -> Table:
    """Return the table of leases, each with its node and that node's state."""
    columns = (
        Column("Replica"),
        Column("Node"),
        Column("Job"),
        Column("Epoch", number=True),
        Column("State"),
        Column("Left", number=True, hint="unless it is renewed, each second"),
        Column("Last decision"),
    )
    rows = tuple(_lease(*each) for each in found)
    return Table("leases", "Leases", columns, rows, "No lease lives.")


def _lease(each: LeaseSeen, node: str, state: str) -> Row:
    lost = state in ("silent", "away")
    cells = (
        Cell(each.lease.replica),
        Cell(node or "(not attached)", href=url("/node", name=node) if node else ""),
        Cell(each.lease.job),
        Cell(str(each.lease.epoch)),
        Cell(f"node {state}" if lost else each.lease.state.value, "bad" if lost else ""),
        Cell(span(each.left_s)),
        Cell(each.why),
    )
    return Row(each.lease.id, cells)


def lease_rates(model: Model) -> Facts:
    """Grants and ends of the last minutes."""
    minutes = model.look.journal.minutes
    labels = ("granted", "released", "revoked", "expired", "refused")
    facts = tuple(
        (f"{how}, last {len(minutes) or 1} min", Cell(count(sum(m.get(how, 0) for m in minutes))))
        for how in labels
    )
    return Facts("rates", (("alive", Cell(count(len(model.seen.leases)))), *facts))


def versions(model: Model) -> Panel:
    """Is anyone behind?"""
    rows = []
    for job in model.seen.jobs[:MOST_JOBS]:
        name, bound = job.record.job, job.record.max_staleness
        behind = model.versions[name]
        late = sum(number for lag, number in behind.items() if lag > bound or lag < 0)
        demand = job.demand
        run = job.run
        rows.append(
            Row(
                name,
                (
                    Cell(name, href=url("/leases", job=name)),
                    Cell(str(job.latest)),
                    Cell(count(behind.total())),
                    Cell(_strip(behind)),
                    Cell(f"{late}, at most 0", "warn" if late else "good"),
                    Cell(str(bound)),
                    UNKNOWN if demand is None else Cell(count(demand.turns)),
                    UNKNOWN if demand is None else Cell(count(demand.made_tok_s)),
                    UNKNOWN
                    if run is None
                    else Cell("lives" if run.live else "ended" if run.ended else "silent"),
                ),
            )
        )
    columns = (
        Column("Job"),
        Column("Newest version", number=True),
        Column("Leased", number=True),
        Column("Replicas by versions behind"),
        Column("Beyond the bound", number=True),
        Column("Bound", number=True),
        Column("Turns", number=True),
        Column("Tokens/s", number=True),
        Column("Trainer"),
    )
    table = Table("versions", "Jobs and their versions", columns, tuple(rows), "No job is there.")
    return Panel("versions", "Versions", "Is anyone behind?", (table,))


def moved(model: Model) -> Panel:
    pairs = sorted(model.seen.usage.items(), key=lambda item: -item[1].compute_s)
    rows = tuple(
        Row(
            f"{owner}\0{job}",
            (
                Cell(owner or "(no owner)"),
                Cell(job),
                Cell(f"{lent.seconds / 3600:.2f} h"),
                Cell(f"{lent.compute_s / 3600:.2f} h"),
                Cell(f"{lent.byte_s / GIB / 3600:.1f} GiB h"),
                Cell(count(lent.tokens)),
            ),
        )
        for (owner, job), lent in pairs[:20]
    )
    columns = (
        Column("Owner"),
        Column("Job"),
        Column("Leased", number=True),
        Column("Compute", number=True),
        Column("KV memory", number=True),
        Column("Tokens", number=True),
    )
    table = Table("usage", "Lent by owner and job", columns, rows, "Nothing was lent lately.")
    note = Note(
        "usage-note",
        Cell(
            "Since this scheduler began to lead; `rose usage` has what was before. Bytes of weights"
            " are counted by nodes: see the Grafana dashboard Versions and weights.",
            "quiet",
        ),
    )
    return Panel("usage", "Bytes", "What moved?", (table, note))


def decisions(found: tuple[Decision, ...], since_s: float, key: str = "decisions") -> Table:
    columns = (Column("Time"), Column("By"), Column("What"), Column("Node"), Column("Inputs"))
    rows = tuple(
        Row(
            f"{each.at_s} {each.event} {each.node}",
            (
                Cell(day(each.at_s)),
                Cell(by(each)),
                Cell(each.what),
                Cell(each.node, href=url("/node", name=each.node) if each.node else ""),
                Cell(each.said),
            ),
        )
        for each in found
    )
    return Table(
        key, "Decisions, newest first", columns, rows, f"Nothing since {day(since_s)}, the start."
    )


def by(decision: Decision) -> str:
    asked = decision.event in ASKED
    return decision.by or ("a caller without a certificate" if asked else "the scheduler")


def policies(model: Model) -> Table:
    rows = tuple(
        Row(
            policy.name,
            (
                Cell(policy.name),
                Cell(policy.mode.value),
                Cell(
                    policy.stop_policy.value, "warn" if policy.stop_policy.value != "None" else ""
                ),
                Cell(f"{policy.canary.percent:g}%"),
                Cell(
                    model.seen.halted.get(policy.name, "no"),
                    "bad" if policy.name in model.seen.halted else "",
                ),
            ),
        )
        for policy in model.seen.policies
    )
    columns = (
        Column("Policy"),
        Column("Mode"),
        Column("Stop"),
        Column("Canary", number=True),
        Column("Canary halted"),
    )
    return Table("policies", "Policies in force", columns, rows, "No policy is in force.")


def holds(model: Model) -> Facts:
    """Return the number of nodes held back, by kind of limit."""
    facts = tuple(
        (kind.replace("_", " "), Cell(f"{number} nodes")) for kind, number in model.holds.items()
    )
    return Facts("holds", facts or (("nothing", Cell("no node is held back")),))


def advised(rows: tuple[NodeRow, ...]) -> Table:
    columns = (
        Column("Node"),
        Column("Would lend now", number=True),
        Column("Compute now", number=True),
        Column("Over", number=True),
        Column("KV memory since", number=True),
        Column("Compute since", number=True),
        Column("Why not more"),
    )
    made = tuple(
        Row(
            row.name,
            (
                Cell(row.name, href=url("/node", name=row.name)),
                Cell(size(row.seen.advice.now.memory_bytes)),
                Cell(share(row.seen.advice.now.compute)),
                Cell(span(row.seen.advice.over_s)),
                Cell(f"{row.seen.advice.byte_s / GIB / 3600:.2f} GiB h"),
                Cell(f"{row.seen.advice.compute_s / 3600:.2f} h"),
                Cell(row.why),
            ),
        )
        for row in rows
        if row.seen
    )
    return Table(
        "advice",
        "Nodes that only advise",
        columns,
        made,
        "No node is in Advisory or outside a canary.",
    )


# ---- cells ----


def of_target(said_s: float, target_s: float, host: pb.HostTelemetry) -> Cell:
    """A latency with its target: `420 ms / 500 ms`."""
    if not host.window_requests:
        return UNKNOWN
    bound = latency(target_s) if target_s else "none"
    if host.window_requests < FEWEST_REQUESTS:
        hint = f"{host.window_requests} requests: too few to say"
        return Cell(f"{latency(said_s)} / {bound}", "quiet", hint=hint)
    if not target_s:
        return Cell(f"{latency(said_s)} / {bound}")
    if said_s > target_s:
        return Cell(f"late: {latency(said_s)} / {bound}", "bad")
    return Cell(f"{latency(said_s)} / {bound}", "good")


def _node(row: NodeRow) -> Row:
    host, seen = row.host, row.seen
    name = Cell(row.name, href=url("/node", name=row.name))
    state = f"{row.state} {span(row.away_s)}" if row.state == "away" else row.state
    return Row(
        row.name,
        (
            name,
            Cell(state, row.tone),
            of_target(host.ttft_p95_s, host.ttft_target_s, host) if host else UNKNOWN,
            of_target(host.tpot_p95_s, host.tpot_target_s, host) if host else UNKNOWN,
            Cell(share(seen.busy) if seen else NO_DATA),
            Cell(count(host.waiting)) if host else UNKNOWN,
            Cell(guests_of(row)),
            Cell(share(row.duty)) if row.duty is not None else Cell("–", "quiet", hint="no lease"),
            Cell(size(row.lent_bytes)),
            Cell(size(seen.advice.now.memory_bytes) if seen else NO_DATA),
            Cell(row.why),
        ),
    )


def _hosts(gpus: float | None) -> str:
    return NO_DATA if gpus is None else f"{gpus:.1f} hosts' idle compute"


def _rate(rate: float | None, unit: str) -> str:
    return NO_DATA if rate is None else f"{count(rate)} {unit}"


def _act(act: Decision | None, since_s: float) -> Cell:
    if act is None:
        return Cell(f"none since {day(since_s)}", "quiet", "/decisions")
    return Cell(f"{act.what} ({act.said}) by {by(act)}, {day(act.at_s)}", "", "/decisions")


def _burn(rate: float | None) -> Cell:
    if rate is None:
        return Cell("too few requests to say", "quiet")
    return Cell(f"{rate:.2f}", "bad" if rate > 1 else "good")


def _empty(left: float | None, burn: float | None) -> str:
    if left is None or burn is None:
        return NO_DATA
    if left <= 0:
        return "now"
    return span(left / burn * 30 * 86_400) if burn > 0 else "never"


def _missed(spent: Spent) -> str:
    if spent.missed is None:
        return "no requests"
    return f"{spent.missed:.2%} of {count(spent.good + spent.bad)}"


def _strip(behind: Mapping[int, int]) -> str:
    said = [
        f"{number} at {'other weights' if lag < 0 else 'newest' if not lag else f'-{lag}'}"
        for lag, number in sorted(behind.items())
    ]
    return ", ".join(said) or "none leased"


def gib(number: float | None) -> float | None:
    """Bytes in GiB, for a chart."""
    return None if number is None else round(number / GIB, 3)


def sparse(times: Sequence[float | None]) -> list[tuple[int, float | None]]:
    """Some points of all, newest first."""
    step = max(1, -(-len(times) // FIGURES))
    return [(at, times[at]) for at in range(len(times) - 1, -1, -step)]


def figures(key: str, title: str, columns: tuple[str, ...], rows: tuple[Row, ...]) -> Table:
    """The table behind a chart."""
    named = tuple(Column(each, number=at > 0) for at, each in enumerate(columns))
    return Table(key, f"{title}: figures as the page was loaded", named, rows, NO_DATA)
