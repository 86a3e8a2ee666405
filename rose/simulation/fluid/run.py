"""Fluid run of a scenario: the same input and the same figures as the step-by-step simulator.

Per training step: the version travels, the batch rolls out (`rollout`) while the hosts' clock goes
on (`hosts`), the trainer trains. A trainer that may be stale rolls out the next batch meanwhile.
"""

from collections.abc import Iterator
from itertools import chain

from rose.simulation.fluid.hosts import WINDOW_S, GuestDuty, ServingFluid
from rose.simulation.fluid.rollout import EpisodeBatch, FluidPool, RolloutPhase, roll_out
from rose.simulation.results import RunResult, StepResult, UseSlice, percentiles
from rose.simulation.scenario import Scenario
from rose.simulation.workloads.episodes import RolloutEpisode
from rose.simulation.workloads.traffic import HOUR_S

FIDELITY = "fluid"


class FluidRun:
    """Run of one scenario by the fluid model. borrows: True if guests roll out as well."""

    def __init__(self, scenario: Scenario, seed: int = 0, *, borrows: bool = True) -> None:
        cluster, self._trainer = scenario.cluster, scenario.trainer
        self._scenario, self._seed = scenario, seed
        pool = cluster.serving
        self._guest = pool.guest if pool is not None and borrows else None
        self._serving = None
        if pool is not None:
            traffic = scenario.traffic.requests(seed) if scenario.traffic else iter(())
            self._serving = ServingFluid(pool, traffic, scenario.slice_s)
        self._prompts = self._filtered = 0
        self._steps: list[StepResult] = []
        self._use: list[UseSlice] = []
        self._trajectory_s: list[float] = []
        # Busy seconds of an engine of each pool, and of the training cards.
        self._dedicated_s = self._guest_s = self._training_s = self._host_s = 0.0
        size, links = self._trainer.delta_bytes, cluster.links
        # A version reaches the dedicated engines over the near network, guests over the slow link.
        self._near_s = size / links.near_bytes_s + links.latency_s + links.apply_s
        self._far_s = size / min(links.slow_bytes_s, links.near_bytes_s) + links.latency_s
        self._far_s += links.apply_s

    def run(self) -> RunResult:
        """Run all training steps that end by the scenario's `until_s`, and return the result."""
        trainer = self._trainer
        ended_s = began_rollout_s = 0.0
        overlapped = trainer.max_staleness > 0
        for number in range(trainer.steps):
            synced_s = ended_s
            if number:
                synced_s += trainer.publish_s + (0.0 if overlapped else self._near_s)
            start_s = began_rollout_s if overlapped and number else synced_s
            episodes, phases = self._batch(start_s, number)
            batched_s = max(start_s + sum(phase.seconds for phase in phases), synced_s)
            train_s = trainer.seconds(sum(each.total_tokens for each in episodes))
            if batched_s + train_s > self._scenario.until_s:
                break
            began_rollout_s = batched_s
            step = self._step(number, (ended_s, synced_s, batched_s, train_s), episodes, phases)
            self._steps.append(step)
            self._count_use(step, phases)
            ended_s = step.ended_s
        return self._result(ended_s)

    def _batch(self, now_s: float, number: int) -> tuple[list[RolloutEpisode], list[RolloutPhase]]:
        """Return the episodes that a step trains on, and the rollout phases that make them."""
        trainer = self._trainer
        kept: list[list[RolloutEpisode]] = []
        phases: list[RolloutPhase] = []
        while len(kept) < trainer.groups:
            groups = list(self._groups(trainer.started_groups))
            phases.append(self._phase(list(chain.from_iterable(groups)), now_s, number))
            now_s += phases[-1].seconds
            for group in groups:
                if trainer.filters and len({episode.score for episode in group}) == 1:
                    self._filtered += 1
                else:
                    kept.append(group)
        return [e for group in kept[: trainer.groups] for e in group], phases

    def _groups(self, count: int) -> Iterator[list[RolloutEpisode]]:
        workload, samples = self._scenario.rollouts, self._trainer.samples
        for _ in range(count):
            yield [workload.trajectory(self._seed, self._prompts, s) for s in range(samples)]
            self._prompts += 1

    def _phase(self, episodes: list[RolloutEpisode], start_s: float, number: int) -> RolloutPhase:
        cluster, guest, serving = self._scenario.cluster, self._guest, self._serving
        guests = None
        if guest is not None and cluster.serving is not None:
            guests = FluidPool(cluster.serving.hosts, guest.engine)
        first_s = guest.startup_s if guest is not None else 0.0
        ready_s = start_s + (self._far_s - self._near_s if number else first_s)
        if serving is not None:
            serving.advance(start_s)

        def share_at(passed_s: float, load: GuestDuty) -> float:
            now_s = start_s + passed_s
            if serving is None:
                return 0.0
            if now_s < ready_s:
                serving.advance(now_s)
                return 0.0
            return serving.share_at(now_s, load)

        phase = roll_out(
            # Two messages for each turn: the request and its answer.
            EpisodeBatch.of(episodes, 2 * cluster.links.latency_s),
            FluidPool(cluster.dedicated.replicas, cluster.dedicated.engine),
            guests,
            share_at,
            self._trainer.concurrency,
            WINDOW_S,
        )
        self._trajectory_s += phase.ends_s.tolist()
        return phase

    def _step(
        self,
        number: int,
        times: tuple[float, float, float, float],
        episodes: list[RolloutEpisode],
        phases: list[RolloutPhase],
    ) -> StepResult:
        """Return a step's result.

        times: its begin, when its version arrived, when its batch was complete, and seconds of
        training.
        """
        began_s, synced_s, batched_s, train_s = times
        output = sum(episode.output_tokens for episode in episodes)
        made = sum(float(phase.output_tokens) for phase in phases)
        borrowed = output * sum(phase.borrowed_tokens for phase in phases) / max(1.0, made)
        return StepResult(
            number, began_s, batched_s + train_s, batched_s - synced_s, train_s,
            synced_s - began_s, len(episodes), output, round(borrowed),
            sum(episode.total_tokens for episode in episodes),
            min(number, self._trainer.max_staleness),
        )  # fmt: skip

    def _count_use(self, step: StepResult, phases: list[RolloutPhase]) -> None:
        host_s, seconds = 0.0, max(1e-9, step.ended_s - step.started_s)
        if self._serving is not None:
            self._serving.advance(step.ended_s)
            host_s, self._host_s = self._serving.busy_s - self._host_s, self._serving.busy_s
        guest_s = sum(phase.guest_busy_s for phase in phases)
        dedicated_s = sum(phase.dedicated_busy_s for phase in phases)
        self._guest_s += guest_s
        self._dedicated_s += dedicated_s
        self._training_s += step.train_s
        self._use.append(
            UseSlice(
                step.started_s,
                host_s / seconds,
                guest_s / seconds,
                min(1.0, dedicated_s / seconds),
                step.train_s / seconds,
            )
        )

    def _result(self, ended_s: float) -> RunResult:
        scenario, serving = self._scenario, self._serving
        cluster = scenario.cluster
        hosts = cluster.serving.cards if cluster.serving is not None else 0
        used_s = self._dedicated_s * cluster.dedicated.cards
        used_s += self._training_s * cluster.training_cards + self._guest_s * hosts
        used_s += serving.busy_s * hosts if serving is not None else 0.0
        sync_s = sum(step.sync_s for step in self._steps)
        return RunResult.of_steps(
            self._steps,
            scenario=scenario.name,
            policy="borrow" if self._guest is not None else "fixed",
            seed=self._seed,
            duration_s=ended_s,
            trajectory_s=percentiles(self._trajectory_s),
            turn_s=percentiles([]),
            users=serving.latencies() if serving is not None else None,
            use=tuple(self._use),
            gpu_use=min(1.0, used_s / (cluster.cards * ended_s)) if ended_s > 0 else 0.0,
            borrowed_gpu_hours=self._guest_s * hosts / HOUR_S,
            overhead_share=sync_s / ended_s if ended_s > 0 else 0.0,
            counts={"filtered_groups": self._filtered},
            assumptions=scenario.assumptions,
            fidelity=FIDELITY,
        )


def run_fluid(scenario: Scenario, seed: int = 0, *, borrows: bool = True) -> RunResult:
    """Run a scenario by the fluid model; return its result, the same for the same seed."""
    return FluidRun(scenario, seed, borrows=borrows).run()
