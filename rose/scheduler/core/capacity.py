"""Capacity of the fleet: policies, the operator's stop, and what each node is told of them.

    policies, stop, telemetry ──> CapacityGate ──> verdicts ──> modes and caps, to nodes that change

Where no policy is in force nothing is lent. One named `cli`, which lends everything, is implied by
a mode on the scheduler's command line, and put in force by `rose harvest active`; beside policies
of an operator the strictest wins, as ever.

A policy of a Kubernetes object is changed by that object alone. While the API server does not
answer, the policy stays in force for `staleAfter`, and then its nodes are held.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable
from typing import Final

from elastic_scheduler import HarvestMode, HarvestModes, Lease, Offer
from elastic_scheduler.capacity import (
    CLI,
    Advice,
    AdviceBook,
    CapacityGate,
    CapacityNote,
    CapacityPolicy,
    EffectivePolicy,
    Halt,
    Limit,
    LimitKind,
    NodeFacts,
    NodeVerdict,
    cli_policy,
)
from elastic_scheduler.errors import PolicyError
from elastic_scheduler.leases.lease_table import stricter
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.fleet import FleetBook, NodeView
from rose.scheduler.core.limits import cut_text
from rose.scheduler.core.messages import (
    Action,
    Answer,
    Command,
    HarvestSet,
    LogRecord,
    ObjectsHeard,
    PolicyApplied,
    PolicyDeleted,
    Save,
)
from rose.scheduler.persistence import POLICIES, Saved, save_override, save_policy, save_stop
from rose.scheduler.wire import harvest_command
from rose.store.protocol import Delete, Write

MAX_OVERRIDES: Final = 1_024
# Bound on the memory that a node may report.
MOST_BYTES: Final = 1 << 50
# Source of a host that its node knows through /metrics alone.
SCRAPE: Final = "scrape"


class CapacityBook:
    """Capacity policies, the operator's stop, and the modes and caps last sent to each node."""

    def __init__(
        self,
        saved: Saved,
        default_mode: HarvestMode = HarvestMode.OFF,
        *,
        asks_objects: bool = False,
        asks_labels: bool = False,
    ) -> None:
        """Begin with the stored policies and stop. default_mode: used if no stop is stored.

        A default mode other than OFF also puts the policy `cli` in force, which lends everything.
        asks_objects: True if this scheduler reads policies from a Kubernetes API server, and
        asks_labels, if it reads labels of nodes there.
        """
        self._asks_labels = asks_labels
        self._asks_objects = asks_objects
        self._of_objects = set(saved.objects)
        self._objects_heard_s: float | None = None
        self._objects_refused: frozenset[str] = frozenset()
        opened = default_mode is not HarvestMode.OFF
        stop = saved.mode
        if stop is None:
            stop = default_mode if opened else HarvestMode.ACTIVE
        policies = {policy.name: policy for policy in saved.policies}
        if opened:
            policies.setdefault(CLI, cli_policy())
        self.gate = CapacityGate(
            HarvestModes(stop, saved.overrides), policies.values(), saved.halted
        )
        self._told: dict[int, object] = {}
        # Number of orders sent to nodes; and of stops, each of which every node confirms anew.
        self._orders = self._stops = 0
        self._kv_share: dict[str, float] = {}
        self._advice = AdviceBook()

    @property
    def stop(self) -> HarvestModes:
        """Modes set by the operator's hold, drain, resume and stop-all."""
        return self.gate.stop

    # ---- requests ----

    def writes(self, event: HarvestSet | PolicyApplied | PolicyDeleted) -> tuple[Write, ...]:
        """Return the writes that must be durable before `carry_out`. Raises RefusedError."""
        match event:
            case HarvestSet():
                return self._stop_writes(event)
            case PolicyApplied():
                self._check_room(event)
                return (save_policy(event.policy, of_object=event.of_object),)
            case PolicyDeleted():
                self._check_known(event)
                return (Delete(POLICIES + event.name),)

    def carry_out(self, event: HarvestSet | PolicyApplied | PolicyDeleted) -> list[Action]:
        """Put an operator's request in force; return log records and the caller's answer.

        A changed stop returns nothing: `judge` sends its commands. Raises RefusedError as `writes`
        does.
        """
        match event:
            case HarvestSet():
                self._check_mode(event)
                if self._opens(event):
                    self.gate.apply(cli_policy())
                self.stop.set_mode(event.mode, event.replica)
                if event.replica is None and event.mode is not HarvestMode.ACTIVE:
                    self._stops += 1
                self.gate.changed()
                return []
            case PolicyApplied():
                self._check_room(event)
                changed = self.gate.apply(event.policy)
                keep = self._of_objects.add if event.of_object else self._of_objects.discard
                keep(event.policy.name)
                said = json.loads(event.policy.to_json())
                return [LogRecord("policy_applied", {"policy": said}), Answer(int(changed))]
            case PolicyDeleted():
                self._check_known(event)
                self.gate.delete(event.name)
                self._of_objects.discard(event.name)
                return [LogRecord("policy_deleted", {"policy": event.name}), Answer(1)]

    def would_change(self, event: PolicyApplied) -> bool:
        """Return True if applying the policy would change the policies in force or end a halt.

        Raises RefusedError.
        """
        self._check_room(event)
        name = event.policy.name
        return event.policy not in self.gate.policies or self.gate.halted(name) is not None

    def outlook(
        self,
        policy: CapacityPolicy,
        nodes: Iterable[NodeView],
        offers: Collection[Offer],
        leases: Collection[Lease],
    ) -> tuple[list[str], list[str]]:
        """Return nodes that a policy selects, and guests whose leases end if it is applied."""
        facts = [_fact(view) for view in nodes]
        selected = [
            each.name for each in facts if policy.node_selector.matches(each.name, each.labels)
        ]
        plans = (g.plan(offers, leases) for g in (self.gate, self.gate.trial(policy, facts)))
        now, then = ({lease.replica for lease in (*p.release, *p.beyond)} for p in plans)
        return sorted(selected), sorted(then - now)

    def _stop_writes(self, event: HarvestSet) -> tuple[Write, ...]:
        self._check_mode(event)
        if event.replica is not None:
            return (save_override(event.mode, event.replica),)
        cli = (save_policy(cli_policy()),) if self._opens(event) else ()
        return (save_stop(event.mode), *cli)

    def _opens(self, event: HarvestSet) -> bool:
        """Return True if the request also puts the policy `cli` in force: none is yet."""
        above = event.mode is not HarvestMode.OFF and event.replica is None
        return event.opens and above and not self.gate.policies

    def _check_mode(self, event: HarvestSet) -> None:
        own = self.stop.overrides
        more = event.mode is not HarvestMode.ACTIVE and event.replica is not None
        if more and event.replica not in own and len(own) >= MAX_OVERRIDES:
            raise RefusedError(
                f"{MAX_OVERRIDES} replicas have modes of their own; set the mode of the cluster"
            )

    def _check_room(self, event: PolicyApplied) -> None:
        self._check_whose(event.policy.name, of_object=event.of_object)
        try:
            self.gate.check_room(event.policy.name)
        except PolicyError as error:
            raise RefusedError(str(error)) from None

    def _check_whose(self, name: str, *, of_object: bool) -> None:
        """Raise RefusedError if the policy belongs to the other owner, object or `rose policy`."""
        known = any(policy.name == name for policy in self.gate.policies)
        if of_object and (name == CLI or (known and name not in self._of_objects)):
            raise RefusedError(
                f"a policy {name!r} was put in force by `rose policy` or the scheduler's options;"
                f" give the object another name, or `rose policy delete {name}`"
            )
        if not of_object and self._asks_objects and name in self._of_objects:
            raise RefusedError(
                f"policy {name!r} is an object of Kubernetes; change that: kubectl edit rcp {name}"
            )

    def _check_known(self, event: PolicyDeleted) -> None:
        names = [policy.name for policy in self.gate.policies]
        if event.name not in names:
            known = ", ".join(names) or "none"
            raise RefusedError(f"there is no policy {event.name!r}; in force: {known}")
        self._check_whose(event.name, of_object=event.of_object)

    # ---- objects of Kubernetes ----

    @property
    def of_objects(self) -> frozenset[str]:
        """Names of the policies in force that are Kubernetes objects."""
        return frozenset(self._of_objects)

    def objects_heard(self, event: ObjectsHeard) -> None:
        """Record when the API server's objects were last read, and which of them are invalid."""
        before_s = self._objects_heard_s
        self._objects_heard_s = max(event.heard_s, before_s if before_s is not None else -math.inf)
        self._objects_refused = event.refused

    def _withheld(self, now_s: float) -> dict[str, Limit]:
        """Return why nodes of a policy are held, by its name: object unknown, stale or invalid."""
        if self._objects_heard_s is None:
            # Objects known to an earlier leader count as heard when this term began.
            self._objects_heard_s = now_s
        found = {}
        every = (policy.name for policy in self.gate.policies)
        # A policy may select the wrong nodes by stale labels, and another miss some.
        for name in every if self._asks_labels else self._of_objects:
            old_s = now_s - self._objects_heard_s
            if not self._asks_objects:
                found[name] = Limit(
                    LimitKind.API_SERVER,
                    f"the API server is not asked for object {name}: start the scheduler with"
                    f" --kubernetes, or `rose policy delete {name}`",
                )
            elif old_s > self.gate.policy(name).stale_after_s:
                why = f"the API server is not heard ({name})"
                found[name] = Limit(LimitKind.API_SERVER, why)
            elif name in self._objects_refused:
                why = f"the object cannot be taken as it is now ({name})"
                found[name] = Limit(LimitKind.OBJECT, why)
        return found

    # ---- nodes ----

    def heard(self, view: NodeView, telemetry: pb.Telemetry, now_s: float, *, lends: bool) -> None:
        """Record a node's telemetry: its host's load, SLO counters, KV share and lendable memory.

        lends: True if a guest of the node is leased.
        """
        if telemetry.HasField("host"):
            host = telemetry.host
            busy = host.busy_share if host.HasField("busy_share") else None
            each = {one.host: (one.slo_good, one.slo_bad) for one in telemetry.hosts}
            good, bad = host.slo_good, host.slo_bad
            self.gate.heard(view.node, busy, good, bad, now_s, lends=lends, hosts=each)
            self.gate.watched(view.node, scraped=host.source == SCRAPE)
            if host.HasField("kv_share"):
                self._kv_share[view.node] = host.kv_share
        said = [guest.lend_bytes for guest in telemetry.guests if guest.HasField("lend_bytes")]
        if said:
            self._advice.heard(view.node, min(MOST_BYTES, sum(said)))

    def judge(self, fleet: FleetBook, now_s: float, wall_s: float | None = None) -> list[Action]:
        """Judge all nodes if a second passed or something changed; return commands and log records.

        Only nodes whose modes or caps changed are sent commands.
        """
        self.gate.withhold(self._withheld(now_s))
        before = self.gate.judgements
        acts = self.gate.judge(_facts(fleet), now_s, wall_s)
        # Verdicts change with a judgement alone, and this is asked at every step.
        if self.gate.judgements == before:
            return self._recorded(acts)
        verdicts = ((each.node, each.would, each.policy) for each in self.gate.verdicts())
        self._advice.judged(verdicts, self.gate.busy_share, now_s)
        return self._recorded(acts) + self._tell(fleet.nodes, now_s)

    def detached(self, view: NodeView) -> None:
        """Delete the state of a node that detached."""
        self._told.pop(view.stream, None)
        self.gate.forget(view.node)
        self._advice.forget(view.node)
        self._kv_share.pop(view.node, None)

    def _recorded(self, acts: Iterable[CapacityNote | Halt]) -> list[Action]:
        return [
            Save(
                save_policy(
                    self.gate.policy(act.policy), act.why, of_object=act.policy in self._of_objects
                )
            )
            if isinstance(act, Halt)
            else LogRecord(act.event, {**act.fields, **self._figures(act)})
            for act in acts
        ]

    def _figures(self, note: CapacityNote) -> dict[str, object]:
        """Return the advised bytes and compute for a `capacity_advice` record, {} for others."""
        if note.event != "capacity_advice":
            return {}
        now = self._advice.of(str(note.fields["node"])).now
        figures = {"bytes": now.memory_bytes, "compute": now.compute}
        return {name: figure for name, figure in figures.items() if figure is not None}

    def greet(self, view: NodeView, now_s: float) -> list[Action]:
        """Judge a node that just attached; return log records and the node's mode commands."""
        return self._recorded(self.gate.greet(_fact(view), now_s)) + self._tell([view], now_s)

    def _tell(self, views: Iterable[NodeView], now_s: float) -> list[Action]:
        """Return commands for the nodes whose modes or caps differ from those last sent."""
        actions: list[Action] = []
        stop = self._stops, self.stop.mode, tuple(sorted(self.stop.overrides.items()))
        for view in views:
            verdict = self.gate.verdict(view.node)
            said = stop, verdict.mode, verdict.policy
            if said == self._told.get(view.stream):
                continue
            view.obeyed_s = None  # it has confirmed something else
            if verdict.settled:
                self._told[view.stream] = said
                self._orders += 1
                view.ordered(self._orders, now_s)
                actions += [Command(view.stream, each) for each in self._commands(view, verdict)]
        return actions

    def _commands(self, view: NodeView, verdict: NodeVerdict) -> list[pb.NodeCommand]:
        """Return commands of a node's caps, its mode, then the modes of single replicas.

        Caps come first, so that no memory is lent without them.
        """
        commands = [pb.NodeCommand(caps=caps_of(verdict.policy))] if view.hello.takes_caps else []
        commands.append(harvest_command(stricter(self.stop.mode, verdict.mode)))
        for replica in sorted(self.stop.overrides):
            commands.append(harvest_command(self.gate.mode_of(replica, view.node), replica))
        if view.hello.obeys:
            commands[-1].harvest.order = view.order
        return commands

    def advice_of(self, node: str) -> Advice:
        """Return the memory and compute that the node lends, or would lend in mode Advisory."""
        return self._advice.of(node)

    def kv_share(self, node: str) -> float | None:
        """Return the share of the host's KV cache that is in use, None while unknown."""
        return self._kv_share.get(node)

    # ---- operators ----

    def listed(self) -> list[pb.PolicyView]:
        """Return all policies in force as rows for `rose policy`, with reasons of halts."""
        return [
            pb.PolicyView(
                name=each.name,
                policy=each.to_json(),
                halted=cut_text(self.gate.halted(each.name) or ""),
            )
            for each in self.gate.policies
        ]


def _facts(fleet: FleetBook) -> Callable[[], list[NodeFacts]]:
    return lambda: [_fact(view) for view in fleet.nodes]


def _fact(view: NodeView) -> NodeFacts:
    return NodeFacts(view.node, view.hello.labels, view.hello.takes_caps, view.unlabelled)


def caps_of(policy: EffectivePolicy) -> pb.Caps:
    """Return the caps message for a node under its effective policy; unbounded fields are unset."""
    return pb.Caps(
        compute=policy.compute,
        kv_bytes=policy.memory_bytes,
        kv_headroom=policy.kv_headroom or None,
        slack_share=policy.slack_share,
        high_watermark=policy.watermarks.high if policy.watermarks else None,
        low_watermark=policy.watermarks.low if policy.watermarks else None,
        stale_after_s=policy.stale_after_s,
        reclaim_deadline_s=policy.reclaim_deadline_s,
    )
