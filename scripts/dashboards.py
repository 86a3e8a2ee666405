"""Write helm/rose/files/dashboards: eight Grafana dashboards, each of which answers one question.

Every number has its threshold beside it where there is one, gaps stay gaps (no data is not zero),
and what a colour says a word says too. Tests check each expression against the metrics reference,
and a real Prometheus answers all of them.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "helm" / "rose" / "files" / "dashboards"
WIDTH: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# Grafana's variable: a window for rates, four scrapes at least.
RATE: Final = "$__rate_interval"
NODE: Final = 'instance=~"$instance"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. queries: expression and legend; limit: expression whose line is drawn dashed."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    what: str = ""
    limits: Sequence[tuple[str, str]] = ()
    red_from: float | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    bars: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One question, and the panels that answer it."""

    name: str
    title: str
    question: str
    panels: Sequence[Panel]
    by_instance: bool = False


def _quantile(share: str, metric: str, by: str = "le", over: str = RATE) -> str:
    buckets = f"sum by ({by}) (rate({metric}_bucket{{{NODE}}}[{over}]))"
    return f"histogram_quantile({share}, {buckets})"


def _p99(metric: str) -> str:
    """By replica, of what happens a few times an hour."""
    return _quantile("0.99", metric, "le, replica", "1h")


def _latency(name: str) -> Panel:
    metric = f"rose_host_{name}_seconds"
    return Panel(
        f"{name.upper()} of the host",
        [(_quantile(share, metric), f"p{share[2:]:0<2}") for share in ("0.5", "0.99")],
        "s",
        limits=[(f"max(rose_host_{name}_target_seconds{{{NODE}}})", "target")],
        what="What the host's users wait for. Compare it with the guest's duty below, on one axis.",
    )


CLUSTER = Dashboard(
    "cluster",
    "ROSE / Cluster",
    "Is it on, and is it worth it?",
    [
        Panel(
            "The operator's stop",
            [("rose_scheduler_stop_mode == 1", "{{mode}}")],
            kind="stat",
            width=6,
            what="The mode that was set last, by its name; active means that nothing is stopped.",
        ),
        Panel(
            "Schedulers that lead",
            [("sum(rose_scheduler_leader)", "leading")],
            kind="stat",
            width=6,
            what="One. Without one nothing new is leased (alert RoseSchedulerNoLeader).",
        ),
        Panel(
            "Kill switches set",
            [("sum(rose_kill_switch_active)", "nodes")],
            kind="stat",
            width=6,
            red_from=1,
        ),
        Panel(
            "Nodes",
            [
                ("max(rose_scheduler_nodes)", "attached"),
                ("max(rose_scheduler_away_nodes)", "away"),
                ("sum(rose_scheduler_node_silent_seconds > bool 30)", "silent"),
            ],
            kind="stat",
            width=6,
        ),
        Panel(
            "Nodes by mode",
            [("sum by (mode) (rose_scheduler_node_modes)", "{{mode}}")],
            bars=True,
            what="What the policies say of each node.",
        ),
        Panel(
            "Nodes by what holds them back",
            [("sum by (reason) (rose_scheduler_held_nodes)", "{{reason}}")],
            bars=True,
            what="A node counts once for each reason; `rose policy explain NODE` says it in words.",
        ),
        Panel(
            "KV memory",
            [("sum(rose_host_lent_bytes)", "lent now")],
            "bytes",
            limits=[("sum(rose_scheduler_node_lendable_bytes)", "may be lent")],
        ),
        Panel(
            "Tokens of guests",
            [(f"sum(rate(rose_guest_tokens_total[{RATE}]))", "all guests")],
            "tokens/s",
        ),
        Panel(
            "GPU time lent, by owner and job",
            [
                (
                    "sum by (owner, job)"
                    f" (rate(rose_scheduler_lent_compute_seconds_total[{RATE}]))",
                    "{{owner}} to {{job}}",
                )
            ],
            what="Devices' worth of time; `rose usage` has the sums of a day or a week.",
        ),
        Panel(
            "Tokens lent, by owner and job",
            [
                (
                    f"sum by (owner, job) (rate(rose_scheduler_lent_tokens_total[{RATE}]))",
                    "{{owner}} to {{job}}",
                )
            ],
            "tokens/s",
        ),
    ],
)

HOST = Dashboard(
    "host",
    "ROSE / Host",
    "Does anyone pay for it?",
    [
        _latency("ttft"),
        _latency("tpot"),
        Panel(
            "Requests of the host",
            [
                (f"rose_host_running{{{NODE}}}", "running {{instance}} {{host}}"),
                (f"rose_host_waiting{{{NODE}}}", "waiting {{instance}} {{host}}"),
            ],
        ),
        Panel(
            "KV blocks of the host",
            [(f"rose_host_kv_usage{{{NODE}}}", "used {{instance}} {{host}}")],
            "percentunit",
        ),
        Panel(
            "Duty of the guest",
            [(f"rose_guest_duty{{{NODE}}}", "{{replica}}")],
            "percentunit",
            what="Share of each second in which the guest was not held back.",
        ),
        Panel(
            "Memory lent and missing",
            [
                (f"rose_host_lent_bytes{{{NODE}}}", "lent {{instance}} {{host}}"),
                (f"rose_guest_owed_bytes{{{NODE}}}", "owed {{replica}}"),
            ],
            "bytes",
            what="Owed for longer than a minute: alert RoseReclaimLate.",
        ),
        Panel(
            "Freezes by reason",
            [
                (
                    "sum by (replica, reason)"
                    f" (increase(rose_guest_freezes_total{{{NODE}}}[{RATE}])) > 0",
                    "{{replica}} {{reason}}",
                )
            ],
            bars=True,
            width=24,
        ),
    ],
    by_instance=True,
)

MISSED = f'rate(rose_host_requests_total{{targets="missed",{NODE}}}[{RATE}])'
# Hosts beside which a guest is at work.
AT_WORK = (
    "max by (instance, host)"
    " (rose_guest_duty * on (instance, replica) group_left (host) rose_guest_host_info) > 0"
)
BUDGET = Dashboard(
    "budget",
    "ROSE / SLO budget",
    "How long can this go on?",
    [
        Panel(
            "Budget of 30 days that is left",
            [("rose_scheduler_slo_budget_left_ratio", "{{deployment}}")],
            "percentunit",
            kind="stat",
            width=8,
            what="Below 0%: overspent (alert RoseSloBudgetSpent).",
        ),
        Panel(
            "Days until it is empty",
            [
                (
                    "30 * clamp_min(min(rose_scheduler_slo_budget_left_ratio), 0)"
                    " / (max(rose:host_missed:ratio_rate6h) / 0.01 > 0)",
                    "at the rate of the last 6 h",
                )
            ],
            "d",
            kind="stat",
            width=8,
            what="No value: nothing was missed, or too little came to say.",
        ),
        Panel(
            "Requests of the last hour",
            [(f"sum(increase(rose_host_requests_total{{{NODE}}}[1h]))", "requests")],
            kind="stat",
            width=8,
            what="Where fewer than ten missed, the burn rates page nobody.",
        ),
        Panel(
            "Burn rate",
            [
                (f"rose:host_missed:ratio_rate1h{{{NODE}}} / 0.01", "1 h {{instance}} {{host}}"),
                (f"rose:host_missed:ratio_rate6h{{{NODE}}} / 0.01", "6 h {{instance}} {{host}}"),
            ],
            width=24,
            limits=[
                ("vector(14.4)", "page, 1 h"),
                ("vector(6)", "page, 6 h"),
                ("vector(1)", "even"),
            ],
            what="1 spends the budget in exactly 30 days, where 1% of requests may miss.",
        ),
        Panel(
            "Missed while a guest ran, and while none did",
            [
                (
                    f"sum({MISSED} and on (instance, host) ({AT_WORK}))",
                    "a guest ran",
                ),
                (
                    f"sum({MISSED} unless on (instance, host) ({AT_WORK}))",
                    "none ran",
                ),
            ],
            "reqps",
            width=24,
        ),
    ],
    by_instance=True,
)

GUEST = Dashboard(
    "guest",
    "ROSE / Guests",
    "What is it doing, and why not more?",
    [
        Panel(
            "What each guest may do, and why",
            [(f"rose_guest_mode{{{NODE}}} == 1", "{{replica}} {{mode}} {{reason}}")],
            kind="state-timeline",
            width=24,
            words={"1": "holds"},
        ),
        Panel(
            "State of each engine",
            [(f"rose_engine_state{{{NODE}}} == 1", "{{replica}} {{state}}")],
            kind="state-timeline",
            width=24,
            words={"1": "is"},
        ),
        Panel(
            "Tokens",
            [(f"rate(rose_guest_tokens_total{{{NODE}}}[{RATE}])", "{{replica}}")],
            "tokens/s",
        ),
        Panel(
            "Turns",
            [
                (f"rose_guest_running{{{NODE}}}", "running {{replica}}"),
                (f"rose_guest_waiting{{{NODE}}}", "waiting {{replica}}"),
            ],
        ),
        Panel(
            "Time in which it had work and was held back",
            [(f"rate(rose_guest_yielded_seconds_total{{{NODE}}}[{RATE}])", "{{replica}}")],
            "percentunit",
        ),
        Panel(
            "Ends and reclaims, p99",
            [
                (
                    _p99("rose_reclaim_seconds"),
                    "end of {{replica}}",
                ),
                (
                    _p99("rose_ladder_seconds"),
                    "memory of {{replica}}",
                ),
            ],
            "s",
            limits=[(f"min(rose_reclaim_deadline_seconds{{{NODE}}})", "deadline")],
        ),
        Panel(
            "Levels of the reclaim ladder in the last hour",
            [
                (
                    f"sum by (level, outcome) (increase(rose_ladder_levels_total{{{NODE}}}[1h]))",
                    "{{level}}: {{outcome}}",
                )
            ],
            bars=True,
        ),
        Panel(
            "Late reclaims, engines started again",
            [
                (f"increase(rose_late_reclaims_total{{{NODE}}}[1h])", "late {{replica}}"),
                (f"increase(rose_engine_restarts_total{{{NODE}}}[1h])", "restarts {{replica}}"),
            ],
            bars=True,
        ),
    ],
    by_instance=True,
)

LEASES = Dashboard(
    "leases",
    "ROSE / Leases",
    "Who holds what?",
    [
        Panel(
            "Nodes that are silent longest",
            [("topk(10, rose_scheduler_node_silent_seconds)", "{{node}}")],
            "s",
            kind="table",
            width=8,
            red_from=30,
        ),
        Panel("Leases by job", [("sum by (job) (rose_scheduler_leases)", "{{job}}")], width=8),
        Panel(
            "Replicas",
            [("sum by (kind, state) (rose_scheduler_replicas)", "{{kind}} {{state}}")],
            width=8,
        ),
        Panel(
            "Leases granted",
            [(f"60 * sum by (job) (rate(rose_scheduler_lease_grants_total[{RATE}]))", "{{job}}")],
            "cpm",
        ),
        Panel(
            "Leases over, by what ended them",
            [
                (
                    f"60 * sum by (job, how) (rate(rose_scheduler_lease_ends_total[{RATE}]))",
                    "{{job}} {{how}}",
                )
            ],
            "cpm",
        ),
        Panel(
            "Demand",
            [("sum by (job) (rose_scheduler_job_turns)", "turns of {{job}}")],
        ),
        Panel(
            "Tokens by job",
            [("sum by (job) (rose_scheduler_job_tokens_per_second)", "{{job}}")],
            "tokens/s",
        ),
        Panel(
            "Decided, not durable yet",
            [("max(rose_scheduler_promised_leases)", "promised leases")],
        ),
        Panel(
            "Refused, by what",
            [(f"60 * sum by (of) (rate(rose_scheduler_complaints_total[{RATE}]))", "{{of}}")],
            "cpm",
        ),
    ],
)

VERSIONS = Dashboard(
    "versions",
    "ROSE / Policy versions",
    "Is anyone behind?",
    [
        Panel(
            "Version that each replica has proven",
            [(f"rose_policy_version{{{NODE}}}", "{{replica}}")],
            width=24,
            what="Replicas of one job move together, but for the time that an update takes.",
        ),
        Panel(
            "Updates in the last hour",
            [(f"increase(rose_weight_update_pause_seconds_count{{{NODE}}}[1h])", "{{replica}}")],
            bars=True,
        ),
        Panel(
            "Pause of an update, p99",
            [
                (
                    _p99("rose_weight_update_pause_seconds"),
                    "{{replica}}",
                )
            ],
            "s",
        ),
        Panel(
            "Weights that were refused in the last hour",
            [
                (
                    f"sum by (replica, what) (increase(rose_weights_rejected_total{{{NODE}}}[1h]))",
                    "{{replica}} {{what}}",
                )
            ],
            width=24,
            red_from=1,
            what="Must be 0 for chunk and engine (alert RoseWeightsRejected).",
        ),
    ],
    by_instance=True,
)

BYTES = Dashboard(
    "bytes",
    "ROSE / Bytes",
    "What moved?",
    [
        Panel(
            "Bytes of weights",
            [(f"rate(rose_weight_update_bytes_total{{{NODE}}}[{RATE}])", "{{replica}}")],
            "Bps",
        ),
        Panel(
            "Bytes of an update",
            [
                (
                    f"increase(rose_weight_update_bytes_total{{{NODE}}}[1h])"
                    f" / (increase(rose_weight_update_pause_seconds_count{{{NODE}}}[1h]) > 0)",
                    "{{replica}}",
                )
            ],
            "bytes",
        ),
        Panel(
            "All memory of guests",
            [(f"rose_guest_memory_bytes{{{NODE}}}", "{{replica}}, by {{measured_by}}")],
            "bytes",
        ),
        Panel(
            "KV memory of guests",
            [(f"rose_guest_kv_bytes{{{NODE}}}", "{{replica}}")],
            "bytes",
        ),
        Panel(
            "KV memory that hosts lend",
            [(f"rose_host_lent_bytes{{{NODE}}}", "{{instance}} {{host}}")],
            "bytes",
        ),
        Panel(
            "KV memory that guests owe",
            [(f"rose_guest_owed_bytes{{{NODE}}}", "{{replica}}")],
            "bytes",
        ),
    ],
    by_instance=True,
)

AUDIT = Dashboard(
    "audit",
    "ROSE / Advice and audit",
    "What would it have done, what has it done, who said so?",
    [
        Panel(
            "KV memory that each node lends, or would",
            [("rose_scheduler_node_lendable_bytes", "{{node}}")],
            "bytes",
            what="In Advisory nothing is lent: this is what Active would lend.",
        ),
        Panel(
            "Compute that each node lends, or would",
            [("rose_scheduler_node_lendable_compute_ratio", "{{node}}")],
            "percentunit",
        ),
        Panel(
            "Average of a day: memory",
            [
                (
                    "sum(increase(rose_scheduler_node_lendable_byte_seconds_total[1d])) / 86400",
                    "all nodes",
                )
            ],
            "bytes",
            kind="stat",
        ),
        Panel(
            "Sum of a day: compute",
            [
                (
                    "sum(increase(rose_scheduler_node_lendable_compute_seconds_total[1d]))",
                    "all nodes",
                )
            ],
            "s",
            kind="stat",
            what="Seconds of a whole device.",
        ),
        Panel(
            "Leases taken back, by whom",
            [
                (
                    f"sum by (by, job) (increase(rose_scheduler_revocations_total[{RATE}]))",
                    "{{by}}: {{job}}",
                )
            ],
            bars=True,
        ),
        Panel(
            "Records of the audit log",
            [(f"sum(rate(rose_scheduler_audit_records_total[{RATE}]))", "written")],
            "cps",
            what="`rose audit tail FILE` shows who did what.",
        ),
        Panel(
            "Records that it lacks",
            [("rose_scheduler_audit_missing_records", "{{instance}}")],
            red_from=1,
        ),
        Panel(
            "Terms",
            [
                (
                    f"sum by (instance, event) (increase(rose_scheduler_terms_total[{RATE}]))",
                    "{{instance}} {{event}}",
                )
            ],
            bars=True,
        ),
    ],
)

DASHBOARDS: Final = (CLUSTER, HOST, BUDGET, GUEST, LEASES, VERSIONS, BYTES, AUDIT)


# ---- Grafana's JSON ----


def rendered(dashboard: Dashboard) -> str:
    """One dashboard as Grafana imports it, or reads it from a ConfigMap."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(dashboard.panels, 1):
        if x + panel.width > WIDTH:
            x, y = 0, y + HEIGHT
        panels.append(_panel(panel, number, x, y))
        x += panel.width
    whole = {
        "uid": f"rose-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.question,
        "tags": ["rose"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["rose"], "title": "ROSE", "asDropdown": True}],
        "templating": {"list": _variables(by_instance=dashboard.by_instance)},
        "panels": panels,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _variables(*, by_instance: bool) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    variables: list[dict[str, Any]] = [source | {"query": "prometheus"}]
    if by_instance:
        variables.append(
            {
                "name": "instance",
                "label": "Node",
                "type": "query",
                "datasource": SOURCE,
                "query": "label_values(rose_build_info, instance)",
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return variables


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    queries = [*panel.queries, *panel.limits]
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            **({"instant": True, "format": "table"} if panel.kind == "table" else {}),
        }
        for place, (expression, legend) in enumerate(queries)
    ]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": None if panel.red_from is None else 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        # No data is never drawn as zero.
        "noValue": "no data",
        "custom": _drawing(panel),
    }
    if panel.words:
        options = {value: {"text": word} for value, word in panel.words.items()}
        defaults["mappings"] = [{"type": "value", "options": options}]
    drawn = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": [_dashed(n) for _, n in panel.limits]},
    }
    if panel.kind == "stat":
        # The value's name is shown as well: a colour alone says nothing to some.
        drawn["options"] = {"textMode": "value_and_name", "colorMode": "value"}
    return drawn


def _drawing(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    stacked = {"mode": "normal" if panel.bars else "none"}
    style = "bars" if panel.bars else "line"
    return {
        "drawStyle": style,
        "fillOpacity": 60 if panel.bars else 5,
        "stacking": stacked,
        "spanNulls": False,
        "thresholdsStyle": {"mode": "off" if panel.red_from is None else "line"},
    }


def _dashed(legend: str) -> dict[str, Any]:
    dashed = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}
    return {"matcher": {"id": "byName", "options": legend}, "properties": [dashed]}


def main(argv: Sequence[str] | None = None) -> int:
    """Write all files; with --check say whether they are current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when one is stale")
    args = parser.parse_args(argv)
    made = {FOLDER / f"rose-{each.name}.json": rendered(each) for each in DASHBOARDS}
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    stale += [path for path in FOLDER.glob("*.json") if path not in made]
    if args.check:
        sys.stderr.write("".join(f"{path.name} is stale: run {sys.argv[0]}\n" for path in stale))
        return 1 if stale else 0
    for path in stale:
        path.write_text(made[path]) if path in made else path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
