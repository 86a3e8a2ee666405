"""Metrics of a scheduler: `/metrics` on a port of its own, as a leader and as a standby.

    events, store calls, audit records ──► counters, as they happen
    scrape ──► figures of the leading service, counted on its loop ──► text, made beside it

Label values are few: jobs are those that are registered, nodes those that are attached, and beyond
`MOST_JOBS` names that are counted all others are one. What was counted of a job that is over is
forgotten after a while. No request id, replica or reason in words is a label. Names end in their
units (`_seconds`, `_bytes`, `_total` for what only grows).
"""

import time
from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity.budget_hold import BudgetLeft
from rose.metrics_server import certificate_families
from rose.scheduler.service import SchedulerService, ServiceFigures
from rose.security.audit_log import AuditLog
from rose.security.certificates import CertificateFiles
from rose.store.election import Leadership

MOST_JOBS = 256
OTHERS = "(others)"
# A job's counts are shown for so long after it was over: each scraper has seen the last ones.
JOB_KEPT_S = 900.0
STORE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
ENDS = {"lease_expired": "expired", "lease_released": "released", "revoked": "revoked"}
POSTS = ("delivered", "dropped", "failed")
COMPLAINTS = frozenset({"call_refused", "offer_refused", "peer_refused", "switch_refused"})
# Budgets are over 30 days, and cost a walk over all hosts.
BUDGETS_EVERY_S = 15.0
# Text and labels of each family `rose_scheduler_{name}`, in the order of their page.
_GAUGES: Final = {
    "nodes": ("Nodes that are attached.", ""),
    "away_nodes": ("Nodes that are known and not attached.", ""),
    "node_silent_seconds": ("Time since an attached node said anything.", "node"),
    "stop_mode": ("1 for the mode that the operator set last; active means no stop.", "mode"),
    "gateways": ("Gateways that report demand.", ""),
    "watchers": ("Gateways that are sent the table of leases.", ""),
    "replicas": ("Replicas that are offered, leased or free.", "kind state"),
    "leases": ("Leases that live.", "job kind"),
    "node_leases": ("Leases that live on a node.", "node"),
    "promised_leases": ("Leases that are decided and whose epochs are not durable yet.", ""),
    "queued_commands": ("Commands that nodes have not taken yet.", ""),
    "longest_command_queue": ("Commands that the slowest node has not taken yet.", ""),
    "waiting_requests": ("Requests of trainers and operators that wait for the store.", ""),
    "store_stalled_seconds": ("How long a write has waited for the store; 0 while it answers.", ""),
    "job_turns": ("Turns of a job that run or wait, at all gateways.", "job"),
    "job_owed_tokens": ("Tokens that the turns of a job are still to make.", "job"),
    "job_tokens_per_second": ("Tokens that a job makes a second, as gateways report it.", "job"),
    "node_modes": ("Nodes by the mode that their policies say.", "mode"),
    "held_nodes": ("Nodes by what holds them back; a node counts once for each.", "reason"),
    "node_lendable_bytes": ("KV memory that a node lends, or would lend.", "node"),
    "node_lendable_compute_ratio": (
        "Share of each second that a node lends, or would lend.",
        "node",
    ),
}
_COUNTERS: Final = {
    "node_lendable_byte_seconds": (
        "KV memory that a node lends, or would, summed over time.",
        "node",
    ),
    "node_lendable_compute_seconds": (
        "Compute that a node lends, or would, summed over time.",
        "node",
    ),
    "lent_lease_seconds": ("Time in which guests were leased.", "owner job"),
    "lent_compute_seconds": (
        "Time in which leased guests made steps and were not held back.",
        "owner job",
    ),
    "lent_byte_seconds": ("KV memory of leased guests, summed over time.", "owner job"),
    "lent_tokens": ("Tokens that leased guests sampled.", "owner job"),
}


class SchedulerMetrics(Collector):
    """Prometheus collector of a scheduler: counters of the process, figures of its service.

    The figures are there only while the process leads.
    """

    def __init__(
        self,
        audit: AuditLog,
        certificates: CertificateFiles | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._audit = audit
        self._certificates = certificates
        self._clock_s = clock_s
        self._leadership: Leadership | None = None
        self._service: Callable[[], SchedulerService | None] = lambda: None
        self._figures: ServiceFigures | None = None
        self._budgets: Mapping[str, BudgetLeft] = {}
        self._budgeted_s: float | None = None
        # Names that are counted apart, and since when each is over.
        self._jobs: dict[str, float | None] = {}
        # Skip the series of creation times.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._grants = self._counter("rose_scheduler_lease_grants", "Leases granted.", "job")
        self._ends = self._counter(
            "rose_scheduler_lease_ends", "Leases that are over, by what ended them.", "job", "how"
        )
        self._revocations = self._counter(
            "rose_scheduler_revocations", "Leases taken back, by whom.", "job", "by"
        )
        self._terms = self._counter(
            "rose_scheduler_terms", "Terms that this process began to lead, or ended.", "event"
        )
        self._complaints = self._counter(
            "rose_scheduler_complaints",
            "Peers and calls that were refused, at most 60 a minute of each kind.",
            "of",
        )
        for event in ("leads", "steps_down"):
            self._terms.labels(event)
        for event in COMPLAINTS:
            self._complaints.labels(event.removesuffix("_refused"))
        self._store_s = Histogram(
            "rose_scheduler_store_seconds",
            "Time that calls of the store took.",
            ("call",),
            buckets=STORE_BOUNDS_S,
            registry=self.registry,
        )
        self._store_errors = self._counter(
            "rose_scheduler_store_errors", "Calls that the store did not answer.", "call"
        )
        self._posts = self._counter(
            "rose_scheduler_webhook_events", "Events for the webhook, by their end.", "result"
        )
        for result in POSTS:
            self._posts.labels(result)
        self.registry.register(self)

    def watch(self, leadership: Leadership, service: Callable[[], SchedulerService | None]) -> None:
        """Set the election and the function that returns the leading service, for scrapes."""
        self._leadership, self._service = leadership, service

    def heard(self, event: str, fields: Mapping[str, object]) -> None:
        """Count one event of the event log."""
        job = self._known(str(fields.get("job", "")))
        if event == "lease_granted":
            self._grants.labels(job).inc()
        elif event in ENDS:
            self._ends.labels(job, ENDS[event]).inc()
            if event == "revoked":
                self._revocations.labels(job, str(fields.get("by", ""))).inc()
        elif event in ("scheduler_leads", "scheduler_steps_down"):
            self._terms.labels(event.removeprefix("scheduler_")).inc()
        elif event in COMPLAINTS:
            self._complaints.labels(event.removesuffix("_refused")).inc()

    def posted(self, result: str) -> None:
        """Count an event of the webhook that was `delivered`, `failed` or `dropped`."""
        self._posts.labels(result).inc()

    def called(self, call: str, seconds: float, answered: bool) -> None:
        """Record the duration of one call of the store, and an error if it was not answered."""
        self._store_s.labels(call).observe(seconds)
        if not answered:
            self._store_errors.labels(call).inc()

    def look(self) -> None:
        """Store the service's figures for the next scrape; call this on the service's event loop.

        SLO budgets are computed every 15 s at most. Counters of jobs over for 15 minutes are
        dropped.
        """
        service = self._service()
        now_s = self._clock_s()
        if service is None:
            self._figures, self._budgeted_s = None, None
            return
        is_due = self._budgeted_s is None or now_s >= self._budgeted_s + BUDGETS_EVERY_S
        self._figures = service.figures(budgets=is_due)
        if is_due:
            self._budgets, self._budgeted_s = self._figures.core.budget_left or {}, now_s
        core = self._figures.core
        live = {job.record.job for job in core.jobs} | {each.holder for each in core.replicas}
        self._forget_jobs(live, now_s)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration computes no figures."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, with the figures of the last `look`."""
        gauge = partial(_family, GaugeMetricFamily)
        counter = partial(_family, CounterMetricFamily)
        lead, audit = self._leadership, self._audit
        leads = lead is not None and lead.leads()
        yield gauge("leader", "1 while this process surely leads, 0 on a standby.", leads)
        began = "The store's revision that this term began with; 0: none."
        yield gauge("term", began, lead.term if lead else 0)
        records = "Records in the chain of the audit log, of all lives."
        yield counter("audit_records", records, audit.records)
        missing = "Records that the audit log lacks: not written yet, or lost."
        yield gauge("audit_missing_records", missing, audit.lost)
        if self._certificates is not None:
            yield from certificate_families(self._certificates.validity_s)
        # Scrapes and exports are of several threads.
        if (figures := self._figures) is None:
            return
        values = _values(figures)
        for family, table in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for name, (what, labels) in table.items():
                yield family(name, what, values[name], labels)
        left = "Share of 30 days' SLO budget that is left; below 0: overspent."
        requests = "Requests of the last 30 days by which the SLO budget is judged."
        history = "Time since the first of these requests, 30 days at most."
        for kind, what, figure in (
            ("left_ratio", left, "share"),
            ("requests", requests, "requests"),
            ("history_seconds", history, "history_s"),
        ):
            shown = {name: getattr(each, figure) for name, each in self._budgets.items()}
            yield gauge(f"slo_budget_{kind}", what, shown, "deployment")

    def _known(self, job: str) -> str:
        if job in self._jobs or len(self._jobs) < MOST_JOBS:
            self._jobs[job] = None
            return job
        return OTHERS

    def _forget_jobs(self, live: Collection[str], now_s: float) -> None:
        for job, over_s in list(self._jobs.items()):
            if job in live:
                self._jobs[job] = None
            elif over_s is None:
                self._jobs[job] = now_s
            elif now_s >= over_s + JOB_KEPT_S:
                del self._jobs[job]
                for family in (self._grants, self._ends, self._revocations):
                    family.remove_by_labels({"job": job})

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self.registry)


Values = Mapping[str, float | None] | Mapping[tuple[str, str], float]
"""Values by the family's label or labels; unknown ones are None or left out."""


def _values(seen: ServiceFigures) -> dict[str, float | Values]:
    """Return the values of all gauges and counters of the fleet, by family name."""
    core = seen.core
    offers = [(each.holder, each.offer.kind.value, each.offer.node) for each in core.replicas]
    demand = [each.demand for each in core.jobs if each.demand is not None]
    advice = {node.node: node.advice for node in core.nodes}
    idle_nodes = dict.fromkeys(advice, 0)
    return {
        "nodes": len(core.nodes),
        "away_nodes": len(core.away),
        "node_silent_seconds": {node.node: node.silent_s for node in core.nodes},
        "stop_mode": {mode.value: float(mode is core.stop) for mode in HarvestMode},
        "gateways": core.gateways,
        "watchers": seen.watchers,
        "replicas": Counts((kind, "leased" if job else "free") for job, kind, _ in offers),
        "leases": Counts((job, kind) for job, kind, _ in offers if job),
        "node_leases": idle_nodes | Counts(node for job, _, node in offers if job),
        "promised_leases": core.promised,
        "queued_commands": seen.commands,
        "longest_command_queue": seen.longest,
        "waiting_requests": seen.commits,
        "store_stalled_seconds": seen.stalled_s,
        "job_turns": {each.job: each.turns for each in demand},
        "job_owed_tokens": {each.job: each.owed_tokens for each in demand},
        "job_tokens_per_second": {each.job: each.made_tok_s for each in demand},
        "node_modes": Counts(node.verdict.mode.value for node in core.nodes),
        "held_nodes": core.held,
        "node_lendable_bytes": {node: each.now.memory_bytes for node, each in advice.items()},
        "node_lendable_compute_ratio": {node: each.now.compute for node, each in advice.items()},
        "node_lendable_byte_seconds": {node: each.byte_s for node, each in advice.items()},
        "node_lendable_compute_seconds": {node: each.compute_s for node, each in advice.items()},
        "lent_lease_seconds": {pair: each.seconds for pair, each in core.usage.items()},
        "lent_compute_seconds": {pair: each.compute_s for pair, each in core.usage.items()},
        "lent_byte_seconds": {pair: each.byte_s for pair, each in core.usage.items()},
        "lent_tokens": {pair: each.tokens for pair, each in core.usage.items()},
    }


def _family(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    what: str,
    values: float | Values,
    labels: str = "",
) -> Metric:
    made = family(f"rose_scheduler_{name}", what, labels=labels.split())
    for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
        if value is not None:
            made.add_metric((key,) if isinstance(key, str) else key, float(value))
    return made
