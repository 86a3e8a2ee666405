"""The scheduler's process: options, port, store, election, signals.

Several processes may share a store. One leads, the others stand by and name it; each term builds
its core anew from the store.
"""

import asyncio
import contextlib
import math
import re
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import grpc.aio

from elastic_scheduler import HarvestMode, make_policy, policy_names
from elastic_scheduler.policies.rose import HOLD_S
from rose.addresses import DefaultPort, check_exposure, host_port, is_address
from rose.command_line.parser import (
    Parser,
    add_insecure,
    add_log_limits,
    add_metrics_options,
    check_metrics_port,
    taken_log_limits,
)
from rose.controller.alerts import AlertReceiver
from rose.controller.controller import PolicyController
from rose.controller.kube_api import LEADER_LABEL, ApiError, KubeApi
from rose.controller.quotas import QuotaController
from rose.dashboard import (
    DashboardServer,
    DashboardSettings,
    LeaderInfo,
    Watch,
    add_dashboard_options,
    taken_dashboard,
)
from rose.errors import ConfigError, RoseError, UnavailableError
from rose.logs.eventlog import EventLog, JsonlLog, Logs
from rose.logs.process_log import add_logging_options, announce, complain, repeat, start_logging
from rose.logs.rotating_jsonl import BOUNDED, LogLimits
from rose.metrics_server import MetricsServer
from rose.otlp import export_metrics
from rose.process.background_tasks import Background, EventSink, stop_signalled
from rose.process.http_port import connections_allowed, raise_descriptor_limit
from rose.rpc.channel import make_server
from rose.scheduler.core.job_registry import with_standing
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.limits import checked_name
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.core.usage import UsageLog
from rose.scheduler.metrics import SchedulerMetrics
from rose.scheduler.persistence import JobRecord, Saved, load, save_slo_budgets
from rose.scheduler.service import AuditSink, LeaderHandlers, SchedulerService
from rose.scheduler.webhook import (
    Webhook,
    WebhookSettings,
    add_webhook_options,
    source_of,
    taken_webhook,
)
from rose.security.audit_log import AuditLog, audit_file
from rose.security.certificates import CertificateFiles, add_certificate_options, taken_certificates
from rose.security.roles import Role
from rose.security.rpc_access import AccessInterceptor
from rose.store import (
    FencedStore,
    Leadership,
    MeteredStore,
    StoreName,
    add_store_options,
    open_store,
    taken_store,
)
from rose.tracing import Spans, spans_of

DEFAULT_ALERTS = f"127.0.0.1:{DefaultPort.ALERTS}"
MOST_HOLD_S = 86_400.0
# Staleness of a standing job until its trainer sets one; before its first version it is irrelevant.
STANDING_STALENESS = 1
STOP_GRACE_S = 0.5
# A new process lets its callers wait this long for a leader: its predecessor's lease may last.
KNOWN_S = 3.0
KNOWN_LOOK_S = 0.02
_QUOTA = re.compile(r"(?=.{1,63}=)\w([-.\w]*\w)?=[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
MARK_S = 0.5
# Records of lent time and memory, for `rose usage`.
USAGE = "usage.jsonl"
USAGE_EVERY_S = BUDGETS_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of one scheduler process.

    harvest: mode of a store that has none. jobs: those that exist before a trainer registers them.
    """

    host: str
    port: int
    store: StoreName
    log_dir: Path
    harvest: HarvestMode
    cooldown_s: float
    policy: str = "rose"
    log_limits: LogLimits = BOUNDED
    insecure: bool = False
    advertise: str = ""
    certificates: CertificateFiles | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    hold_s: float | None = None
    jobs: tuple[JobRecord, ...] = ()
    kubernetes: bool = False
    kubeconfig: Path | None = None
    pod: str = ""
    node_labels: tuple[str, ...] = ()
    quotas: Mapping[str, str] = field(default_factory=dict)
    dashboard: DashboardSettings | None = None
    alerts: Path | None = None
    alerts_token_file: Path | None = None
    alerts_address: str = ""
    webhook: WebhookSettings | None = None

    def __post_init__(self) -> None:
        if self.certificates is None:
            what = "lease every replica, announce weights and see every prompt"
            check_exposure(self.host, self.insecure, what)
            if self.metrics_port is not None:
                what = "read how much each job and node uses"
                check_exposure(self.metrics_host, self.insecure, what)
        else:
            self.certificates.insist(Role.SCHEDULER)
        if self.dashboard is not None:
            self.dashboard.check(self.certificates, insecure=self.insecure)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port {self.port} does not exist; give --port 1 to 65535")
        check_metrics_port(self.metrics_port)
        if not (math.isfinite(self.cooldown_s) and self.cooldown_s >= 0):
            raise ConfigError(f"a pause of {self.cooldown_s} s is none; give --cooldown-s >= 0")
        if self.hold_s is not None and self.policy != "rose":
            raise ConfigError("--hold-s is of the policy rose; leave it out, or give --policy rose")
        if self.hold_s is not None and not 1 <= self.hold_s <= MOST_HOLD_S:
            raise ConfigError(f"--hold-s {self.hold_s}: choose 1 to {MOST_HOLD_S:.0f}")
        own = self.pod.count("/") == 1 and self.kubernetes and not self.kubeconfig
        asks = bool(self.node_labels or self.quotas)
        if (self.pod and not own) or (asks and not self.kubernetes):
            raise ConfigError(
                "give --pod NAMESPACE/NAME with --kubernetes, and --node-label and --quota with"
                " that or --kubeconfig"
            )
        self._check_alerts()
        if self.advertise and not is_address(self.advertise):
            raise ConfigError(f"{self.advertise!r} is no address; give --advertise HOST:PORT")

    def _check_alerts(self) -> None:
        if (self.alerts is None) is not (self.alerts_token_file is None):
            raise ConfigError(
                "--alerts and --alerts-token-file need each other: Alertmanager shows the token;"
                " make one: openssl rand -hex 32"
            )
        if self.alerts and not is_address(self.alerts_address):
            raise ConfigError(f"--alerts-address {self.alerts_address!r}: give HOST:PORT")
        if self.alerts and self.certificates is None:
            host = self.alerts_address.rpartition(":")[0].strip("[]")
            check_exposure(host, self.insecure, "read the token and end holds")

    def reached_at(self, port: int) -> str:
        """Return HOST:PORT by which clients reach a scheduler bound to `port`; "" if it binds all
        addresses and none is advertised.
        """
        if self.advertise or self.host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared
            return self.advertise
        return host_port(self.host, port)


def parser(prog: str = "rose scheduler") -> Parser:
    """Return the command-line parser of `rose scheduler`."""
    parser = Parser(prog, description="Lease offered capacity to the job.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    what = f"default {DefaultPort.SCHEDULER}"
    add("--port", type=int, default=DefaultPort.SCHEDULER, metavar="N", help=what)
    what = "where clients of a standby find this scheduler once it leads (default: as bound)"
    add("--advertise", default="", metavar="HOST:PORT", help=what)
    add_store_options(parser)
    add("--log-dir", type=Path, required=True, metavar="DIR", help="where events go")
    add_log_limits(parser)
    add_logging_options(parser)
    add(
        "--harvest",
        type=str.upper,
        default="OFF",
        choices=[mode.name for mode in HarvestMode],
        help="mode of a store in which no operator has set one (default OFF)",
    )
    what = "pause between a revocation and the next lease of the replica"
    add("--cooldown-s", type=float, default=LeaseTimes().cooldown_s, metavar="S", help=what)
    what = "which offers are leased (default rose: by net benefit)"
    add("--policy", default="rose", choices=policy_names(), help=what)
    what = f"least time that a guest stays with a job before another's turn (default {HOLD_S:g})"
    add("--hold-s", type=float, metavar="S", help=what)
    what = (
        "a job that has its dedicated replicas before a trainer registers it (repeatable);"
        " guests are lent to it once one has"
    )
    add("--job", action="append", default=[], metavar="NAME[=MODEL]", help=what)
    add_insecure(parser)
    add_metrics_options(parser)
    what = "act on RoseCapacityPolicy objects of the cluster that this pod runs in"
    add("--kubernetes", action="store_true", help=what)
    what = "act on those of this file's cluster"
    add("--kubeconfig", type=Path, metavar="FILE", help=what)
    what = f"own pod, labelled {LEADER_LABEL} while this scheduler leads; with --kubernetes"
    add("--pod", default="", metavar="NAMESPACE/NAME", help=what)
    what = (
        "label of Kubernetes nodes that policies go by, or a pattern as example.com/*; nodes"
        " are not believed about it (repeatable; with --kubernetes)"
    )
    add("--node-label", action="append", default=[], metavar="KEY", help=what)
    what = "job with as many guests as placeholder pods, of Kueue or KAI, run (repeatable)"
    add("--quota", action="append", default=[], metavar="JOB=NAMESPACE", help=what)
    add_dashboard_options(parser)
    alert = parser.add_argument_group("alerts", "holds by Alertmanager's alerts").add_argument
    alert("--alerts", type=Path, metavar="RULES", help="YAML: which alerts hold which nodes")
    alert("--alerts-token-file", type=Path, metavar="FILE", help="bearer token of Alertmanager")
    what = f"where it posts, /v1/alerts (default {DEFAULT_ALERTS}; others over TLS)"
    alert("--alerts-address", default=DEFAULT_ALERTS, metavar="HOST:PORT", help=what)
    add_webhook_options(parser)
    add_certificate_options(parser)
    return parser


def settings_of(argv: Sequence[str]) -> SchedulerSettings:
    """Return settings from the words of a `rose scheduler` command line. Raises `ConfigError`."""
    args = parser().parse_args(argv)
    options = vars(args)
    names = {field.name for field in fields(SchedulerSettings)}
    given = {name: value for name, value in options.items() if name in names}
    given |= {
        "store": taken_store(args),
        "harvest": HarvestMode[args.harvest],
        "log_limits": taken_log_limits(options),
        "certificates": taken_certificates(options),
        "jobs": standing_jobs(args.job),
        "node_labels": tuple(args.node_label),
        "quotas": quotas(args.quota),
        "kubernetes": args.kubernetes or args.kubeconfig is not None,
        "dashboard": taken_dashboard(args),
        "webhook": taken_webhook(args),
    }
    return SchedulerSettings(**given)


def standing_jobs(named: Sequence[str]) -> tuple[JobRecord, ...]:
    """Return a record for each `--job NAME[=MODEL]`.

    Raises `ConfigError` for invalid or repeated names.
    """
    records = []
    for each in named:
        name, given, model = each.partition("=")
        checked_name(name, "the job of --job")
        if given:
            checked_name(model, f"the model of --job {name}")
        records.append(JobRecord(name, STANDING_STALENESS, model, standing=True))
    names = [record.job for record in records]
    if len(set(names)) < len(names):
        raise ConfigError(f"--job names {max(names, key=names.count)} twice; name each job once")
    return tuple(records)


def quotas(named: Sequence[str]) -> dict[str, str]:
    """Return the namespace by job of each `--quota JOB=NAMESPACE`. Raises ConfigError."""
    found = {job: namespace for job, _, namespace in (each.partition("=") for each in named)}
    if len(found) < len(named) or not all(map(_QUOTA.fullmatch, named)):
        raise ConfigError(
            f"--quota {' '.join(named)[:200]}: give JOB=NAMESPACE, once for each job; JOB is a"
            " label's value: at most 63 letters, digits, dashes, dots and underscores"
        )
    return found


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Run a scheduler, as leader or standby, until `stop` is set.

    Raises `RoseError` if it cannot start or continue.
    """
    # Open both before anything that has a deadline: their packages take long to import.
    api = KubeApi.opened(settings.kubeconfig) if settings.kubernetes else None
    spans = spans_of("rose-scheduler")
    async with contextlib.AsyncExitStack() as stack:
        opened = open_store(settings.store)
        stack.push_async_callback(opened.close)
        logs = Logs(settings.log_dir, settings.log_limits)
        stack.callback(logs.close)
        events = logs.events("scheduler")
        audit = AuditLog(audit_file(settings.log_dir, "scheduler"), "scheduler")
        stack.callback(audit.close)
        lent = logs.records(USAGE)
        lent.listen(repeat("usage"))
        metrics = SchedulerMetrics(audit, settings.certificates)
        store = MeteredStore(opened, metrics.called)
        events.listen(metrics.heard)
        handlers = LeaderHandlers(lambda: leadership.address)
        raise_descriptor_limit()
        # Leave the rest of the descriptors for HTTP ports, store and logs.
        files = settings.certificates
        cluster = files.identity.cluster if files else ""
        access = AccessInterceptor(cluster, handlers.refused) if files else None
        server = make_server(access, connections_allowed() * 3 // 4)
        port = _bind(server, settings)
        me = settings.reached_at(port)
        told: AuditSink = audit.write
        watch: Watch | None = None
        if settings.dashboard is not None:
            watch = Watch(
                lambda: handlers.service_now,
                lambda: LeaderInfo(leadership.address, me),
                cluster,
                prometheus=settings.dashboard.prometheus,
            )
            told = watch.telling(told)
        webhook: Webhook | None = None
        if settings.webhook is not None:
            source = source_of(cluster, me or host_port(socket.gethostname(), port))
            webhook = Webhook(settings.webhook, source, metrics.posted)
            told = webhook.telling(told)
        faults = [logs.troubles, audit.troubles]
        faults += [each.troubles for each in (files, webhook) if each is not None]

        def note(event: str, **fields: object) -> None:
            events.write(event, **fields)
            told(event, fields, "")

        async def lead(fenced: FencedStore) -> None:
            await _lead(settings, fenced, handlers, faults, events, note, told, lent, api, spans)

        leadership = Leadership(store, me, lead, note)
        server.add_generic_rpc_handlers((handlers,))
        metrics.watch(leadership, lambda: handlers.service_now)
        export_metrics("rose-scheduler", metrics.look, lambda _: metrics.registry.collect())
        if settings.metrics_port is not None:
            page = MetricsServer(metrics, settings.metrics_host, settings.metrics_port, files)
            await page.start()
            stack.push_async_callback(page.close)
        await _start_beside(stack, settings, handlers, events, watch, webhook, api)

        def known() -> bool:
            return stop.is_set() or handlers.leads or leadership.address not in ("", me)

        async def answer() -> None:
            # Callers wait at the bound port until a leader is known.
            await _until(known, KNOWN_S)
            await server.start()
            events.write("scheduler_started", port=port)
            announce("rose scheduler", f"listening on {host_port(settings.host, port)}")
            told("scheduler_started", {"port": port, "policy": settings.policy}, "")
            await stop.wait()

        try:
            await _until_stopped(leadership, answer())
        finally:
            await server.stop(STOP_GRACE_S)
            events.write("scheduler_stopped")
            told("scheduler_stopped", {}, "")


async def _start_beside(
    stack: contextlib.AsyncExitStack,
    settings: SchedulerSettings,
    handlers: LeaderHandlers,
    events: EventLog,
    watch: Watch | None,
    webhook: Webhook | None,
    api: KubeApi | None,
) -> None:
    """Start what only some schedulers have, until `stack` is closed."""
    if settings.dashboard is not None and watch is not None:
        pages = DashboardServer(watch, settings.dashboard, settings.certificates)
        await pages.start()
        stack.callback(watch.close)
        stack.push_async_callback(pages.close)
    beside = Background(events.write)
    stack.push_async_callback(beside.close)
    if watch is not None:
        beside.start("dashboard", watch.run, restarts=None)
    if webhook is not None:
        beside.start("webhook", webhook.run, restarts=None)
        stack.push_async_callback(webhook.drain)
    if api is not None and settings.pod:
        beside.start("mark", partial(_mark, api, settings.pod, handlers, events), restarts=None)
    if settings.alerts is not None and settings.alerts_token_file is not None:
        rules, token = settings.alerts, settings.alerts_token_file
        alerts = AlertReceiver(rules, token, lambda: handlers.service_now, events.write)
        await alerts.start(settings.alerts_address, settings.certificates)
        stack.push_async_callback(alerts.close)


async def _lead(
    settings: SchedulerSettings,
    store: FencedStore,
    handlers: LeaderHandlers,
    faults: Sequence[Callable[[], list[str]]],
    events: EventLog,
    note: EventSink,
    told: AuditSink,
    lent: JsonlLog,
    api: KubeApi | None,
    spans: Spans,
) -> None:
    """Lead for one term, with a core that is built from the store; it ends only by cancellation or
    an error.

    faults: each returns faults of the process, a line each. note: writes an event to the event log
    and the audit log. told: callback that gets each decision, for the audit log and other
    listeners.
    """
    saved = with_standing(load((await store.list("")).entries), settings.jobs)
    times = LeaseTimes(cooldown_s=settings.cooldown_s)
    options = {} if settings.hold_s is None else {"hold_s": settings.hold_s}
    policy = make_policy(settings.policy, **options)
    names = [job.job for job in settings.jobs]
    core = SchedulerCore(
        saved,
        settings.harvest,
        times,
        policy,
        standing=names,
        asks_objects=api is not None,
        label_keys=settings.node_labels,
        quotas=settings.quotas,
    )
    controllers: list[PolicyController | QuotaController] = []
    background = Background(note)
    service = SchedulerService(
        core,
        store,
        events,
        lambda: [
            *background.troubles(),
            *(line for each in faults for line in each()),
            *(line for each in controllers for line in each.troubles()),
        ],
        # Bound to this term, so that its streams end with it.
        leads=store.leads,
        audit=told,
        spans=spans,
    )
    background.start("tick", service.tick)
    background.start("stop", service.watch_stop, restarts=None)
    usage = UsageLog(lent.write)
    background.start("usage", partial(_keep_usage, core, usage), restarts=None)
    background.start("budgets", partial(_keep_budgets, core, saved, store), restarts=None)
    if api is not None:
        keys = settings.node_labels
        controllers.append(PolicyController(api, service, note, label_keys=keys))
        background.start("objects", controllers[0].run, restarts=None)
    if api is not None and settings.quotas:
        controllers.append(QuotaController(api, service, settings.quotas))
        background.start("quotas", controllers[-1].run, restarts=None)
    handlers.lead(service)
    try:
        await background.failed()
    finally:
        usage.take(core.usage.sums(time.monotonic()), time.time())
        handlers.stand_by()
        service.close()
        await background.close()


async def _mark(api: KubeApi, pod: str, handlers: LeaderHandlers, events: EventLog) -> None:
    """Keep the label of the own pod as `handlers` lead or not; an earlier container left any."""
    marked: bool | None = None
    trouble = ""
    while True:
        leads, before = handlers.leads, trouble
        if leads is not marked:
            try:
                await asyncio.to_thread(api.mark_leader, pod, leads)
                marked, trouble = leads, ""
            except ApiError as error:
                trouble = str(error)
                if not before:
                    events.write("leader_unmarked", pod=pod, message=trouble)
        await asyncio.sleep(MARK_S)


async def _keep_usage(core: SchedulerCore, usage: UsageLog) -> None:
    while True:
        await asyncio.sleep(USAGE_EVERY_S)
        usage.take(core.usage.sums(time.monotonic()), time.time())


async def _keep_budgets(core: SchedulerCore, saved: Saved, store: FencedStore) -> None:
    budgets = core.capacity.gate.budgets
    budgets.restore(saved.slo_budgets, time.monotonic(), time.time())
    while True:
        await asyncio.sleep(BUDGETS_EVERY_S)
        # The next minute's write has what the store did not take.
        with contextlib.suppress(UnavailableError):
            if requests := budgets.saved(time.monotonic()):
                await store.txn((), [save_slo_budgets(requests)])


async def _until_stopped(
    leadership: Leadership, answering: Coroutine[object, object, None]
) -> None:
    tasks = [asyncio.create_task(leadership.run()), asyncio.create_task(answering)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until(known: Callable[[], bool], most_s: float) -> None:
    until_s = time.monotonic() + most_s
    while not known() and time.monotonic() < until_s:  # noqa: ASYNC110 - a few looks, once
        await asyncio.sleep(KNOWN_LOOK_S)


def _bind(server: grpc.aio.Server, settings: SchedulerSettings) -> int:
    address = host_port(settings.host, settings.port)
    try:
        # Ask the kernel first: gRPC prints lines of its own when it cannot bind.
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        socket.create_server((settings.host, settings.port), family=family).close()
        port: int = (
            server.add_secure_port(address, settings.certificates.server_credentials())
            if settings.certificates
            else server.add_insecure_port(address)
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{address} cannot be bound ({error}); free the port or give another --port"
        ) from error
    return port


async def _run(settings: SchedulerSettings) -> None:
    await serve(settings, stop_signalled())


def main(argv: Sequence[str]) -> int:
    """Run a scheduler until SIGTERM or SIGINT; return 0, or 2 after a line of a RoseError."""
    try:
        start_logging("scheduler", argv)
        asyncio.run(_run(settings_of(argv)))
    except RoseError as error:
        complain("rose scheduler", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
