"""Pages by their addresses: which panels, which part of a long list.

`page_at` and `series_at` are all that an address can ask for; both are pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rose.dashboard.journal import Decision
from rose.dashboard.model import STATES, Model, NodeRow
from rose.dashboard.text import count, day
from rose.dashboard.urls import url
from rose.dashboard.views import node_panels, panels
from rose.dashboard.views.page import Block, Cell, Facts, Note, Page, Pager, Panel, Search

# A page with its scripts stays below 150 kB.
ROWS: Final = 40
ROWS_OF_FRONT: Final = 12
DECISIONS_OF_FRONT: Final = 12
MOST_QUERY_CHARS: Final = 300
NAVIGATION: Final = (
    ("/", "Cluster"),
    ("/nodes", "Nodes"),
    ("/leases", "Leases"),
    ("/advice", "Advisory"),
    ("/decisions", "Decisions"),
)
LATE: Final = "late"
KINDS: Final = ("all but leases", "leases", "operators")

Query = Mapping[str, str]


def page_at(model: Model, path: str, query: Query) -> Page | None:
    """The page of an address; None where there is none."""
    maker = _PAGES.get(path)
    if maker is None:
        return None
    asked = {name: value[:MOST_QUERY_CHARS] for name, value in query.items()}
    known = {name: asked[name] for name in ("q", "state", "page", "job", "name", "kind", "node")
             if asked.get(name)}  # fmt: skip
    if model.look.observed is None:
        return _standby(model, url(path, **known))
    title, blocks = maker(model, known)
    return Page(title, url(path, **known), panels.mode_of(model), blocks, model.look.troubles)


def series_at(model: Model, query: Query) -> dict[str, object] | None:
    """Points of the fleet's charts, or of a node's; None for a node that nobody knows."""
    name = query.get("node", "")
    if not name:
        times, (kv_bytes, tok_s, late, _) = model.history.fleet()
        return {"charts": {"fleet": [times, [panels.gib(v) for v in kv_bytes], tok_s, late]}}
    row = model.node(name)
    if row is None:
        return None
    times, lines = model.history.node(name)
    host = row.host
    targets = (host.ttft_target_s, host.tpot_target_s) if host else (0.0, 0.0)
    flat = [[round(t * 1e3, 2) if t else None] * len(times) for t in targets]
    ttft, tpot, busy, duty, kv_bytes, _ = lines
    ticks = [
        [round(each.at_s, 1), f"{each.replica}: {each.after}, {each.reason}"]
        for each in model.history.changes(name)
        if each.is_stop
    ]
    return {
        "charts": {
            "latency": [times, _scaled(ttft, 1e3), flat[0], _scaled(tpot, 1e3), flat[1]],
            "guest": [
                times, _scaled(duty, 100), _scaled(busy, 100), [panels.gib(v) for v in kv_bytes]
            ],
        },
        "ticks": ticks,
    }  # fmt: skip


def _scaled(points: Sequence[float | None], by: float) -> list[float | None]:
    return [None if value is None else round(value * by, 3) for value in points]


# ---- pages ----

Made = tuple[str, tuple[Panel, ...]]


def _front(model: Model, query: Query) -> Made:
    del query
    worth = model.nodes[:ROWS_OF_FRONT]
    more = Note(
        "more-nodes",
        Cell(f"All {count(len(model.nodes))} nodes", href="/nodes"),
    )
    nodes = Panel(
        "hosts",
        "Hosts and guests",
        "Does anyone pay for it, and why not more? Those worth a look come first.",
        (panels.hosts(model, worth), more),
    )
    leases = Panel(
        "leases",
        "Leases",
        "Who holds what until when?",
        (panels.lease_rates(model), Note("more-leases", Cell("All leases", href="/leases"))),
    )
    journal = model.look.journal
    said = Panel(
        "decisions",
        "Decisions",
        "What has it done, and who said so?",
        (
            panels.policies(model),
            panels.holds(model),
            panels.decisions(journal.decisions[:DECISIONS_OF_FRONT], model.look.since_s),
            Note("more-decisions", Cell("More decisions", href="/decisions")),
        ),
    )
    return "Cluster", (
        panels.cluster(model),
        nodes,
        panels.budget(model),
        panels.versions(model),
        leases,
        panels.moved(model),
        said,
    )


def _nodes(model: Model, query: Query) -> Made:
    wanted, state = query.get("q", ""), query.get("state", "")
    rows = [row for row in model.nodes if wanted in row.name and _is_of(row, state)]
    begin, end, pager = _part("/nodes", query, len(rows), "nodes")
    search = Search(
        "/nodes",
        (
            ("q", "Name has", wanted, ()),
            ("state", "State", state, ("", LATE, *STATES)),
        ),
    )
    panel = Panel(
        "hosts",
        "Nodes",
        "Does anyone pay for it? Those worth a look come first.",
        (search, pager, panels.hosts(model, tuple(rows[begin:end]))),
    )
    return "Nodes", (panel,)


def _is_of(row: NodeRow, state: str) -> bool:
    return not state or (row.late if state == LATE else row.state == state)


def _node(model: Model, query: Query) -> Made:
    name = query.get("name", "")
    row = model.node(name)
    if row is None:
        text = f"No node {name!r} is attached or was lately." if name else "Name a node."
        missing = Note("missing", Cell(text, "warn"))
        back = Note("more-nodes", Cell("All nodes", href="/nodes"))
        return "Node", (Panel("host", "Host", "Does anyone pay for it?", (missing, back)),)
    said = [each for each in model.look.journal.decisions if each.node == name]
    decisions = Panel(
        "decisions",
        "Decisions",
        "What was decided about it?",
        (panels.decisions(tuple(said[:DECISIONS_OF_FRONT]), model.look.since_s),),
    )
    return f"Node {name}", (
        node_panels.host(model, row),
        node_panels.guests(model, row),
        node_panels.policy(row),
        node_panels.lent(row),
        decisions,
    )


def _leases(model: Model, query: Query) -> Made:
    job = query.get("job", "")
    jobs = ("", *(each.record.job for each in model.seen.jobs))
    found = [each for each in model.leases if job in ("", each[0].lease.job)]
    begin, end, pager = _part("/leases", query, len(found), "leases")
    blocks: tuple[Block, ...] = (
        panels.lease_rates(model),
        Search("/leases", (("job", "Job", job, jobs),)),
        pager,
        panels.leases(found[begin:end]),
    )
    title = "Who holds what until when? Those on silent nodes come first."
    return "Leases", (Panel("leases", "Leases", title, blocks),)


def _advice(model: Model, query: Query) -> Made:
    begin, end, pager = _part("/advice", query, len(model.advised), "nodes")
    table = panels.advised(model.advised[begin:end])
    panel = Panel("advice", "Advisory", "What would it have done?", (pager, table))
    held = Panel("holds", "Holds", "What holds nodes back?", (panels.holds(model),))
    return "Advisory", (panel, held)


def _decisions(model: Model, query: Query) -> Made:
    journal, kind, node = model.look.journal, query.get("kind", KINDS[0]), query.get("node", "")
    chosen: tuple[Decision, ...] = journal.leases if kind == "leases" else journal.decisions
    found = [each for each in chosen if (each.is_act or kind != "operators") and node in each.node]
    begin, end, pager = _part("/decisions", query, len(found), "decisions")
    search = Search("/decisions", (("kind", "Kind", kind, KINDS), ("node", "Node has", node, ())))
    rest = Note(
        "kept",
        Cell(
            f"The newest since {day(model.look.since_s)}; the audit log has all of them:"
            " rose audit tail LOG_DIR/audit-scheduler.jsonl",
            "quiet",
        ),
    )
    table = panels.decisions(tuple(found[begin:end]), model.look.since_s)
    panel = Panel(
        "decisions",
        "Decisions",
        "What has it done, and who said so?",
        (search, pager, table, rest),
    )
    return "Decisions", (panel,)


def _standby(model: Model, at: str) -> Page:
    look = model.look
    leader = look.leader if look.leader and look.leader != look.me else "nobody that is known"
    facts = Facts(
        "standby",
        (
            ("This scheduler", Cell(look.me or "(no address)")),
            ("Leader", Cell(leader, "" if look.leader else "bad")),
            ("Runs since", Cell(day(look.since_s))),
        ),
    )
    said = panels.decisions(look.journal.decisions[:DECISIONS_OF_FRONT], look.since_s)
    blocks = (
        Panel("standby", "Standby", "Who leads?", (facts,)),
        Panel("decisions", "Decisions", "What has this process done?", (said,)),
    )
    return Page("Standby", at, panels.mode_of(model), blocks, look.troubles)


_PAGES: Final[Mapping[str, Callable[[Model, Query], Made]]] = {
    "/": _front,
    "/nodes": _nodes,
    "/node": _node,
    "/leases": _leases,
    "/advice": _advice,
    "/decisions": _decisions,
}
PATHS: Final = tuple(_PAGES)


def _part(path: str, query: Query, total: int, what: str) -> tuple[int, int, Pager]:
    """Return the range of items on the page, and the links to the others."""
    pages = max(1, math.ceil(total / ROWS))
    asked = query.get("page", "1")
    number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 1
    number = min(max(1, number), pages)
    begin, end = (number - 1) * ROWS, min(total, number * ROWS)
    others: dict[str, str | int] = {name: value for name, value in query.items() if name != "page"}
    return begin, end, Pager(
        what,
        f"{begin + 1 if total else 0} to {end} of {count(total)} {what}",
        url(path, **{**others, "page": number - 1}) if number > 1 else "",
        url(path, **{**others, "page": number + 1}) if number < pages else "",
    )  # fmt: skip
