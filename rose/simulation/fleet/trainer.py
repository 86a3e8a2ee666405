"""Stand-in for a trainer: it takes batches, trains for a while, publishes, and plays its episodes.

    take (waits for a batch) ──► train ──► publish ──► the version travels ──► take …
                       rollout_s      train_s        sync_s
    with parts: take and train go on until the last part; train_s is what follows the rollouts

Which prompts start, which are void and when a batch is complete is production's `RolloutBuffer`
(staleness admission, tail batching); turns go through the gateway. A DAPO-like trainer starts more
prompts than it needs, drops groups whose scores are all equal, and takes more until it has enough.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from elastic_scheduler import CancelRun, RolloutBuffer, SampleRun, StalenessBound, StepPlan
from elastic_scheduler.rollouts.buffer import TailPlan
from rose.gateway.errors import TurnError
from rose.gateway.turn_request import Origin
from rose.scheduler.core.messages import JobRegistered, VersionAnnounced
from rose.simulation.clock import VirtualLoop
from rose.simulation.fleet.gateway import AskedTurn, ModelledGateway
from rose.simulation.fleet.node import ModelledTransfer
from rose.simulation.results import StepResult
from rose.simulation.scenario import TrainerSpec
from rose.simulation.workloads.episodes import RolloutEpisode, RolloutWorkload

JOB = "job"


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """Episode that was played to its end.

    borrowed_tokens: those that guests made. oldest_version: the oldest of its tokens.
    """

    trajectory: RolloutEpisode
    borrowed_tokens: int
    oldest_version: int


class VoidRun(Exception):  # noqa: N818 -- no error: nobody waits for the run any more
    """Reason for the end of a run that the buffer cancelled: its group starts anew."""


class ModelledTrainer:
    """Model of one job's trainer, which ends the simulation when its last step is done."""

    def __init__(
        self,
        spec: TrainerSpec,
        workload: RolloutWorkload,
        seed: int,
        loop: VirtualLoop,
        gateway: ModelledGateway,
        transfer: ModelledTransfer,
        hedges: int,
    ) -> None:
        """Create the trainer. hedges: number of second copies of turns that a group may have."""
        self._spec = spec
        self._workload = workload
        self._seed = seed
        self._queue = loop.queue
        self._loop = loop
        self._gateway = gateway
        self._transfer = transfer
        self._say = gateway.say
        self._hedges = hedges
        plan = StepPlan(
            spec.started_groups,
            spec.samples,
            StalenessBound(spec.max_staleness),
            concurrency=spec.concurrency,
            tail=TailPlan() if spec.tail_batching else None,
        )
        self._buffer: RolloutBuffer[int, PlayedEpisode] = RolloutBuffer(plan)
        self._tasks: dict[SampleRun, asyncio.Task[PlayedEpisode]] = {}
        self._news = asyncio.Event()
        self._first_active = asyncio.Event()
        self._prompts = 0
        self._version = 0
        self._training_since_s: float | None = None
        self._trained_s = 0.0
        self._finished_s = 0.0
        self.failed = 0
        self.steps: list[StepResult] = []
        self.trajectory_s = array("d")
        self.turn_s = array("d")
        # Called with True when the rollout phase begins, with False before training begins; returns
        # the seconds that training has to wait for its cards.
        self.on_phase: Callable[[bool], float] = lambda rollout: 0.0
        self.filtered = 0

    def train_until_now_s(self) -> float:
        """Return the seconds in which the training cards have trained so far."""
        since_s = self._training_since_s
        return self._trained_s + (self._queue.now_s - since_s if since_s is not None else 0.0)

    def buffer_counts(self) -> dict[str, int]:
        """Return the rollout buffer's counts: trained, dropped, aged out, deferred, retried."""
        progress = self._buffer.progress()
        names = ("trained", "dropped", "aged_out", "deferred", "retried")
        return {name: getattr(progress, name) for name in names}

    def start(self) -> None:
        """Register the job with the scheduler and start training."""
        spec = self._spec
        self._say(JobRegistered(JOB, spec.max_staleness))
        self._loop.begin(self._train())

    def activated(self, version: int) -> None:
        """Record that a replica serves a version; a synchronous trainer waits for the first."""
        if version >= self._version:
            self._first_active.set()

    # ---- training ----

    async def _train(self) -> None:
        spec = self._spec
        ended_s = self._queue.now_s
        for number in range(spec.steps):
            began_s = ended_s
            if number:
                await self._publish(number)
            synced_s = self._queue.now_s
            self.on_phase(True)
            episodes: list[PlayedEpisode] = []
            last, tokens = False, 0
            while not last:
                taken, version, last = await self._take()
                lag_s = self.on_phase(False) if last else 0.0
                if lag_s:
                    await asyncio.sleep(lag_s)
                batched_s = self._finished_s if spec.parts else self._queue.now_s
                new = sum(each.trajectory.total_tokens for each in taken)
                # The seconds of a step without tokens come once, with its update.
                await self._train_for(spec.train_s_per_token * new + last * spec.train_s)
                tokens += new
                episodes += taken
            ended_s = self._queue.now_s
            self.steps.append(
                StepResult(
                    number,
                    began_s,
                    ended_s,
                    batched_s - synced_s,
                    ended_s - batched_s,
                    synced_s - began_s,
                    len(episodes),
                    sum(each.trajectory.output_tokens for each in episodes),
                    sum(each.borrowed_tokens for each in episodes),
                    tokens,
                    max((version - each.oldest_version for each in episodes), default=0),
                )
            )
        self._queue.stop()

    async def _publish(self, version: int) -> None:
        """Make a version durable and announce it; a synchronous trainer then waits until a replica
        serves it.
        """
        spec = self._spec
        await asyncio.sleep(spec.publish_s)
        size = max(1, round(spec.delta_bytes))
        self._transfer.publish(version, version - 1, size)
        self._version = version
        self._first_active.clear()
        self._say(VersionAnnounced(JOB, version, version - 1, "http://trainer:1"))
        self._buffer.publish(version)
        self._act()
        if spec.max_staleness == 0:
            await self._first_active.wait()

    async def _train_for(self, seconds: float) -> None:
        self._training_since_s = self._queue.now_s
        await asyncio.sleep(seconds)
        self._training_since_s = None
        self._trained_s += seconds

    async def _take(self) -> tuple[list[PlayedEpisode], int, bool]:
        """Return a step's episodes or a part of them, the buffer's version of it, and whether they
        are its last; a DAPO-like trainer drops groups of equal scores and takes more.
        """
        spec = self._spec
        groups: list[tuple[PlayedEpisode, ...]] = []
        while True:
            step = self._buffer.take(part=spec.parts)
            self._act()
            if step is None:
                self._news.clear()
                await self._news.wait()
                continue
            for group in step.groups:
                scores = {each.trajectory.score for each in group.samples}
                if spec.filters and len(scores) == 1:
                    self.filtered += 1
                    continue
                groups.append(group.samples)
            if len(groups) >= spec.groups or not spec.filters:
                kept = groups[: spec.groups] if spec.filters else groups
                return [each for group in kept for each in group], step.version, step.last

    # ---- episodes; after `rose.client.pipeline` ----

    def _act(self) -> None:
        buffer = self._buffer
        while buffer.wanted > 0:
            buffer.add(self._prompts)
            self._prompts += 1
        for action in buffer.actions():
            if isinstance(action, CancelRun):
                self._tasks[action.run].cancel()
            else:
                run = action.run
                task = self._loop.create_task(self._play(run))
                self._tasks[run] = task
                task.add_done_callback(lambda task, run=run: self._over(run, task))  # type: ignore[misc]
        self._news.set()

    def _over(self, run: SampleRun, task: "asyncio.Task[PlayedEpisode]") -> None:
        del self._tasks[run]
        if self._loop.closing:
            return
        self._gateway.dispatcher.jobs.of(JOB).forget(run.name)
        if task.cancelled():
            self._buffer.failed(run, VoidRun("it was cancelled"))
        elif (error := task.exception()) is not None:
            if not isinstance(error, TurnError | VoidRun):
                raise error
            self.failed += isinstance(error, TurnError)
            self._buffer.failed(run, error)
        else:
            self._finished_s = self._queue.now_s
            self._buffer.finished(run, task.result())
        self._act()

    async def _play(self, run: SampleRun) -> PlayedEpisode:
        prompt = self._buffer.prompt_of(run)
        trajectory = self._workload.trajectory(self._seed, prompt, run.sample)
        began_s = self._queue.now_s
        context = borrowed = 0
        oldest = self._version
        for number, turn in enumerate(trajectory.turns):
            context += turn.observed_tokens
            ticket = self._buffer.begin_turn(run)
            if ticket is None:
                raise VoidRun("its group starts anew")
            asked_s = self._queue.now_s
            first = trajectory.shared_tokens and not number
            try:
                oldest_made, borrowed_made = await self._gateway.make(
                    AskedTurn(
                        f"{run.name}.{number}",
                        Origin(run.name, run.group, JOB, self._spec.samples, self._hedges),
                        context,
                        turn.output_tokens,
                        max(self._spec.max_turn_tokens, turn.output_tokens + 1),
                        ticket.min_version,
                        f"p{prompt}" if first else "",
                        trajectory.shared_tokens if first else 0,
                    )
                )
                if not self._buffer.stamp(run, ticket.number, oldest_made):
                    self._act()
                    raise VoidRun("its group aged out")
            finally:
                self._buffer.end_turn(run, ticket.number)
            self.turn_s.append(self._queue.now_s - asked_s)
            oldest = min(oldest, oldest_made)
            borrowed += borrowed_made
            context += turn.output_tokens
            if turn.environment_s:
                await asyncio.sleep(turn.environment_s)
        self.trajectory_s.append(self._queue.now_s - began_s)
        return PlayedEpisode(trajectory, borrowed, oldest)
