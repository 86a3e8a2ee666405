"""One run: builds the cluster of a scenario for one policy, runs it, and sums it up.

    scenario, policy, seed ──► Simulation ──► RunResult

Everything is built in one order and driven by one queue, so a seed has one history.
"""

import gc
from collections.abc import Mapping
from dataclasses import replace

from elastic_scheduler import ReplicaKind
from executor.grant_controller import GuardConfig
from executor.kv.lending import LendingLimits
from executor.kv.pressure import PressureLimits
from executor.step_decision import GateLimits
from rose.errors import ConfigError
from rose.scheduler.core.messages import Event
from rose.simulation.clock.event_loop import VirtualLoop
from rose.simulation.clock.event_queue import NS, EventQueue
from rose.simulation.cluster import EngineSpec, GuestSpec, HostPool
from rose.simulation.engine.batching import ModelledEngine
from rose.simulation.engine.card import GUEST, HOST, ModelledCard
from rose.simulation.engine.guest import ModelledGuest
from rose.simulation.engine.host import ModelledHost
from rose.simulation.fleet.gateway import ModelledGateway
from rose.simulation.fleet.hybrid_pool import ModelledHybridPool
from rose.simulation.fleet.node import ModelledGuard, ModelledNode
from rose.simulation.fleet.replica import ModelledReplica
from rose.simulation.fleet.scheduler import ModelledScheduler
from rose.simulation.fleet.trainer import ModelledTrainer
from rose.simulation.fleet.users import (
    LatencyBook,
    ModelledAutoscaler,
    ModelledUsers,
    percentiles,
)
from rose.simulation.fleet.weights import ModelledTransfer
from rose.simulation.policies.catalog import (
    Borrows,
    Hybrid,
    PolicySetup,
    check_options,
    setup_of,
    tuned,
)
from rose.simulation.policies.libra import HYBRID
from rose.simulation.results import RunResult, UseSlice
from rose.simulation.scenario import Scenario
from rose.simulation.step_times import StepWork

# One node daemon has the cards of one machine.
NODE_CARDS = 8
# KV unit of dedicated replicas and borrowed cards.
UNIT_TOKENS = 256
GC_THRESHOLD = 50_000
LEAST_RESERVE = 0.001


def run(
    scenario: Scenario, policy: str, seed: int = 0, options: Mapping[str, float] | None = None
) -> RunResult:
    """Run a scenario under a policy. `options`: constants and settings other than the usual.

    Raises ConfigError for a policy or option that there is not.
    """
    wanted = {**scenario.options, **(options or {})}
    check_options(wanted)
    with tuned(wanted):
        queue = EventQueue()
        loop = VirtualLoop(queue)  # type: ignore[abstract]  # nothing here asks for sockets
        # Tasks leave cycles behind, and looking for them takes as long as all else.
        thresholds = gc.get_threshold()
        gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
        try:
            with loop.running():
                simulation = Simulation(scenario, setup_of(policy), seed, wanted, queue, loop)
                queue.run(scenario.until_s)
                return simulation.result()
        finally:
            loop.close()
            gc.set_threshold(*thresholds)


class Simulation:
    """A cluster under one policy."""

    def __init__(
        self,
        scenario: Scenario,
        setup: PolicySetup,
        seed: int,
        options: Mapping[str, float],
        queue: EventQueue,
        loop: VirtualLoop,
    ) -> None:
        self._scenario = scenario
        self._setup = setup
        self._seed = seed
        self._options = options
        self.queue = queue
        self.loop = loop
        links = scenario.cluster.links
        self.gateway = ModelledGateway(self.queue, self._say)
        self.scheduler = ModelledScheduler(
            self.queue, setup.leasing(), links.latency_s, self.gateway.set_table
        )
        self._transfer = ModelledTransfer(self.queue, links, scenario.trainer.weight_bytes)
        tail = options.get("tail_batching", scenario.trainer.tail_batching) > 0
        self.trainer = ModelledTrainer(
            replace(scenario.trainer, tail_batching=tail),
            scenario.rollouts,
            seed,
            self.queue,
            self.loop,
            self.gateway,
            self._transfer,
            self._say,
            self.queue.stop,
            hedges=round(options.get("hedges", setup.hedges)),
            priority_of=setup.priority_of,
        )
        self.nodes: list[ModelledNode] = []
        self.hosts: list[ModelledHost] = []
        self.guests: list[ModelledGuest] = []
        self._host_cards: list[ModelledCard] = []
        self._dedicated_cards: list[ModelledCard] = []
        self._hybrid_cards: list[ModelledCard] = []
        self._borrowed: list[ModelledReplica] = []
        self._book: LatencyBook | None = None
        self._users: ModelledUsers | None = None
        self._instances: list[ModelledReplica] = []
        self._boots: list[int] = []
        self._use: list[UseSlice] = []
        self._seen = (0.0, 0.0, 0.0, 0.0)
        self._build()

    def _build(self) -> None:
        cluster = self._scenario.cluster
        engine = cluster.dedicated.engine
        names = [f"dedicated-{index}" for index in range(cluster.dedicated.replicas)]
        self._dedicated_cards = self._plain_replicas(names, engine, up=True)
        if cluster.serving is not None:
            self._build_serving(cluster.serving, engine)
        if self._setup.hybrid is not Hybrid.NEVER:
            count = cluster.training_cards // engine.cards
            names = [f"{HYBRID}-{index}" for index in range(count)]
            before = len(self.nodes)
            self._hybrid_cards = self._plain_replicas(names, engine, up=False)
            ModelledHybridPool(
                self.queue,
                self.trainer,
                self.nodes[before:],
                windowed=self._setup.hybrid is Hybrid.WINDOW,
            )
        self.scheduler.start()
        self.gateway.start()
        self.trainer.start()
        for node in self.nodes:
            node.on_activated = self._activated
            self.gateway.replicas |= node.replicas
            self.scheduler.attach(node)
            node.start()
        self.queue.every_s(self._scenario.slice_s, self._sample)

    def _node(self, *, far: bool) -> ModelledNode:
        number = len(self.nodes)
        node = ModelledNode(
            f"node-{number}",
            number + 1,
            self.queue,
            self._say,
            self._transfer,
            self._scenario.cluster.links.apply_s,
            far=far,
        )
        self.nodes.append(node)
        return node

    def _plain_replicas(
        self, names: list[str], spec: EngineSpec, *, up: bool
    ) -> list[ModelledCard]:
        """Replicas on cards of their own, beside the trainer."""
        cards: list[ModelledCard] = []
        node: ModelledNode | None = None
        each_node = max(1, NODE_CARDS // spec.cards)
        for index, name in enumerate(names):
            if node is None or index % each_node == 0:
                node = self._node(far=False)
            card = ModelledCard(self.queue)
            cards.append(card)
            engine = ModelledEngine(name, spec, self.queue, card, GUEST, UNIT_TOKENS, leaps=True)
            node.replicas[name] = ModelledReplica(
                name,
                node.name,
                ReplicaKind.DEDICATED,
                engine,
                self.queue,
                node.told,
                far=False,
                up=up,
            )
        return cards

    # ---- the serving cluster ----

    def _build_serving(self, pool: HostPool, dedicated: EngineSpec) -> None:
        self._book = LatencyBook(pool.slo, self._scenario.slice_s)
        borrows = self._setup.borrows
        guest = pool.guest if borrows is Borrows.GUESTS else None
        headroom = self._options.get("kv_headroom", guest.kv_headroom if guest else 0.2)
        reserve = min(1.0, max(LEAST_RESERVE, headroom))
        lending = LendingLimits(reserve=reserve) if guest is not None else None
        share = self._options.get("host_share", 0.5)
        node: ModelledNode | None = None
        each_node = max(1, NODE_CARDS // pool.engine.cards)
        for index in range(pool.hosts):
            if node is None or index % each_node == 0:
                node = self._node(far=True)
            card = ModelledCard(self.queue, share)
            self._host_cards.append(card)
            host = ModelledHost(index, pool.engine, pool.slo, self.queue, card, self._book, lending)
            self.hosts.append(host)
            if guest is not None:
                self._add_guest(node, host, card, guest)
            elif borrows is Borrows.CARDS and pool.guest is not None:
                self._add_instance(node, index, card, pool.guest.engine, dedicated)
        traffic = self._scenario.traffic
        if traffic is not None:
            self._users = ModelledUsers(self.queue, self.hosts, traffic.requests(self._seed))
            self._users.start()
        if borrows is Borrows.CARDS and self._instances:
            users = self._users or ModelledUsers(self.queue, self.hosts, iter(()))
            ModelledAutoscaler(self.queue, users, self.hosts, self._card_changed).start()

    def _add_guest(
        self, node: ModelledNode, host: ModelledHost, card: ModelledCard, spec: GuestSpec
    ) -> None:
        limits = self._gate_limits(host)
        name = f"guest-{host.index}"
        guest = ModelledGuest(name, spec, host.page, self.queue, card, limits)
        host.on_publish = guest.heard
        host.borrowed_bytes = guest.borrowed_bytes
        guest.lent_bytes = host.lent_bytes
        self.guests.append(guest)
        replica = ModelledReplica(
            name, node.name, ReplicaKind.GUEST, guest, self.queue, node.told, far=True
        )
        node.replicas[name] = replica
        self._borrowed.append(replica)
        high = self._options.get("high_watermark", PressureLimits().high)
        low = min(high, self._options.get("low_watermark", PressureLimits().low))
        config = GuardConfig(
            token_budget=spec.token_budget,
            max_sequences=spec.engine.max_sequences,
            slack_share=self._options.get("slack_share", spec.slack_share),
            pressure=PressureLimits(policy=self._setup.pressure, high=high, low=low),
            kv_base_bytes=guest.base_bytes,
        )
        node.guards.append(ModelledGuard(replica, guest, config))

    def _gate_limits(self, host: ModelledHost) -> GateLimits:
        chunk = host.spec.max_step_tokens
        prefill_s = host.spec.steps.seconds(StepWork(chunk, 0, 1, 0)) / chunk
        usual = GateLimits()
        margin_s = self._options.get("safety_margin_s", usual.safety_margin_ns / NS)
        return replace(
            usual,
            safety_margin_ns=round(margin_s * NS),
            host_prefill_ns_per_token=round(prefill_s * NS),
        )

    def _add_instance(
        self,
        node: ModelledNode,
        index: int,
        card: ModelledCard,
        spec: EngineSpec,
        dedicated: EngineSpec,
    ) -> None:
        """A whole card that users do not need: all its memory is the instance's."""
        same = spec.cards == dedicated.cards and spec.model == dedicated.model
        whole = dedicated if same else spec
        name = f"instance-{index}"
        engine = ModelledEngine(name, whole, self.queue, card, GUEST, UNIT_TOKENS, leaps=True)
        replica = ModelledReplica(
            name,
            node.name,
            ReplicaKind.GUEST,
            engine,
            self.queue,
            node.told,
            far=True,
            up=False,
        )
        node.replicas[name] = replica
        self._instances.append(replica)
        self._boots.append(0)
        self._borrowed.append(replica)

    def _card_changed(self, index: int, free: bool) -> None:
        """The autoscaler freed a host's card, or wants it back now."""
        replica = self._instances[index]
        node = next(each for each in self.nodes if each.name == replica.node)
        self._boots[index] += 1
        boot = self._boots[index]
        if not free:
            node.revoke(replica, "its users need the card")
            if replica.up:
                replica.engine_down()
            node.report()
            return

        def booted() -> None:
            if self._boots[index] == boot:
                replica.engine_up()
                node.catch_up(replica)
                node.report()

        takes_s = self._options.get("instance_s", self._setup.instance_s)
        self.queue.after_s(takes_s, booted)

    # ---- messages and measures ----

    def _say(self, event: Event) -> None:
        self.scheduler.hear(event)

    def _activated(self, replica: ModelledReplica) -> None:
        self.gateway.activated(replica)
        self.trainer.activated(replica.version)

    def _busy_s(self) -> tuple[float, float, float, float]:
        host = sum(card.busy_until_now_ns(HOST) for card in self._host_cards) / NS
        guest = sum(card.busy_until_now_ns(GUEST) for card in self._host_cards) / NS
        dedicated = sum(card.busy_until_now_ns(GUEST) for card in self._dedicated_cards) / NS
        hybrid = sum(card.busy_until_now_ns(GUEST) for card in self._hybrid_cards) / NS
        return (
            host,
            guest,
            dedicated,
            self.trainer.train_until_now_s()
            + (hybrid / len(self._hybrid_cards) if self._hybrid_cards else 0.0),
        )

    def _sample(self) -> None:
        now = self._busy_s()
        host, guest, dedicated, training = (
            new - old for new, old in zip(now, self._seen, strict=True)
        )
        self._seen = now
        slice_s = self._scenario.slice_s
        hosts, own = max(1, len(self._host_cards)), max(1, len(self._dedicated_cards))
        self._use.append(
            UseSlice(
                round(self.queue.now_s - slice_s, 6),
                host / hosts / slice_s,
                guest / hosts / slice_s,
                dedicated / own / slice_s,
                min(1.0, training / slice_s),
            )
        )

    def result(self) -> RunResult:
        """Return the run's result."""
        scenario, trainer, cluster = self._scenario, self.trainer, self._scenario.cluster
        if self._setup.borrows is not Borrows.NOTHING and cluster.serving is None:
            raise ConfigError(f"policy {self._setup.name} borrows, and there is no serving pool")
        steps = tuple(trainer.steps)
        # The first one waits for leases and caches that are there ever after.
        counted = steps[1:] or steps
        took_s = sum(step.ended_s - step.started_s for step in counted)
        tokens = sum(step.total_tokens for step in counted)
        now_s = max(self.queue.now_s, 1e-9)
        leased_s = sum(each.leased_until_now_s() for each in self._borrowed)
        _, guest, dedicated, training = self._busy_s()
        cards = cluster.cards
        serving_cards = cluster.serving.engine.cards if cluster.serving else 0
        serving_s = sum(card.any_busy_ns() for card in self._host_cards) / NS
        used_s = serving_s * serving_cards + dedicated * cluster.dedicated.engine.cards
        used_s += training * cluster.training_cards
        return RunResult(
            scenario=scenario.name,
            policy=self._setup.name,
            seed=self._seed,
            duration_s=self.queue.now_s,
            steps=steps,
            tokens_per_s=tokens / took_s if took_s > 0 else 0.0,
            steps_per_hour=3_600 * len(counted) / took_s if took_s > 0 else 0.0,
            trajectory_s=percentiles(trainer.trajectory_s),
            turn_s=percentiles(trainer.turn_s),
            users=self._book.latencies() if self._book is not None else None,
            use=tuple(self._use),
            gpu_use=min(1.0, used_s / now_s / cards),
            borrowed_gpu_hours=guest * serving_cards / 3_600,
            overhead_share=min(1.0, self.gateway.switch_s / leased_s) if leased_s > 0 else 0.0,
            counts=self._counts(),
            assumptions=scenario.assumptions,
        )

    def _counts(self) -> dict[str, int]:
        log, stats = self.scheduler.log, self.gateway.stats
        engines = [each.engine for each in self.gateway.replicas.values()]
        for engine in (*engines, *self.hosts):
            engine.settle()
        counts = {
            "steps_missing": self._scenario.trainer.steps - len(self.trainer.steps),
            "leases": log["lease_granted"],
            "revoked": log["revoked"],
            "turns": stats.turns,
            "guest_tokens": self.gateway.borrowed_tokens,
            "turns_failed": self.trainer.failed,
            "continuations": stats.continuations,
            "second_copies": stats.hedges,
            "second_copies_first": stats.hedge_wins,
            "preemptions": sum(each.preemptions for each in engines),
            "prefix_hit_tokens": sum(each.hit_tokens for each in engines),
            "prefill_tokens": sum(each.prefilled_tokens for each in engines),
            "guest_shrinks": sum(each.shrinks for each in self.guests),
            "reclaims": sum(g.reclaims for node in self.nodes for g in node.guards),
            "host_preemptions": sum(each.preemptions for each in self.hosts),
            "requests_refused": self._users.refused if self._users else 0,
            "groups_filtered": self.trainer.filtered,
            "engine_steps": sum(each.steps for each in [*engines, *self.hosts]),
            "events": self.queue.events,
        }
        return counts | {f"buffer_{k}": v for k, v in self.trainer.buffer_counts().items()}
