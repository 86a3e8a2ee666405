"""Runs: a cluster of a scenario under one policy, from its seed to its result; many at once.

    scenario, policy, seed ──► Simulation ──► RunResult

Everything is built in one order and driven by one queue, so a seed has one history. Many runs are
spread over Ray where it is asked for, else over processes of this machine; their results come in
the order of the requests.
"""

import gc
import importlib.util
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_scheduler import ReplicaKind
from executor.grant_controller import GuardConfig
from executor.kv.lending import LendingLimits, PressureLimits
from executor.step_decision import GateLimits
from rose.errors import ConfigError
from rose.scheduler.core.messages import Event
from rose.simulation.clock import NS, EventQueue, VirtualLoop
from rose.simulation.engine.batching import ModelledEngine
from rose.simulation.engine.card import GUEST, HOST, ModelledCard
from rose.simulation.engine.guest import ModelledGuest
from rose.simulation.engine.host import ModelledHost
from rose.simulation.engine_specs import DraftFigures, EngineFigures, StepWork
from rose.simulation.fleet.gateway import ModelledGateway
from rose.simulation.fleet.hybrid_pool import HYBRID, ModelledHybridPool
from rose.simulation.fleet.node import (
    ModelledGuard,
    ModelledNode,
    ModelledReplica,
    ModelledTransfer,
)
from rose.simulation.fleet.scheduler import ModelledScheduler
from rose.simulation.fleet.trainer import ModelledTrainer
from rose.simulation.fleet.users import ModelledAutoscaler, ModelledUsers
from rose.simulation.policies import Borrows, Hybrid, PolicySetup, check_options, setup_of, tuned
from rose.simulation.results import LatencyBook, RunResult, UseSlice, percentiles
from rose.simulation.scenario import GuestSpec, HostPool, Scenario

# One node daemon has the cards of one machine.
NODE_CARDS = 8
# KV unit of dedicated replicas and borrowed cards.
UNIT_TOKENS = 256
GC_THRESHOLD = 50_000
LEAST_RESERVE = 0.001
# Time until a borrowed card has an engine that answers.
INSTANCE_S = 60.0


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Request for one run: scenario, policy and seed.

    options: constants and settings other than the usual.
    """

    scenario: Scenario
    policy: str
    seed: int = 0
    options: Mapping[str, float] = field(default_factory=dict)


def carry_out(asked: SimulatedRun) -> RunResult:
    """Simulate one run step by step and return its result.

    Raises ConfigError for an unknown policy or option.
    """
    options = {**asked.scenario.options, **asked.options}
    check_options(options)
    with tuned(options):
        loop = VirtualLoop(EventQueue())  # type: ignore[abstract]  # nothing here asks for sockets
        # Tasks leave cycles behind, and collecting these often would take half of the run.
        thresholds = gc.get_threshold()
        gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
        try:
            with loop.running():
                simulation = Simulation(replace(asked, options=options), loop)
                loop.queue.run(asked.scenario.until_s)
                return simulation.result()
        finally:
            loop.close()
            gc.set_threshold(*thresholds)


def run_all(
    asked: Sequence[SimulatedRun], workers: int | None = None, ray_address: str | None = None
) -> Iterator[RunResult]:
    """Yield the results of all runs in the order of the requests; `workers` run at once (None: one
    for each core).

    ray_address: address of a Ray cluster, or `local`; None for processes of this machine. Raises
    ConfigError if Ray is asked for and not installed.
    """
    if ray_address is not None:
        yield from _on_ray(asked, ray_address)
        return
    most = min(len(asked), workers or os.cpu_count() or 1)
    if most <= 1:
        yield from map(carry_out, asked)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(most, mp_context=context) as pool:
        yield from pool.map(carry_out, asked)


def _on_ray(asked: Sequence[SimulatedRun], address: str) -> Iterator[RunResult]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed; leave out --ray, or install ray")
    ray: Any = importlib.import_module("ray")
    began = not ray.is_initialized()
    if began:
        ray.init(address=None if address == "local" else address, log_to_driver=False)
    try:
        task = ray.remote(num_cpus=1)(carry_out)
        waiting = [task.remote(each) for each in asked]
        for each in waiting:
            yield ray.get(each)
    finally:
        if began:
            ray.shutdown()


class Simulation:
    """Cluster of a scenario under one policy, built on the event loop `loop`."""

    def __init__(self, asked: SimulatedRun, loop: VirtualLoop) -> None:
        scenario = self._scenario = asked.scenario
        setup = self._setup = setup_of(asked.policy)
        options = self._options = asked.options
        self._seed = asked.seed
        queue = self.queue = loop.queue
        cluster = scenario.cluster
        self.gateway = ModelledGateway(queue, self._say)
        self.scheduler = ModelledScheduler(
            queue, setup.leasing(), cluster.links.latency_s, self.gateway.set_table
        )
        self._transfer = ModelledTransfer(queue, cluster.links, scenario.trainer.weight_bytes)
        trainer = scenario.trainer
        tail = options.get("tail_batching", trainer.tail_batching) > 0
        parts = options.get("parts", trainer.parts) > 0
        parts = parts and not trainer.filters and setup.hybrid is Hybrid.NEVER
        self.trainer = ModelledTrainer(
            replace(trainer, tail_batching=tail, parts=parts),
            scenario.rollouts,
            asked.seed,
            loop,
            self.gateway,
            self._transfer,
            round(options.get("hedges", setup.hedges)),
        )
        self.nodes: list[ModelledNode] = []
        self.hosts: list[ModelledHost] = []
        self.guests: list[ModelledGuest] = []
        # Cards whose steps are borrowed or rollouts of the job's own: by pool.
        self._host_cards: list[ModelledCard] = []
        self._dedicated_cards: list[ModelledCard] = []
        self._hybrid_cards: list[ModelledCard] = []
        self._instances: list[ModelledReplica] = []
        self._boots: list[int] = []
        self._book: LatencyBook | None = None
        self._users: ModelledUsers | None = None
        self._use: list[UseSlice] = []
        self._seen = (0.0, 0.0, 0.0, 0.0)
        self._build(setup)

    def _build(self, setup: PolicySetup) -> None:
        cluster = self._scenario.cluster
        engine = self._drafting(cluster.dedicated.engine)
        names = [f"dedicated-{index}" for index in range(cluster.dedicated.replicas)]
        self._dedicated_cards = self._plain_replicas(names, engine, up=True)
        if cluster.serving is not None:
            self._build_serving(cluster.serving)
        if setup.hybrid is not Hybrid.NEVER:
            names = [f"{HYBRID}-{n}" for n in range(cluster.training_cards // engine.cards)]
            before = len(self.nodes)
            self._hybrid_cards = self._plain_replicas(names, engine, up=False)
            windowed = setup.hybrid is Hybrid.WINDOW
            pool = self.nodes[before:]
            ModelledHybridPool(self.queue, self.trainer, pool, windowed=windowed)
        self.scheduler.start()
        self.gateway.start()
        self.trainer.start()
        for node in self.nodes:
            node.on_activated = self._activated
            self.gateway.replicas |= node.replicas
            self.scheduler.attach(node)
            node.start()
        self.queue.every_s(self._scenario.slice_s, self._sample)

    def _nodes_of(self, engines: int, cards: int, *, far: bool) -> Iterator[ModelledNode]:
        """Yield the node of each of so many engines; a new node is made when NODE_CARDS cards are
        taken.
        """
        for index in range(engines):
            if index % max(1, NODE_CARDS // cards) == 0:
                node = ModelledNode(len(self.nodes) + 1, self._say, self._transfer, far=far)
                self.nodes.append(node)
            yield node

    def _drafting(self, engine: EngineFigures) -> EngineFigures:
        """Return the engine of a replica with the drafts of option `drafts`, if it is given."""
        made = self._options.get("drafts", 1.0)
        if made < 1:
            raise ConfigError(f"drafts: {made:g}; a step makes at least 1 token of a sequence")
        return replace(engine, drafts=DraftFigures(made)) if made > 1 else engine

    def _engine(self, name: str, spec: EngineFigures, card: ModelledCard) -> ModelledEngine:
        return ModelledEngine(name, spec, self.queue, card, GUEST, UNIT_TOKENS, leaps=True)

    def _plain_replicas(
        self, names: Sequence[str], spec: EngineFigures, *, up: bool
    ) -> list[ModelledCard]:
        """Add dedicated replicas on cards of their own, beside the trainer; return their cards."""
        cards = [ModelledCard(self.queue) for _ in names]
        nodes = self._nodes_of(len(names), spec.cards, far=False)
        for name, card, node in zip(names, cards, nodes, strict=True):
            node.add(name, ReplicaKind.DEDICATED, self._engine(name, spec, card), up=up)
        return cards

    # ---- the serving cluster ----

    def _build_serving(self, pool: HostPool) -> None:
        book = self._book = LatencyBook(pool.slo, self._scenario.slice_s)
        borrows = self._setup.borrows
        lent = pool.guest and replace(pool.guest, engine=self._drafting(pool.guest.engine))
        guest = lent if borrows is Borrows.GUESTS else None
        headroom = self._options.get("kv_headroom", guest.kv_headroom if guest else 0.2)
        reserve = min(1.0, max(LEAST_RESERVE, headroom))
        lending = LendingLimits(reserve=reserve) if guest is not None else None
        share = self._options.get("host_share", 0.5)
        for index, node in enumerate(self._nodes_of(pool.hosts, pool.engine.cards, far=True)):
            card = ModelledCard(self.queue, share)
            self._host_cards.append(card)
            host = ModelledHost(index, pool.engine, pool.slo, self.queue, card, book, lending)
            self.hosts.append(host)
            if guest is not None:
                self._add_guest(node, host, card, guest)
            elif borrows is Borrows.CARDS and lent is not None:
                self._add_instance(node, index, card, lent.engine)
        traffic = self._scenario.traffic
        requests = traffic.requests(self._seed) if traffic is not None else iter(())
        users = self._users = ModelledUsers(self.queue, self.hosts, requests)
        users.start()
        if self._instances:
            ModelledAutoscaler(self.queue, users, self.hosts, self._card_changed).start()

    def _add_guest(
        self, node: ModelledNode, host: ModelledHost, card: ModelledCard, spec: GuestSpec
    ) -> None:
        name = f"guest-{host.index}"
        guest = ModelledGuest(name, spec, host.page, self.queue, card, self._gate_limits(host))
        host.on_publish = guest.heard
        host.borrowed_bytes = guest.borrowed_bytes
        guest.lent_bytes = host.lent_bytes
        self.guests.append(guest)
        high = self._options.get("high_watermark", PressureLimits().high)
        low = min(high, self._options.get("low_watermark", PressureLimits().low))
        config = GuardConfig(
            token_budget=spec.token_budget,
            max_sequences=spec.engine.max_sequences,
            slack_share=self._options.get("slack_share", spec.slack_share),
            pressure=PressureLimits(policy=self._setup.pressure, high=high, low=low),
            kv_base_bytes=guest.base_bytes,
        )
        replica = node.add(name, ReplicaKind.GUEST, guest)
        node.guards.append(ModelledGuard(replica, guest, config))

    def _gate_limits(self, host: ModelledHost) -> GateLimits:
        chunk = host.spec.max_step_tokens
        prefill_s = host.spec.seconds(StepWork(chunk, 0, 1, 0)) / chunk
        usual = GateLimits()
        margin_s = self._options.get("safety_margin_s", usual.safety_margin_ns / NS)
        return replace(
            usual,
            safety_margin_ns=round(margin_s * NS),
            host_prefill_ns_per_token=round(prefill_s * NS),
        )

    def _add_instance(
        self, node: ModelledNode, index: int, card: ModelledCard, guest: EngineFigures
    ) -> None:
        """Add a replica that gets a whole card and its memory whenever users do not need it."""
        dedicated = self._scenario.cluster.dedicated.engine
        same = (guest.cards, guest.model) == (dedicated.cards, dedicated.model)
        name = f"instance-{index}"
        engine = self._engine(name, dedicated if same else guest, card)
        self._instances.append(node.add(name, ReplicaKind.GUEST, engine, up=False))
        self._boots.append(0)

    def _card_changed(self, index: int, free: bool) -> None:
        """Schedule an engine's start on a host's card that the autoscaler freed, or end the engine
        at once.
        """
        replica = self._instances[index]
        node = replica.node
        self._boots[index] += 1
        boot = self._boots[index]
        if not free:
            node.take_card(replica, "its users need the card")
            node.report()
            return

        def booted() -> None:
            if self._boots[index] == boot:
                node.start_engine(replica)
                node.report()

        self.queue.after_s(self._options.get("instance_s", INSTANCE_S), booted)

    # ---- messages and measures ----

    def _say(self, event: Event) -> None:
        self.scheduler.hear(event)

    def _activated(self, replica: ModelledReplica) -> None:
        self.gateway.activated(replica)
        self.trainer.activated(replica.version)

    def _busy_s(self) -> tuple[float, float, float, float]:
        """Return busy seconds: of all hosts, of all guests, of all dedicated cards, and of one
        training card.
        """
        host, guest, dedicated, hybrid = (
            sum(card.busy_until_now_ns(tenant) for card in cards) / NS
            for cards, tenant in (
                (self._host_cards, HOST),
                (self._host_cards, GUEST),
                (self._dedicated_cards, GUEST),
                (self._hybrid_cards, GUEST),
            )
        )
        training = self.trainer.train_until_now_s() + hybrid / max(1, len(self._hybrid_cards))
        return host, guest, dedicated, training

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
        """Return the simulation's result so far.

        Raises ConfigError if the policy borrows and there is no serving pool.
        """
        scenario, trainer, cluster = self._scenario, self.trainer, self._scenario.cluster
        if self._setup.borrows is not Borrows.NOTHING and cluster.serving is None:
            raise ConfigError(f"policy {self._setup.name} borrows, and there is no serving pool")
        now_s = max(self.queue.now_s, 1e-9)
        guests = (each for each in self.gateway.replicas.values() if each.node.far)
        leased_s = sum(each.leased_until_now_s() for each in guests)
        _, guest, dedicated, training = self._busy_s()
        serving_cards = cluster.serving.engine.cards if cluster.serving else 0
        used_s = sum(card.any_busy_ns() for card in self._host_cards) / NS * serving_cards
        used_s += dedicated * cluster.dedicated.engine.cards
        used_s += training * cluster.training_cards
        return RunResult.of_steps(
            trainer.steps,
            scenario=scenario.name,
            policy=self._setup.name,
            seed=self._seed,
            duration_s=self.queue.now_s,
            trajectory_s=percentiles(trainer.trajectory_s),
            turn_s=percentiles(trainer.turn_s),
            users=self._book.latencies() if self._book is not None else None,
            use=tuple(self._use),
            gpu_use=min(1.0, used_s / now_s / cluster.cards),
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
