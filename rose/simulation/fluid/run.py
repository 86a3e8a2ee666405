"""Fluid run of a scenario: the same input and the same figures as the step-by-step simulator.

Per training step: the version travels, the batch rolls out (`rollout`) while the hosts' clock goes
on (`serving`), the trainer trains. A trainer that may be stale rolls out the next batch meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from rose.simulation.cluster import EngineSpec
from rose.simulation.fluid.host_pool import GuestLoad
from rose.simulation.fluid.rollout import EnginePool, EpisodeBatch, RolloutPhase, roll_out
from rose.simulation.fluid.serving import WINDOW_S, ServingFluid
from rose.simulation.fluid.users import Summary
from rose.simulation.results import RunResult, StepResult, UseSlice
from rose.simulation.scenario import Scenario
from rose.simulation.step_times import profile_of
from rose.simulation.trainer import Algorithm
from rose.simulation.workload import Trajectory

FIDELITY = "fluid"
HOUR_S = 3_600.0


@dataclass(slots=True)
class _Totals:
    """Sums of a run."""

    dedicated_s: float = 0.0
    guest_s: float = 0.0
    training_s: float = 0.0
    sync_s: float = 0.0
    steps: list[StepResult] = field(default_factory=list)
    use: list[UseSlice] = field(default_factory=list)
    trajectory_s: Summary = field(default_factory=Summary)
    filtered: int = 0


class FluidRun:
    """One run of one scenario; `borrows`: whether the guests roll out as well."""

    def __init__(self, scenario: Scenario, seed: int = 0, *, borrows: bool = True) -> None:
        cluster, self._trainer = scenario.cluster, scenario.trainer
        self._scenario, self._seed = scenario, seed
        pool = cluster.serving
        self._pool = pool
        self._guests = pool.guest if pool is not None and borrows else None
        self._serving = None
        if pool is not None:
            traffic = scenario.traffic.requests(seed) if scenario.traffic else iter(())
            self._serving = ServingFluid(pool, traffic, scenario.slice_s)
        self._prompts = 0
        self._totals = _Totals()
        size = self._trainer.weight_bytes * self._trainer.delta_share
        links = cluster.links
        # A version reaches the dedicated engines over the near network, guests over the slow link.
        self._near_s = size / links.near_bytes_s + links.latency_s + links.apply_s
        self._far_s = size / min(links.slow_bytes_s, links.near_bytes_s) + links.latency_s
        self._far_s += links.apply_s
        # A turn is asked for and answered.
        self._turn_s = 2 * links.latency_s

    def run(self) -> RunResult:
        """All steps that end by `until_s`."""
        trainer = self._trainer
        ended_s = began_rollout_s = 0.0
        overlapped = trainer.max_staleness > 0
        for number in range(trainer.steps):
            synced_s = ended_s
            if number:
                synced_s += trainer.publish_s + (0.0 if overlapped else self._near_s)
            start_s = began_rollout_s if overlapped and number else synced_s
            episodes, batched_s, phases = self._batch(start_s, number)
            batched_s = max(batched_s, synced_s)
            if batched_s + self._train_s(episodes) > self._scenario.until_s:
                break
            if overlapped:
                began_rollout_s = batched_s
            ended_s = self._train(number, ended_s, synced_s, batched_s, episodes, phases)
        if self._serving is not None:
            self._serving.advance(ended_s)
        return self._result(ended_s)

    def _batch(
        self, start_s: float, number: int
    ) -> tuple[list[Trajectory], float, list[RolloutPhase]]:
        """Episodes that a step trains on, and when the last one is there."""
        trainer, now_s = self._trainer, start_s
        dapo = trainer.algorithm is Algorithm.DAPO
        take = trainer.groups
        if dapo:
            take = int(np.ceil(trainer.groups * (1 + trainer.over_sampling)))
        kept: list[list[Trajectory]] = []
        phases = []
        while len(kept) < trainer.groups:
            groups = list(self._groups(take))
            phase = self._phase(
                EpisodeBatch.of(list(chain.from_iterable(groups)), self._turn_s), now_s, number
            )
            phases.append(phase)
            now_s += phase.seconds
            for group in groups:
                if dapo and len({episode.score for episode in group}) == 1:
                    self._totals.filtered += 1
                else:
                    kept.append(group)
        return [e for group in kept[: trainer.groups] for e in group], now_s, phases

    def _groups(self, count: int) -> Iterator[list[Trajectory]]:
        workload, samples = self._scenario.rollouts, self._trainer.samples
        for _ in range(count):
            yield [workload.trajectory(self._seed, self._prompts, s) for s in range(samples)]
            self._prompts += 1

    def _phase(self, batch: EpisodeBatch, start_s: float, number: int) -> RolloutPhase:
        cluster, totals = self._scenario.cluster, self._totals
        dedicated = _pool_of(cluster.dedicated.replicas, cluster.dedicated.engine)
        guests = None
        if self._guests is not None and self._pool is not None:
            guests = _pool_of(self._pool.hosts, self._guests.engine)
        ready_s = start_s + (self._far_s - self._near_s if number else self._startup_s())
        serving = self._serving
        if serving is not None:
            serving.advance(start_s)

        def share_at(passed_s: float, load: GuestLoad) -> float:
            now_s = start_s + passed_s
            if serving is None:
                return 0.0
            if now_s < ready_s:
                serving.advance(now_s)
                return 0.0
            return serving.share_at(now_s, load)

        phase = roll_out(batch, dedicated, guests, share_at, self._trainer.concurrency, WINDOW_S)
        for end_s in phase.ends_s:
            totals.trajectory_s.add(float(end_s))
        totals.dedicated_s += phase.dedicated_busy_s
        totals.guest_s += phase.guest_busy_s
        return phase

    def _train_s(self, episodes: list[Trajectory]) -> float:
        tokens = sum(episode.total_tokens for episode in episodes)
        return self._trainer.train_s + self._trainer.train_s_per_token * tokens

    def _startup_s(self) -> float:
        return self._guests.startup_s if self._guests is not None else 0.0

    def _train(
        self,
        number: int,
        began_s: float,
        synced_s: float,
        batched_s: float,
        episodes: list[Trajectory],
        phases: list[RolloutPhase],
    ) -> float:
        trainer, totals = self._trainer, self._totals
        tokens = sum(episode.total_tokens for episode in episodes)
        train_s = self._train_s(episodes)
        ended_s = batched_s + train_s
        totals.training_s += train_s
        totals.sync_s += synced_s - began_s
        output = sum(episode.output_tokens for episode in episodes)
        made = sum(float(phase.output_tokens) for phase in phases)
        borrowed = output * sum(phase.borrowed_tokens for phase in phases) / max(1.0, made)
        totals.steps.append(
            StepResult(
                number, began_s, ended_s, batched_s - synced_s, train_s, synced_s - began_s,
                len(episodes), output, round(borrowed), tokens, min(number, trainer.max_staleness),
            )
        )  # fmt: skip
        seconds = max(1e-9, ended_s - began_s)
        if self._serving is not None:
            self._serving.advance(ended_s)
        totals.use.append(
            UseSlice(
                began_s,
                self._serving.taken_busy_s() / seconds if self._serving is not None else 0.0,
                sum(phase.guest_busy_s for phase in phases) / seconds,
                min(1.0, sum(phase.dedicated_busy_s for phase in phases) / seconds),
                train_s / seconds,
            )
        )
        return ended_s

    def _result(self, ended_s: float) -> RunResult:
        totals, scenario = self._totals, self._scenario
        steps = totals.steps
        counted = steps[1:] if len(steps) > 1 else steps
        span_s = counted[-1].ended_s - counted[0].started_s if counted else 0.0
        per_s = 1.0 / span_s if span_s > 0 else 0.0
        cluster = scenario.cluster
        cards = cluster.cards
        pool = self._pool
        used = totals.dedicated_s * cluster.dedicated.replicas * cluster.dedicated.engine.cards
        used += totals.training_s * cluster.training_cards
        borrowed_s = 0.0
        if pool is not None and self._serving is not None:
            borrowed_s = totals.guest_s * pool.hosts * pool.engine.cards
            used += borrowed_s + self._serving.busy_s * pool.hosts * pool.engine.cards
        return RunResult(
            scenario=scenario.name,
            policy="borrow" if self._guests is not None else "fixed",
            seed=self._seed,
            duration_s=ended_s,
            steps=tuple(steps),
            tokens_per_s=sum(step.total_tokens for step in counted) * per_s,
            steps_per_hour=len(counted) * HOUR_S * per_s,
            trajectory_s=totals.trajectory_s.percentiles(),
            turn_s=Summary().percentiles(),
            users=self._serving.latencies() if self._serving is not None else None,
            use=tuple(totals.use),
            gpu_use=min(1.0, used / (cards * ended_s)) if ended_s > 0 else 0.0,
            borrowed_gpu_hours=borrowed_s / HOUR_S,
            overhead_share=totals.sync_s / ended_s if ended_s > 0 else 0.0,
            counts={"filtered_groups": totals.filtered},
            assumptions=scenario.assumptions,
            fidelity=FIDELITY,
        )


def _pool_of(count: int, engine: EngineSpec) -> EnginePool:
    return EnginePool(count, engine, profile_of(engine.steps))


def run_fluid(scenario: Scenario, seed: int = 0, *, borrows: bool = True) -> RunResult:
    """Run a scenario as a fluid; the same result for the same seed."""
    return FluidRun(scenario, seed, borrows=borrows).run()
