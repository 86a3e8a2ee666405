"""Write docs/operators/metrics.md: every metric and label of every process, from its registry.

    an example of all that a process counts ──► its registry ──► text as a scraper reads it ──► page

Nothing is read from source: a family that no example reaches, or a label that nobody explained,
ends the script. Tests take the same families to check rules and dashboards against.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastic_scheduler import HarvestMode, Offer, ReplicaKind
from elastic_scheduler.capacity import Advice, EffectivePolicy, Limit, LimitKind, NodeVerdict
from elastic_scheduler.capacity.budget_hold import BudgetLeft
from elastic_scheduler.capacity.effective import Lendable
from elastic_scheduler.turn_journal import End
from executor import Grant, GrantMode, GuestState, HostState
from executor.engine_surfaces import Support
from executor.freeze_reason import FreezeReason
from executor.kv.reclaim_ladder import ReclaimLevel, ReclaimOutcome
from rose.gateway.stats import GatewayHealth, GatewayStats, exposition
from rose.node.guest.memory_gauges import HeldMemory
from rose.node.guest.supervisor import EngineState
from rose.node.metrics import HostFigures, LatencyHistogram, NodeHealth, NodeMetrics, ReplicaFigures
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import JobFigures
from rose.scheduler.core.observed import JobSeen, NodeSeen, Observed, ReplicaSeen
from rose.scheduler.core.usage import Lent
from rose.scheduler.metrics import COMPLAINTS, ENDS, POSTS, SchedulerMetrics
from rose.scheduler.persistence import JobRecord
from rose.scheduler.service import ServiceFigures
from rose.weight_distribution.relay_metrics import RelayMetrics
from scripts.generated import ROOT, main, with_parts
from weight_transfer.fetch.limits import Asked, ChunkSource, ReplyKind, Traffic

PAGE: Final = ROOT / "docs" / "operators" / "metrics.md"
CALLS: Final = ("get", "list", "txn", "grant_lease", "keep_lease", "revoke_lease")
PROCESSES: Final = ("node", "scheduler", "gateway", "relay")

LABELS: Final = {
    "answer": "how a reader was answered: " + ", ".join(f"`{each.value}`" for each in ReplyKind),
    "asked": ", ".join(f"`{each.value}`" for each in Asked),
    "by": "who took the lease back: `node`, `operator`",
    "call": "a call of the store: " + ", ".join(f"`{call}`" for call in CALLS),
    "capability": "`lending`",
    "deployment": "the label `rose.dev/deployment` of nodes; empty without one",
    "end": "how an attempt ended: " + ", ".join(f"`{end.value}`" for end in End),
    "enough": "`true`, `false`",
    "engine": "name and version of the host's engine, as it says itself",
    "event": "`leads`, `steps_down`",
    "host": "names of hosts that a node found, `discover.at_most` at a time; empty for the one of"
    " its file",
    "how": "how it came to be over, or to run: `expired`, `released`, `revoked`; `started`,"
    " `adopted`",
    "job": "of a relay: the jobs of its command line; of a scheduler: registered jobs, 48 at most;"
    " `(others)` beyond 256 names that are counted; forgotten a quarter of an hour after the job",
    "kind": "`guest`, `dedicated`",
    "level": "levels of the reclaim ladder: "
    + ", ".join(f"`{level.name.lower()}`" for level in ReclaimLevel),
    "measured_by": "who measured: the kernel or the driver, in a few words",
    "mode": "modes of a grant (node), of policies and of the operator's stop (scheduler)",
    "node": "attached nodes, 4,096 at most",
    "of": "what was refused: " + ", ".join(f"`{each[:-8]}`" for each in sorted(COMPLAINTS)),
    "result": "what came of a batch's request: `answered`, `failed` or `sent_again`; of an event"
    " for the webhook: " + ", ".join(f"`{result}`" for result in POSTS),
    "outcome": "what became of a level: "
    + ", ".join(f"`{outcome.value}`" for outcome in ReclaimOutcome),
    "owner": "the label `rose.dev/owner` of nodes, else `rose.dev/deployment`; `(others)` beyond"
    " 512 pairs with jobs",
    "page_layout": "version of the control page",
    "reason": "of a grant: the words of `FreezeReason`; of a node: "
    + ", ".join(f"`{kind}`" for kind in LimitKind),
    "replica": "replicas of the node's file, a guest for each host that is found; a gateway:"
    " replicas that it sent turns to",
    "share": "`SCHED_IDLE`, `nice`, `plain`",
    "source": ", ".join(f"`{each.value}`" for each in ChunkSource),
    "state": "of an engine: " + ", ".join(f"`{state.value}`" for state in EngineState)
    + "; of an offered replica: `leased`, `free`; of a host: `guarded`, `watched`, `refused`",
    "support": ", ".join(f"`{support}`" for support in Support) + ", `refused`; empty if unknown",
    "targets": "`met`, `missed`",
    "task": "background tasks of the process: a handful, and three or four a replica",
    "version": "version of ROSE",
    "what": "what was refused: a `chunk` of other bytes than its digest says, a `version` that the"
    " engine did not take, an `engine` of unproven weights",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name. names: of its series as queries write them; labels: but for `le`."""

    process: str
    name: str
    kind: str
    what: str
    labels: frozenset[str]
    names: frozenset[str]

    @property
    def shown(self) -> str:
        """Name with its labels, as a query has it: `rose_terms_total{event}`."""
        name = f"{self.name}_total" if self.kind == "counter" else self.name
        return f"{name}{{{','.join(sorted(self.labels))}}}" if self.labels else name


class NeverCountedError(Exception):
    """A family has no series in the example: nobody could say what labels it has."""


# ---- examples: everything that a process may count, with each label ----


def node_metrics(replicas: int = 1) -> NodeMetrics:
    """A node whose guests did all that is counted, for every reason there is."""
    names = [f"guest-{number}" for number in range(replicas)]
    state = HostState(kv_total=4, granules_total=2)
    hosts = [
        HostFigures(
            f"host-{at}",
            LatencyHistogram(0.5),
            LatencyHistogram(0.15),
            state,
            (1, 0),
            ("vLLM 0.32.0", "tested"),
            ("lending: no KV pages",),
        )
        for at in range(replicas)
    ]
    views = [
        ReplicaFigures(
            name, "healthy", 0, 1, grant=Grant(GrantMode.FREEZE, 1, reason="host_dead"),
            guest=GuestState(), held=HeldMemory(1, "kernel"), reclaim_s=5.0, host=f"host-{at}",
        )
        for at, name in enumerate(names)
    ]  # fmt: skip
    tasks = ["session", "guards", "held memory", "engine logs"]
    tasks += [f"{name}: {part}" for name in names for part in ("supervisor", "lease", "updates")]
    health = NodeHealth(
        restarted=dict.fromkeys(tasks, 0),
        running=dict.fromkeys(tasks, True),
        certificate=(0.0, 1.0),
        hosts={"guarded": replicas, "watched": 0, "refused": 0},
    )
    metrics = NodeMetrics(lambda: hosts, lambda: views, lambda: health)
    for name in names:
        for event, fields in _life(name):
            metrics.heard(event, fields)
        metrics.activated({"replica": name, "wire_bytes": 1, "pause_s": 0.1})
    return metrics


def _life(guest: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    for reason in FreezeReason:
        yield "grant", {"replica": guest, "mode": "freeze", "reason": str(reason)}
    yield "engine_started", {"engine": guest}
    yield "engine_adopted", {"engine": guest}
    yield "engine_placed", {"engine": guest, "share": "SCHED_IDLE"}
    yield "engine_reclaimed", {"engine": guest, "seconds": 0.1}
    for level in ReclaimLevel:
        for outcome in ReclaimOutcome:
            said = {"level": level.name.lower(), "outcome": outcome.value}
            yield "reclaim_level", {"replica": guest, **said}
    for enough in (True, False):
        ended = {"enough": enough, "in_time": enough, "seconds": 0.1}
        yield "reclaim_ended", {"replica": guest, **ended}


ADVICE: Final = Advice(Lendable(memory_bytes=1, compute=0.5))


def _verdict(node: str, mode: HarvestMode) -> NodeVerdict:
    limits = tuple(Limit(kind, "") for kind in LimitKind)
    return NodeVerdict(node, mode, mode, EffectivePolicy(), limits)


def _offer(kind: ReplicaKind) -> Offer:
    return Offer("guest-0", kind, "http://h:1", "node-0", 1, 1.0, 1.0, 0, True, 1.0, 0, 1)


def scheduler_metrics(
    nodes: int = 1, jobs: int = 1, deployments: Sequence[str] = ("chat",)
) -> SchedulerMetrics:
    """A leader of so many nodes and jobs, which did all that is counted."""
    audit, lead = SimpleNamespace(records=1, lost=0), SimpleNamespace(leads=lambda: True, term=1)
    certificates = SimpleNamespace(validity_s=(0.0, 1.0))
    metrics = SchedulerMetrics(audit, certificates)  # type: ignore[arg-type]
    node_names = [f"node-{number}" for number in range(nodes)]
    job_names = [f"job-{number}" for number in range(jobs)]
    core = Observed(
        nodes=tuple(
            NodeSeen(name, 0.0, {}, pb.Telemetry(), (), _verdict(name, mode), mode, advice=ADVICE)
            for name, mode in zip(node_names, cycle(HarvestMode), strict=False)
        ),
        replicas=tuple(
            ReplicaSeen(_offer(kind), job, None, True)
            for kind in ReplicaKind
            for job in ("", *job_names)
        ),
        jobs=tuple(
            JobSeen(JobRecord(job, 1), 1, 0, JobFigures(job, 1, 1.0, 1.0), None)
            for job in job_names
        ),
        budget_left=dict.fromkeys(deployments, BudgetLeft(1.0, 1_000, 60.0)),
        usage={("chat", job): Lent(1.0, 1.0, 1.0, 1) for job in job_names},
    )
    service: Any = SimpleNamespace(figures=lambda budgets: ServiceFigures(core))
    metrics.watch(lead, lambda: service)  # type: ignore[arg-type]
    for job in job_names:
        metrics.heard("lease_granted", {"job": job})
        for event in ENDS:
            metrics.heard(event, {"job": job, "by": "node"})
        metrics.heard("revoked", {"job": job, "by": "operator"})
    for event in ("scheduler_leads", "scheduler_steps_down", *COMPLAINTS):
        metrics.heard(event, {})
    for call in CALLS:
        metrics.called(call, 0.001, answered=False)
    metrics.look()
    return metrics


def gateway_text(replicas: int = 1) -> str:
    """Return the metrics page of a gateway with `replicas` replicas."""
    stats = GatewayStats()
    live = {f"guest-{number}": 1 for number in range(replicas)}
    stats.tokens.update(live)
    stats.ends.update({end.value: 1 for end in End})
    stats.batch_requests.update(("answered", "failed", "sent_again"))
    health = GatewayHealth(restarted={"watch": 0}, certificate=(0.0, 1.0))
    return exposition(stats, live, 0, health)


def relay_metrics(jobs: int = 1) -> RelayMetrics:
    """A relay of so many jobs."""
    certificates: Any = SimpleNamespace(validity_s=(0.0, 1.0))
    known = {f"job-{number}": (1, 1) for number in range(jobs)}
    metrics = RelayMetrics(Traffic(), lambda: known, certificates)
    metrics.look()
    return metrics


# ---- families ----


def text_of(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def families() -> list[Family]:
    """All of them, process by process. NeverCountedError: an example does not reach one."""
    texts = {
        "node": text_of(node_metrics().registry),
        "scheduler": text_of(scheduler_metrics().registry),
        "gateway": gateway_text(),
        "relay": text_of(relay_metrics().registry),
    }
    found = [family for process in PROCESSES for family in _read(process, texts[process])]
    unknown = {label for family in found for label in family.labels} - LABELS.keys()
    if unknown:
        raise NeverCountedError(f"LABELS says nothing of {', '.join(sorted(unknown))}")
    return found


def _read(process: str, text: str) -> Iterator[Family]:
    for family in text_string_to_metric_families(text):
        if not family.samples:
            raise NeverCountedError(f"{family.name} has no series in the example of a {process}")
        what = family.documentation
        if not what:
            raise NeverCountedError(f"nothing says what {family.name} of a {process} is")
        labels = frozenset(label for each in family.samples for label in each.labels) - {"le"}
        names = frozenset(each.name for each in family.samples)
        yield Family(process, family.name, family.type, what, labels, names)


def series(text: str) -> int:
    """Return the number of series on a metrics page."""
    return sum(not line.startswith("#") for line in text.splitlines() if line)


# ---- page ----

BUDGET_REPLICAS: Final = 8
BUDGET_NODES: Final = 1_000
BUDGET_JOBS: Final = 48
PER_GUEST: Final = 150
PER_HOST: Final = 40
PER_NODE: Final = 8
PER_JOB: Final = 20
PER_REPLICA: Final = 3


def sizes() -> dict[str, int]:
    """Series of a process in which everything that can be counted was counted."""
    return {
        "node": series(text_of(node_metrics(BUDGET_REPLICAS).registry)),
        "scheduler": series(text_of(scheduler_metrics(BUDGET_NODES, BUDGET_JOBS).registry)),
        "gateway": series(gateway_text(BUDGET_NODES)),
        "relay": series(text_of(relay_metrics(BUDGET_JOBS).registry)),
    }


def page() -> dict[Path, str]:
    """Return the page as it has to be."""
    found = families()
    tables = [
        f"\n## {process.capitalize()}\n\n{_table(f for f in found if f.process == process)}"
        for process in PROCESSES
    ]
    used = sorted({label for family in found for label in family.labels})
    labels = "".join(f"| `{label}` | {LABELS[label]} |\n" for label in used)
    parts = {
        "metrics": "".join(tables),
        "labels": f"| label | values |\n| --- | --- |\n{labels}",
        "series": _budget(),
    }
    return with_parts(PAGE, parts)


def _table(rows: Iterable[Family]) -> str:
    lines = [f"| `{row.shown}` | {row.kind} | {row.what} |" for row in rows]
    return "\n".join(["| metric | type | is |", "| --- | --- | --- |", *lines, ""])


def _budget() -> str:
    counted = sizes()
    return f"""\
| process | series |
| --- | --- |
| node with {BUDGET_REPLICAS} hosts and guests | {counted["node"]:,} |
| scheduler of {BUDGET_NODES:,} nodes and {BUDGET_JOBS} jobs | {counted["scheduler"]:,} |
| gateway of {BUDGET_NODES:,} replicas | {counted["gateway"]:,} |
| relay of {BUDGET_JOBS} jobs | {counted["relay"]:,} |

A test keeps them within {PER_GUEST} for a guest, {PER_HOST} for a host,
{PER_NODE} for a node at the scheduler, {PER_JOB} for a job there,
and {PER_REPLICA} for a replica at a gateway.
"""


if __name__ == "__main__":
    sys.exit(main(page, "scripts/metrics-reference"))
