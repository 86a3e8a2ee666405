"""Pages by their addresses: what each template is given, and which part of a long list.

`page_at` and `series_at` are all that an address can ask for; both are pure. What no scheduler
knows is not drawn: reclaim times, weight bytes and store latencies are in Prometheus.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity.budget_hold import BudgetLeft
from rose.dashboard.history import FEWEST_REQUESTS, Points, RequestCounts
from rose.dashboard.journal import JournalEntry, folded
from rose.dashboard.model import BROKEN_STATES, STATES, Model
from rose.dashboard.page import NO_DATA, Cell, Page, count, day, latency, span, url
from rose.dashboard.past import Past
from rose.rpc import rose_pb2 as pb
from slo.error_budget import DAY_S, PERIOD_S

GIB: Final = 1 << 30
# Points of a chart that its table shows.
FIGURES: Final = 15
# A page with its scripts stays below 150 kB.
ROWS: Final = 40
DECISIONS_OF_NODE: Final = 12
# Least number of misses that an SLO budget allows before what is left of it is shown.
FEWEST_MISSES: Final = 10
MOST_QUERY_CHARS: Final = 300
LATE: Final = "late"
KINDS: Final = ("all but leases and versions", "operators", "versions", "leases")
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

_ASKED: Final = ("q", "state", "page", "job", "name", "kind", "node", "range")

Query = Mapping[str, str]
Content = tuple[str, str, dict[str, Any]]
"""Template's name, page's title, and the template's variables besides the model."""


@dataclass(frozen=True, slots=True)
class ListPart:
    """Part of a long list that one page shows; before, after: addresses of the parts beside it.

    label: noun for the items. position: `1 to 50 of 120 nodes`. An address is "" if there is no
    such part.
    """

    items: Sequence[Any]
    label: str
    position: str
    before: str
    after: str


def page_at(
    model: Model,
    path: str,
    query: Query,
    cluster: str = "",
    past: Past | None = None,
    ranges: Sequence[str] = (),
) -> Page | None:
    """Return the rendered page of an address, None if there is no such page.

    past: what charts show instead of the last ten minutes. ranges: those that can be asked for.
    """
    maker = _PAGES.get(path)
    if maker is None:
        return None
    asked = {name: value[:MOST_QUERY_CHARS] for name, value in query.items()}
    known = {name: asked[name] for name in _ASKED if asked.get(name)}
    standby = ("standby.html", "Standby", dict[str, Any]())
    template, title, given = maker(model, known) if model.look.observed is not None else standby
    page = Page(title, url(path, **known), mode_of(model), model.look.troubles)
    context = {**_HELPERS, "model": model, "look": model.look, "query": known, **given}
    name = known.get("name", "") if path == "/node" else ""
    charted = _charted(model, name, past) if path in ("/", "/node") else ([], [])
    context |= {"charted": charted, "ranges": ranges, "past": past}
    page.render(template, model.look.at_s, cluster, **context)
    if page.points and (past is None or past.trouble):
        page.points = {
            key: tuple(line[-1] if line else None for line in lines)
            for key, lines in _charts(model, name, *charted).items()
        }
    return page


def _charted(model: Model, name: str, past: Past | None) -> tuple[Points, list[Points]]:
    """Return the times and lines that charts of a node, or of the fleet for "", show."""
    if past is not None and not past.trouble:
        return past.times, past.lines
    return model.history.node(name) if name else model.history.fleet()


def _charts(model: Model, name: str, times: Points, lines: list[Points]) -> dict[str, list[Points]]:
    """Return the times and lines of each chart, in the units that it shows."""
    row = model.node(name)
    if row is None:
        kv_bytes, tok_s, late, _ = lines
        return {"fleet": [times, _scaled(kv_bytes, 1 / GIB), tok_s, late]}
    host = row.host or pb.HostTelemetry()
    flat = [[1e3 * t or None] * len(times) for t in (host.ttft_target_s, host.tpot_target_s)]
    ttft, tpot, busy, duty, kv_bytes, _ = lines
    return {
        "latency": [times, _scaled(ttft, 1e3), flat[0], _scaled(tpot, 1e3), flat[1]],
        "guest": [times, _scaled(duty, 100), _scaled(busy, 100), _scaled(kv_bytes, 1 / GIB)],
    }


def series_at(model: Model, query: Query, past: Past | None = None) -> dict[str, object] | None:
    """Return the points of the fleet's charts, or of a node's; None for an unknown node."""
    name = query.get("node", "")
    if name and model.node(name) is None:
        return None
    ticks = [
        [round(each.at_s, 1), f"{each.replica}: {each.after}, {each.reason}"]
        for each in model.history.changes(name)
        if each.is_stop
    ]
    return {"charts": _charts(model, name, *_charted(model, name, past)), "ticks": ticks}


# ---- pages ----


def _cluster(model: Model, query: Query) -> Content:
    del query
    history, minute = model.history, model.history.minute
    act, working = model.look.journal.last_act, model.working
    tok_s = history.fleet_tok_s()
    gpus = model.lendable_gpus
    hosts = NO_DATA if gpus is None else f"{gpus:.1f} GPUs' idle compute"
    return "cluster.html", "Cluster", {
        "hosts": hosts,
        "compute_used": NO_DATA if working is None else f"{working:.1f} of {hosts}",
        "tokens": NO_DATA if tok_s is None else f"{count(tok_s)} tokens/s",
        "last_act": _act(act, model.look.since_s),
        "budgets": [
            (
                name,
                ledger.objective,
                model.look.budget_left.get(name),
                ledger.burn(minute, 60),
                ledger.burn(minute, 360),
                *ledger.spent(minute, 60),
            )
            for name, ledger in sorted(history.ledgers.items())
        ],
        "usage": [
            (*pair, lent)
            for pair, lent in sorted(model.seen.usage.items(), key=lambda each: -each[1].compute_s)
        ][:20],
    }  # fmt: skip


def _nodes(model: Model, query: Query) -> Content:
    wanted, state = query.get("q", ""), query.get("state", "")
    rows = [
        row
        for row in model.nodes
        if wanted in row.name and (not state or (row.late if state == LATE else row.state == state))
    ]
    part = _part("/nodes", query, rows, "nodes")
    return "nodes.html", "Nodes", {"part": part, "states": ("", LATE, *STATES)}


def _node(model: Model, query: Query) -> Content:
    name = query.get("name", "")
    row = model.node(name)
    if row is None:
        missing = f"No node {name!r} is attached or was lately." if name else "Name a node."
        return "unknown.html", "Node", {"missing": missing}
    said = folded(each for each in model.look.journal.decisions if each.node == name)
    return "node.html", f"Node {name}", {
        "node": row,
        "said": said[:DECISIONS_OF_NODE],
        "BROKEN_STATES": BROKEN_STATES,
    }  # fmt: skip


def _leases(model: Model, query: Query) -> Content:
    job = query.get("job", "")
    found = [each for each in model.leases if job in ("", each[0].lease.job)]
    return "leases.html", "Leases", {
        "part": _part("/leases", query, found, "leases"),
        "jobs": ("", *(each.record.job for each in model.seen.jobs)),
    }  # fmt: skip


def _advice(model: Model, query: Query) -> Content:
    return "advice.html", "Advisory", {"part": _part("/advice", query, model.advised, "nodes")}


def _decisions(model: Model, query: Query) -> Content:
    journal, kind, node = model.look.journal, query.get("kind", KINDS[0]), query.get("node", "")
    chosen = {"leases": journal.leases, "versions": journal.versions}.get(kind, journal.decisions)
    found = folded(
        each for each in chosen if (each.is_act or kind != "operators") and node in each.node
    )
    part = _part("/decisions", query, found, "decisions")
    return "decisions.html", "Decisions", {"part": part, "kind": kind, "kinds": KINDS}


_PAGES: Final[Mapping[str, Callable[[Model, Query], Content]]] = {
    "/": _cluster,
    "/nodes": _nodes,
    "/node": _node,
    "/leases": _leases,
    "/advice": _advice,
    "/decisions": _decisions,
}
PATHS: Final = tuple(_PAGES)


def _part(path: str, query: Query, items: Sequence[Any], label: str) -> ListPart:
    """Return the part of a list that the query's page number names."""
    total = len(items)
    pages = max(1, math.ceil(total / ROWS))
    asked = query.get("page", "1")
    number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 1
    number = min(max(1, number), pages)
    begin, end = (number - 1) * ROWS, min(total, number * ROWS)
    others: dict[str, str | int] = {name: value for name, value in query.items() if name != "page"}
    beside = partial(url, path, **others)
    return ListPart(
        items[begin:end],
        label,
        f"{begin + 1 if total else 0} to {end} of {count(total)} {label}",
        beside(page=number - 1) if number > 1 else "",
        beside(page=number + 1) if number < pages else "",
    )


# ---- texts ----


def mode_of(model: Model) -> Cell:
    """Return a cell that says in a sentence what is lent now, or who leads instead."""
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


def of_target(measured_s: float, target_s: float, host: pb.HostTelemetry) -> Cell:
    """Return a cell with a latency and its target: `420 ms / 500 ms`."""
    if not host.window_requests:
        return UNKNOWN
    text = f"{latency(measured_s)} / {latency(target_s) if target_s else 'none'}"
    if host.window_requests < FEWEST_REQUESTS:
        return Cell(text, "quiet", hint=f"{host.window_requests} requests: too few to say")
    if not target_s:
        return Cell(text)
    return Cell(f"late: {text}", "bad") if measured_s > target_s else Cell(text, "good")


def state_cell(state: str, number: int) -> Cell:
    """Return a cell with the number of nodes in a state, which links to them."""
    return Cell(count(number), STATES[state], url("/nodes", state=state), value=float(number))


def burn(rate: float | None) -> Cell:
    """Return a cell with the burn rate of an SLO budget."""
    if rate is None:
        return Cell("too few requests to say", "quiet")
    return Cell(f"{rate:.2f}", "bad" if rate > 1 else "good")


def budget(left: BudgetLeft | None, objective: float) -> Cell:
    """Return a cell with the rest of an SLO budget, and how much data says so."""
    if left is None:
        return UNKNOWN
    if left.requests * (1 - objective) < FEWEST_MISSES:
        return Cell(f"{count(left.requests)} requests in {span(left.history_s)}: too few", "quiet")
    whole = left.history_s > 29.5 * DAY_S
    text = f"{left.share:.0%}" if whole else f"{left.share:.0%} by {span(left.history_s)} of data"
    return Cell(text, "bad" if left.share <= 0 else "")


def empty_in(left: BudgetLeft | None, rate: float | None) -> str:
    """Return the time until an SLO budget is spent at this burn rate, as text."""
    if left is None or rate is None:
        return NO_DATA
    if left.history_s < DAY_S:
        return "after a day of data"
    if left.share <= 0:
        return "now"
    return span(left.share / rate * PERIOD_S) if rate > 0 else "never"


def missed(spent: RequestCounts) -> str:
    """Return the share of requests that missed a target, as text."""
    if spent.missed is None:
        return "no requests"
    return f"{spent.missed:.2%} of {count(spent.good + spent.bad)}"


def strip(behind: Mapping[int, int]) -> str:
    """Return replicas by versions that they are behind, as `3 newest, 1 behind by 2`."""
    parts = [
        f"{number} {'of other weights' if lag < 0 else f'behind by {lag}' if lag else 'newest'}"
        for lag, number in sorted(behind.items())
    ]
    return ", ".join(parts) or "none leased"


def sparse(times: Sequence[float | None]) -> list[int]:
    """Return the indices of a few evenly spaced points out of all, newest first."""
    return list(range(len(times) - 1, -1, -max(1, -(-len(times) // FIGURES))))


def _act(act: JournalEntry | None, since_s: float) -> Cell:
    if act is None:
        return Cell(f"none since {day(since_s)}", "quiet", "/decisions")
    return Cell(f"{act.what} ({act.said}) by {act.caller}, {day(act.at_s)}", "", "/decisions")


def _scaled(points: Sequence[float | None], by: float) -> list[float | None]:
    return [None if value is None else round(value * by, 3) for value in points]


_HELPERS: Final = {
    "GIB": GIB,
    "UNKNOWN": UNKNOWN,
    "of_target": of_target,
    "state_cell": state_cell,
    "budget": budget,
    "burn": burn,
    "empty_in": empty_in,
    "missed": missed,
    "folded": folded,
    "plain": lambda labels: [(each, "wide" if each == "MEASURED" else "", "") for each in labels],
    "strip": strip,
    "sparse": sparse,
}
