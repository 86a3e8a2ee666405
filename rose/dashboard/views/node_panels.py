"""Panels of one node: its host's latency beside its guests' work, and why they do not more."""

from typing import Final

from rose.dashboard.history import CHANGES_KEPT, Change
from rose.dashboard.model import BROKEN_STATES, Model, NodeRow
from rose.dashboard.text import NO_DATA, clock, count, day, latency, share, size, span
from rose.dashboard.urls import url
from rose.dashboard.views.page import Cell, Chart, Column, Facts, Line, Panel, Row, Table
from rose.dashboard.views.panels import GIB, figures, gib, of_target, sparse
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.observed import LeaseSeen

# Labels of a node that a page shows.
MOST_LABELS: Final = 20


def host(model: Model, row: NodeRow) -> Panel:
    """Does anyone pay for it?"""
    seen, said = row.seen, row.host
    facts: list[tuple[str, Cell]] = [
        ("State", Cell(row.state, row.tone)),
        ("Heard", Cell("lately" if row.state not in ("silent", "away") else _unheard(row))),
    ]
    if said is not None:
        facts += [
            ("TTFT p95 / target", of_target(said.ttft_p95_s, said.ttft_target_s, said)),
            ("TTFT p50", Cell(latency(said.ttft_p50_s))),
            ("TPOT p95 / target", of_target(said.tpot_p95_s, said.tpot_target_s, said)),
            ("TPOT p50", Cell(latency(said.tpot_p50_s))),
            ("Requests that met their targets", Cell(count(said.slo_good))),
            ("Requests that missed one", Cell(count(said.slo_bad))),
            ("Running, waiting", Cell(f"{said.running}, {said.waiting}")),
            ("Watched through", Cell(said.source or "plugin")),
        ]
    if seen is not None:
        facts.append(("Host busy", Cell(share(seen.busy))))
        facts += [
            (f"Label {name}", Cell(value))
            for name, value in sorted(seen.labels.items())[:MOST_LABELS]
        ]
    blocks = (Facts("host", tuple(facts)), latency_chart(model, row), guest_chart(model, row))
    return Panel("host", "Host", "Does anyone pay for it?", blocks)


def latency_chart(model: Model, row: NodeRow) -> Chart:
    """The host's latencies, each with its target."""
    times, lines = model.history.node(row.name)
    newest = model.history.newest_of(row.name)
    said = row.host
    ttft_ms = _ms(said.ttft_target_s) if said else None
    tpot_ms = _ms(said.tpot_target_s) if said else None
    rows = tuple(
        Row(str(at_s), (Cell(clock(at_s or 0.0)), *(Cell(latency(lines[n][at])) for n in (0, 1))))
        for at, at_s in sparse(times)
    )
    return Chart(
        "latency",
        "Host: latency against its targets",
        url("/series", node=row.name),
        (
            Line("TTFT p95 (ms)", "TTFT ms", "host"),
            Line("TTFT target", "TTFT ms", "host", target=True),
            Line("TPOT p95 (ms)", "TPOT ms", "work"),
            Line("TPOT target", "TPOT ms", "work", target=True),
        ),
        (newest[0], _ms(newest[1]), ttft_ms, _ms(newest[2]), tpot_ms),
        figures("latency-figures", "Latency", ("Time", "TTFT p95", "TPOT p95"), rows),
    )


def guest_chart(model: Model, row: NodeRow) -> Chart:
    """Return the chart of the guests' work, with ticks where a guest was stopped."""
    times, lines = model.history.node(row.name)
    newest = model.history.newest_of(row.name)
    rows = tuple(
        Row(
            str(at_s),
            (
                Cell(clock(at_s or 0.0)),
                Cell(share(lines[3][at])),
                Cell(size(lines[4][at])),
                Cell(count(lines[5][at])),
                Cell(share(lines[2][at])),
            ),
        )
        for at, at_s in sparse(times)
    )
    return Chart(
        "guest",
        "Guests meanwhile: duty and lent memory, ticks where one was stopped",
        url("/series", node=row.name),
        (
            Line("duty (%)", "%", "guest"),
            Line("host busy (%)", "%", "host"),
            Line("KV lent (GiB)", "GiB", "work"),
        ),
        (newest[0], _percent(newest[4]), _percent(newest[3]), gib(newest[5])),
        figures(
            "guest-figures", "Guests", ("Time", "Duty", "KV lent", "Tokens/s", "Host busy"), rows
        ),
    )


def guests(model: Model, row: NodeRow) -> Panel:
    columns = (
        Column("Guest"),
        Column("Job"),
        Column("Engine"),
        Column("Mode"),
        Column("Why"),
        Column("Duty", number=True),
        Column("Turns", number=True),
        Column("KV memory", number=True),
        Column("Version", number=True),
        Column("Restarts", number=True),
    )
    jobs = {each.lease.replica: each.lease.job for each in row.leases}
    rows = tuple(Row(each.replica, _guest(each, jobs)) for each in row.guests)
    table = Table("guests", "Guests of this node", columns, rows, "It has said of no guest.")
    return Panel(
        "guests", "Guests", "What is it doing and why not more?", (table, _changes(model, row))
    )


def lent(row: NodeRow) -> Panel:
    columns = (
        Column("Replica"),
        Column("Job"),
        Column("Epoch", number=True),
        Column("State"),
        Column("Left", number=True),
        Column("Last decision"),
    )
    rows = tuple(Row(each.lease.id, _lease(each)) for each in row.leases)
    table = Table("node-leases", "Leases on this node", columns, rows, "No lease lives here.")
    return Panel("leases", "Leases", "Who holds what until when?", (table,))


def policy(row: NodeRow) -> Panel:
    seen = row.seen
    if seen is None:
        return Panel("policy", "Policy", "Who decided what?", ())
    byte_h, compute_h = seen.advice.byte_s / GIB / 3600, seen.advice.compute_s / 3600
    facts = (
        ("Mode that holds", Cell(seen.mode.value.replace("_", " "))),
        ("What Active would say", Cell(seen.verdict.would.value.replace("_", " "))),
        ("Why not more", Cell(row.why or "nothing holds it back")),
        ("Lends, or would", Cell(size(seen.advice.now.memory_bytes))),
        ("Compute that it lends, or would", Cell(share(seen.advice.now.compute))),
        (
            "Sum of both",
            Cell(f"over {span(seen.advice.over_s)}: {byte_h:.2f} GiB h, {compute_h:.2f} h"),
        ),
    )
    columns = (Column("Field"), Column("Value"), Column("Decided by"))
    rows = tuple(
        Row(path, (Cell(path), Cell(value), Cell(decider)))
        for path, value, decider in seen.verdict.policy.fields()
    )
    table = Table("fields", "Policy fields that hold", columns, rows, "No policy bounds it.")
    return Panel("policy", "Policy", "Who decided what?", (Facts("policy", facts), table))


def _changes(model: Model, row: NodeRow) -> Table:
    columns = (Column("Time"), Column("Guest"), Column("From"), Column("To"), Column("Why"))
    rows = tuple(
        Row(f"{each.at_s} {each.replica} {each.after}", _change(each))
        for each in model.history.changes(row.name)
    )
    return Table(
        "changes",
        f"Newest {CHANGES_KEPT} changes of mode",
        columns,
        rows,
        "No change was seen yet.",
    )


def _change(each: Change) -> tuple[Cell, ...]:
    return (
        Cell(day(each.at_s)),
        Cell(each.replica),
        Cell(each.before),
        Cell(each.after, "warn" if each.is_stop else ""),
        Cell(each.reason),
    )


def _guest(each: pb.GuestTelemetry, jobs: dict[str, str]) -> tuple[Cell, ...]:
    return (
        Cell(each.replica),
        Cell(jobs.get(each.replica, "no lease")),
        Cell(each.state or NO_DATA, "bad" if each.state in BROKEN_STATES else ""),
        Cell(each.mode or NO_DATA),
        Cell(each.reason),
        Cell(share(each.duty)),
        Cell(f"{each.running} run, {each.waiting} wait"),
        Cell(size(each.kv_bytes)),
        Cell(str(each.policy_version)),
        Cell(str(each.restarts), "warn" if each.restarts else ""),
    )


def _lease(each: LeaseSeen) -> tuple[Cell, ...]:
    return (
        Cell(each.lease.replica),
        Cell(each.lease.job),
        Cell(str(each.lease.epoch)),
        Cell(each.lease.state.value),
        Cell(span(each.left_s)),
        Cell(each.why),
    )


def _unheard(row: NodeRow) -> str:
    return f"not since {span(row.away_s if row.seen is None else row.seen.silent_s)}"


def _ms(seconds: float | None) -> float | None:
    return round(seconds * 1e3, 2) if seconds else None


def _percent(part: float | None) -> float | None:
    return None if part is None else round(100 * part, 1)
