"""Fluid of a whole fleet: serving deployments and training jobs that borrow from them, for days.

    deployment ── busy share of each quarter of an hour ──► what its hosts could lend
    job ── rollout: the free hosts that lend most ──► train ──► weights travel ──► rollout …

A job borrows from one deployment at a time, at most so many cards, and only for rollouts that get
shorter by it; a host has the guest of one job.
Rollouts of the same batch on as many guests with the same share take equally long, so they are
computed once: a week of a thousand cards takes minutes, and its memory does not grow with the days.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.errors import ConfigError
from rose.simulation.engine_specs import EngineFigures, published_engine
from rose.simulation.fluid.hosts import MARGIN_S, SHARED_SPEED, HostPoolFluid, UserMix
from rose.simulation.fluid.rollout import EpisodeBatch, FluidPool, RolloutPhase, roll_out
from rose.simulation.scenario import Links, TrainerSpec
from rose.simulation.workloads.episodes import RolloutWorkload
from rose.simulation.workloads.traffic import DAY_S, HOUR_S, BurstyTraffic
from slo import SloSpec

QUARTER_S = 900.0
KV_HEADROOM = 0.2
# Number of different batches of a job; later steps play them again.
BATCHES = 8
_SHARE_STEP = 0.05
# Most load beside a guest, as a share of the throughput at half speed: beyond it queues grow.
_KEEPS_UP = 0.9
GUEST_STEP_S = 0.03
_LEAST_SHARE = 0.1
_LEAST_GAIN = 0.01
_TICK_S = 5.0
# Gauss-Hermite points and weights of a normal distribution, for bursts that differ in density.
_POINTS = ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Equal hosts that serve one model's users, and what their operator lends.

    slack_share: share of a busy host's slack that is lent, 0 for idle time alone. hold: busy share
    of a host above which nothing is lent, None for no limit; a host that decodes all the time is
    always busy.
    """

    name: str
    hosts: int
    engine: EngineFigures
    traffic: BurstyTraffic
    slo: SloSpec
    slack_share: float = 0.5
    hold: MaxHostBusy | None = None

    @property
    def cards(self) -> int:
        """Number of cards of all hosts of the deployment."""
        return self.hosts * self.engine.cards

    def lendable(self, time_s: float) -> tuple[float, float]:
        """Return (share of time that a host is busy for users, share of a card that a guest would
        have) at a time of the week.

        Beside a busy host a guest has half of the card, while the host keeps up at half of its
        speed and its slack is longer than a guest's step.
        """
        traffic, busy, lent = self.traffic, 0.0, 0.0
        mix = UserMix(traffic.prompt.mean, traffic.output.mean)
        fluid = HostPoolFluid(self.engine, self.hosts, mix)
        rate = traffic.rate_per_s * traffic.day.at(traffic.start_s + time_s)
        bursts = traffic.bursts
        calm = rate * bursts.calm_factor
        states = [(1 - bursts.share, calm)]
        for z, weight in _POINTS:
            density = math.exp(bursts.spread * z - bursts.spread**2 / 2)
            states.append((bursts.share * weight, calm * bursts.ratio * density))
        for weight, state_rate in states:
            fluid.in_host = fluid.settled(state_rate / self.hosts)
            alone = fluid.busy
            busy += weight * alone
            if self.hold is not None and alone >= self.hold.share:
                continue
            lent += weight * self._beside(fluid, state_rate / self.hosts, alone)
        return busy, lent

    def _beside(self, fluid: HostPoolFluid, rate_per_s: float, alone: float) -> float:
        if rate_per_s >= _KEEPS_UP * fluid.capacity_rps(SHARED_SPEED):
            return 1 - alone
        fluid.in_host = fluid.settled(rate_per_s, SHARED_SPEED)
        slack_s = self.slo.tpot_s - fluid.step_s(SHARED_SPEED) - MARGIN_S
        if self.slack_share * slack_s <= GUEST_STEP_S:
            return 1 - alone
        return (1 - fluid.busy) + fluid.busy * SHARED_SPEED


@dataclass(frozen=True, slots=True)
class FleetJob:
    """Training job with `replicas` engines and `training_cards` of its own; guests run the same
    `model`.

    borrowed_cards: the most that it borrows at once. start_s: start in seconds from the fleet's.
    """

    name: str
    model: str
    replicas: int
    replica_cards: int
    training_cards: int
    borrowed_cards: int
    trainer: TrainerSpec
    rollouts: RolloutWorkload
    start_s: float = 0.0

    @property
    def cards(self) -> int:
        """Number of cards that the job itself has: its replicas' and its training cards, without
        borrowed ones.
        """
        return self.replicas * self.replica_cards + self.training_cards


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Input of a fleet's run over `seconds`; names of deployments and of jobs are unique."""

    deployments: tuple[Deployment, ...]
    jobs: tuple[FleetJob, ...]
    seconds: float = DAY_S
    links: Links = field(default_factory=Links)
    assumptions: tuple[str, ...] = ()

    @property
    def serving_cards(self) -> int:
        """Number of cards of all deployments."""
        return sum(each.cards for each in self.deployments)

    @property
    def cards(self) -> int:
        """Number of cards of the whole fleet: all deployments and jobs."""
        return self.serving_cards + sum(each.cards for each in self.jobs)


@dataclass(frozen=True, slots=True)
class FleetHour:
    """Means of one hour, as shares of the serving cards' time: busy for users, lendable, and
    borrowed.
    """

    start_s: float
    users: float
    lendable: float
    borrowed: float


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job: training steps, trained and borrowed tokens, and its hours in rollouts."""

    name: str
    steps: int
    tokens: float
    borrowed_tokens: float
    rollout_hours: float
    hours: float
    borrowed_gpu_hours: float

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second over the job's whole time; 0 for no time."""
        return self.tokens / (self.hours * HOUR_S) if self.hours else 0.0


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Result of a fleet's run. gpu_use: share of all cards' time that was inside a step."""

    cards: int
    hours: float
    jobs: tuple[JobResult, ...]
    series: tuple[FleetHour, ...]
    users_busy: float
    borrowed_gpu_hours: float
    gpu_use: float
    assumptions: tuple[str, ...]

    def plain(self) -> dict[str, object]:
        """Return the result as a dictionary of JSON's types."""
        found = asdict(self)
        for job, plain in zip(self.jobs, found["jobs"], strict=True):
            plain["tokens_per_s"] = job.tokens_per_s
        return found


@dataclass(slots=True)
class _Running:
    """Totals of a job while it runs."""

    job: FleetJob
    step: int = 0
    tokens: float = 0.0
    borrowed: float = 0.0
    rollout_s: float = 0.0
    own_busy_s: float = 0.0
    guest_s: float = 0.0


class FleetRun:
    """One run of a fleet. borrows: False for jobs that use their own cards alone."""

    def __init__(self, spec: FleetSpec, seed: int = 0, *, borrows: bool = True) -> None:
        self._spec, self._seed, self._borrows = spec, seed, borrows
        self._deployments = {each.name: each for each in spec.deployments}
        self._free = {each.name: each.hosts for each in spec.deployments}
        # Borrowed card seconds of each hour.
        self._borrowed_s = [0.0] * math.ceil(spec.seconds / HOUR_S)
        self._lendable = lru_cache(maxsize=4_096)(self._lendable_in)
        self._rolled = lru_cache(maxsize=4_096)(self._roll_out)
        self._batch = lru_cache(maxsize=BATCHES * max(1, len(spec.jobs)))(self._make_batch)

    def run(self) -> FleetResult:
        """Run all jobs until the fleet's time is over, and return the result."""
        running = [_Running(job) for job in self._spec.jobs]
        # (time, order, job, hosts to give back to their deployment); ties go by order.
        events: list[tuple[float, int, _Running, str, int]] = []
        for number, each in enumerate(running):
            heapq.heappush(events, (each.job.start_s, number, each, "", 0))
        while events:
            now_s, order, each, deployment, hosts = heapq.heappop(events)
            if deployment:
                self._free[deployment] += hosts
                continue
            if now_s >= self._spec.seconds:
                continue
            next_s, given = self._step(each, now_s)
            if given is not None:
                heapq.heappush(events, (given[2], order + 1_000, each, given[0], given[1]))
            heapq.heappush(events, (next_s, order, each, "", 0))
        return self._result(running)

    def _step(self, each: _Running, now_s: float) -> tuple[float, tuple[str, int, float] | None]:
        """Run one training step; return when the next begins, and (deployment, hosts, time) of
        hosts that it gives back, or None.
        """
        job, trainer = each.job, each.job.trainer
        deployment, hosts, share = self._borrow(job, now_s)
        number, batch = self._spec.jobs.index(job), each.step % BATCHES
        phase, tokens = self._rolled(number, batch, "", 0, 0.0)
        if hosts:
            borrowing, _ = self._rolled(number, batch, deployment, hosts, share)
            # A job borrows only if its rollouts get shorter by it.
            if borrowing.seconds < phase.seconds * (1 - _LEAST_GAIN):
                phase = borrowing
            else:
                hosts = 0
        train_s = trainer.seconds(tokens)
        sync_s = trainer.publish_s + trainer.delta_bytes / self._spec.links.near_bytes_s
        sync_s += self._spec.links.latency_s + self._spec.links.apply_s
        together_s = phase.seconds + train_s + sync_s
        if trainer.max_staleness:
            together_s = max(phase.seconds, train_s + trainer.publish_s)
        limit_s = self._spec.seconds
        part = min(1.0, (limit_s - now_s) / together_s)
        each.step += part == 1.0
        each.tokens += part * tokens
        each.borrowed += part * phase.borrowed_tokens
        each.rollout_s += part * phase.seconds
        busy_s = phase.dedicated_busy_s * job.replicas * job.replica_cards
        each.own_busy_s += part * (busy_s + train_s * job.training_cards)
        if not hosts:
            return now_s + together_s, None
        guest_cards = hosts * self._deployments[deployment].engine.cards
        each.guest_s += part * phase.guest_busy_s * guest_cards
        end_s = min(limit_s, now_s + phase.seconds)
        self._count_borrowed(now_s, end_s, phase.guest_busy_s * guest_cards)
        self._free[deployment] -= hosts
        return now_s + together_s, (deployment, hosts, now_s + phase.seconds)

    def _borrow(self, job: FleetJob, now_s: float) -> tuple[str, int, float]:
        """Return the deployment that lends most to the job now, its number of hosts, and a guest's
        share of a card; ("", 0, 0) for none.
        """
        best = ("", 0, 0.0)
        if not self._borrows:
            return best
        quarter = int(now_s // QUARTER_S)
        for each in self._spec.deployments:
            hosts = min(self._free[each.name], job.borrowed_cards // each.engine.cards)
            share = round(self._lendable(each.name, quarter)[1] / _SHARE_STEP) * _SHARE_STEP
            fits = hosts and share >= _LEAST_SHARE and self._guest(job, each) is not None
            if fits and hosts * each.engine.cards * share > best[1] * best[2]:
                best = (each.name, hosts, round(share, 2))
        return best

    def _guest(self, job: FleetJob, deployment: Deployment) -> EngineFigures | None:
        """Return the job's engine on one host of the deployment, with the KV memory that fits
        there; None if there is no room.
        """
        host = deployment.engine
        try:
            guest = published_engine(job.model, cards=host.cards)
        except ConfigError:
            return None
        room = host.kv_bytes * (1 - KV_HEADROOM) - guest.weight_bytes
        kv_tokens = int(room / guest.kv_bytes_per_token)
        if kv_tokens < guest.max_step_tokens:
            return None
        return replace(guest, kv_tokens=min(guest.kv_tokens, kv_tokens))

    def _lendable_in(self, name: str, quarter: int) -> tuple[float, float]:
        return self._deployments[name].lendable((quarter + 0.5) * QUARTER_S)

    def _make_batch(self, number: int, batch: int) -> tuple[EpisodeBatch, float]:
        """Return one step's episodes, and the number of tokens that it trains on."""
        job = self._spec.jobs[number]
        trainer, rollouts = job.trainer, job.rollouts
        groups = trainer.started_groups
        first = batch * groups
        episodes = [
            rollouts.trajectory(self._seed, prompt, sample)
            for prompt in range(first, first + groups)
            for sample in range(trainer.samples)
        ]
        tokens = sum(each.total_tokens for each in episodes) * trainer.groups / groups
        return EpisodeBatch.of(episodes, 2 * self._spec.links.latency_s), tokens

    def _roll_out(
        self, number: int, batch: int, deployment: str, hosts: int, share: float
    ) -> tuple[RolloutPhase, float]:
        job = self._spec.jobs[number]
        episodes, tokens = self._batch(number, batch)
        own = published_engine(job.model, cards=job.replica_cards)
        guests = None
        if hosts:
            guest = self._guest(job, self._deployments[deployment])
            assert guest is not None, "only hosts with room lend"
            guests = FluidPool(hosts, guest)
        phase = roll_out(
            episodes, FluidPool(job.replicas, own), guests, lambda *_: share,
            job.trainer.concurrency, _TICK_S,
        )  # fmt: skip
        return phase, tokens

    def _result(self, running: Sequence[_Running]) -> FleetResult:
        spec = self._spec
        serving = spec.serving_cards
        series, busy_s = [], 0.0
        for hour in range(math.ceil(spec.seconds / HOUR_S)):
            users, lendable = self._hour(hour, serving)
            span_s = min(HOUR_S, spec.seconds - hour * HOUR_S)
            busy_s += users * serving * span_s
            borrowed = self._borrowed_s[hour] / max(1.0, serving * span_s)
            series.append(FleetHour(hour * HOUR_S, users, lendable, borrowed))
        guest_s = sum(each.guest_s for each in running)
        used_s = busy_s + guest_s + sum(each.own_busy_s for each in running)
        return FleetResult(
            cards=spec.cards,
            hours=spec.seconds / HOUR_S,
            jobs=tuple(_job_result(each, spec.seconds) for each in running),
            series=tuple(series),
            users_busy=busy_s / max(1.0, serving * spec.seconds),
            borrowed_gpu_hours=guest_s / HOUR_S,
            gpu_use=min(1.0, used_s / (spec.cards * spec.seconds)),
            assumptions=spec.assumptions,
        )

    def _hour(self, hour: int, serving: int) -> tuple[float, float]:
        """Return (users, lendable): means of an hour as shares of all serving cards."""
        users = lendable = 0.0
        quarters = range(int(hour * HOUR_S // QUARTER_S), int((hour + 1) * HOUR_S // QUARTER_S))
        for each in self._spec.deployments:
            for quarter in quarters:
                busy, lent = self._lendable(each.name, quarter)
                users += busy * each.cards / len(quarters)
                lendable += lent * each.cards / len(quarters)
        return users / max(1, serving), lendable / max(1, serving)

    def _count_borrowed(self, start_s: float, end_s: float, amount: float) -> None:
        """Add an amount of card seconds to the hours of a span, evenly."""
        span_s = max(1e-9, end_s - start_s)
        last = min(len(self._borrowed_s), math.ceil(end_s / HOUR_S))
        for hour in range(int(start_s // HOUR_S), last):
            overlap_s = min(end_s, (hour + 1) * HOUR_S) - max(start_s, hour * HOUR_S)
            self._borrowed_s[hour] += amount * max(0.0, overlap_s) / span_s


def _job_result(each: _Running, seconds: float) -> JobResult:
    hours = max(0.0, seconds - each.job.start_s) / HOUR_S
    return JobResult(
        each.job.name, each.step, each.tokens, each.borrowed, each.rollout_s / HOUR_S, hours,
        each.guest_s / HOUR_S,
    )  # fmt: skip


def run_fleet(spec: FleetSpec, seed: int = 0, *, borrows: bool = True) -> FleetResult:
    """Run a fleet and return its result, which is the same for the same seed.

    borrows: False for jobs that use their own cards alone.
    """
    return FleetRun(spec, seed, borrows=borrows).run()
