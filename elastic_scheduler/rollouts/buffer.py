"""Rollout buffer: decides which groups start, which are void, and which make a training step.

    add ─► waiting ──begin──► running ──all samples──► ready ──take──► trained on, once
              ▲                  │ │                     │
              └──── aged out, deferred ◄─────────────────┘
                                 └─ a sample failed too often ─► dropped, returned with a step

A core: its driver carries out `actions` and reports the end of each run, exactly once. Nothing
starts beyond the admission's room, the plan's concurrency, or a step's worth of dropped groups that
were not returned yet: an outage does not burn the prompts.

`SampleRun` is one try at one sample of one prompt, `GroupSamples` the samples of a prompt. A
trainer sets the `StepPlan` and receives a `TrainingStep`: complete groups, and dropped prompts.

A batch policy has the order in which prompts start, and the rounds in which they are trained on.
`PromptQueue` starts prompts one by one, those that aged out first, and delivers all that finish.

`TailBatcher` moves the long tail of generation lengths to rounds of its own, after RollPacker
(arXiv 2509.21009), so that a step does not wait for its slowest prompt. A short round starts more
prompts, and more samples of each, than it needs. It is complete with the first that are done, and
the other prompts go to the end of a queue. When the queue fills a round, a long round runs them
without over-sampling, to their ends. So a prompt is trained on exactly once, in one round or the
other.
"""

import math
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from typing import Generic, Protocol, TypeVar

from elastic_scheduler.rollouts.admission import (
    StalenessAdmission,
    StalenessBound,
    TakenGroup,
    TurnTicket,
)


@dataclass(frozen=True, slots=True)
class Round:
    """Action of a batch policy: start `samples` of each prompt in `prompts` and `spares`.

    As many prompts as are in `prompts` need to finish, whichever they are. is_long: the round has
    no spares and runs deferred prompts to their ends.
    """

    prompts: tuple[int, ...]
    samples: int
    spares: tuple[int, ...] = ()
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Action of a batch policy: train on `delivered`; cancel `deferred` until a later round."""

    delivered: tuple[int, ...]
    deferred: tuple[int, ...] = ()


class BatchPolicy(Protocol):
    """Policy that decides which prompts start together, and when finished ones are trained on."""

    @property
    def waiting(self) -> int:
        """Number of prompts that have not started, or must start again."""
        ...

    def add(self, prompt: int) -> None:
        """Add a prompt, by a number that was not used before."""
        ...

    def put_back(self, prompt: int) -> None:
        """Queue a started prompt again whose samples became too old; it starts before others."""
        ...

    def wanted(self, room: int) -> int:
        """Return the number of prompts that the policy could take, with room for `room` groups."""
        ...

    def begin(self, room: int, *, last: bool) -> Round | None:
        """Return the next prompts to start, None if none may; room: groups that may start.

        last: no more prompts will be added.
        """
        ...

    def complete(self, prompt: int) -> RoundDone | None:
        """Record that a prompt has all its samples; return prompts to train on now, or None."""
        ...

    def drop(self, prompt: int) -> RoundDone | None:
        """Remove a running prompt; return prompts to train on now because of that, None if none."""
        ...


class PromptQueue:
    """Batch policy that starts prompts one by one in order and delivers each when it finishes."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._queue: deque[int] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def add(self, prompt: int) -> None:
        self._queue.append(prompt)

    def put_back(self, prompt: int) -> None:
        self._queue.appendleft(prompt)

    def wanted(self, room: int) -> int:
        return max(0, room - len(self._queue))

    def begin(self, room: int, *, last: bool) -> Round | None:
        """Return the next prompt alone, None without a prompt or room."""
        del last
        if room < 1 or not self._queue:
            return None
        return Round((self._queue.popleft(),), self._samples)

    def complete(self, prompt: int) -> RoundDone | None:
        """Return the prompt itself as delivered."""
        return RoundDone((prompt,))

    def drop(self, prompt: int) -> RoundDone | None:
        """Return None: no other prompt waits for a dropped one."""
        del prompt
        return None


@dataclass(frozen=True, slots=True)
class TailPlan:
    """Extra shares of a short round: prompts, and samples of each, started beyond the need."""

    more_prompts: float = 0.25
    more_samples: float = 0.25

    def __post_init__(self) -> None:
        if not (0 <= self.more_prompts <= 10 and 0 <= self.more_samples <= 10):
            raise ValueError("more_prompts and more_samples are shares: give 0 up to 10")


class TailBatcher:
    """Batch policy that defers slow prompts to long rounds; one round runs at a time.

    A round has a step's `prompts` with `samples` each. A short round starts spares and ends with
    the first prompts that finish; the others wait for a long round, which has no spares.
    """

    def __init__(self, plan: TailPlan, prompts: int, samples: int) -> None:
        if min(prompts, samples) < 1:
            raise ValueError("a round needs at least one prompt and one sample")
        self._plan = plan
        self._prompts = prompts
        self._samples = samples
        self._fresh: deque[int] = deque()
        self._deferred: deque[int] = deque()
        self._again: deque[int] = deque()
        self._round: Round | None = None
        # Prompts of the round: still in it, or with all their samples.
        self._members: dict[int, bool] = {}

    @property
    def waiting(self) -> int:
        return len(self._fresh) + len(self._deferred) + len(self._again)

    @property
    def deferred(self) -> int:
        """Number of prompts that wait for a long round."""
        return len(self._deferred)

    def add(self, prompt: int) -> None:
        self._fresh.append(prompt)

    def put_back(self, prompt: int) -> None:
        """Queue a too old prompt again: in its round if that still runs, or the next."""
        if prompt in self._members:
            self._members[prompt] = False
            self._again.append(prompt)
        else:
            self._fresh.appendleft(prompt)

    def wanted(self, room: int) -> int:
        """Return the number of further prompts that the next round needs; 0 while a round runs."""
        need = self._need(room)
        if self._round is not None or len(self._deferred) >= need:
            return 0
        return max(0, _more(need, self._plan.more_prompts) - len(self._fresh))

    def begin(self, room: int, *, last: bool = False) -> Round | None:
        """Return a too old prompt of the running round to start again, else the next round.

        Returns None while a round runs or prompts are missing. last: no more prompts will be added,
        so the rest runs as a long round. A round has as many prompts as the step still needs.
        """
        need = self._need(room)
        if self._again:
            return self._start_again(self._again.popleft())
        if self._round is not None or need < 1:
            return None
        over = _more(need, self._plan.more_prompts)
        if len(self._deferred) >= need:
            self._round = Round(_popped(self._deferred, need), self._samples, is_long=True)
        elif len(self._fresh) >= over:
            samples = _more(self._samples, self._plan.more_samples)
            first = _popped(self._fresh, need)
            self._round = Round(first, samples, _popped(self._fresh, over - need))
        elif last and (self._deferred or self._fresh):
            rest = deque([*self._deferred, *self._fresh])
            self._deferred.clear()
            first = _popped(rest, min(need, len(rest)))
            self._fresh = rest
            self._round = Round(first, self._samples, is_long=True)
        else:
            return None
        self._members = dict.fromkeys([*self._round.prompts, *self._round.spares], False)
        return self._round

    def complete(self, prompt: int) -> RoundDone | None:
        """Record a prompt with its samples; return the round's end if it was the last needed."""
        self._members[prompt] = True
        return self._end()

    def drop(self, prompt: int) -> RoundDone | None:
        """Remove a prompt of the round; return the round's end if no other is needed, else None."""
        del self._members[prompt]
        return self._end()

    def _end(self) -> RoundDone | None:
        assert self._round is not None
        delivered = tuple(prompt for prompt, complete in self._members.items() if complete)
        if len(delivered) < min(len(self._round.prompts), len(self._members)):
            return None
        deferred = tuple(prompt for prompt, complete in self._members.items() if not complete)
        self._deferred.extend(deferred)
        self._again.clear()
        self._round, self._members = None, {}
        return RoundDone(delivered, deferred)

    def _start_again(self, prompt: int) -> Round:
        assert self._round is not None
        if prompt in self._round.spares:
            return Round((), self._round.samples, (prompt,), self._round.is_long)
        return Round((prompt,), self._round.samples, (), self._round.is_long)

    def _need(self, room: int) -> int:
        """Return the number of prompts that the next round must finish to fill up a step."""
        return 0 if room < 1 else room % self._prompts or self._prompts


def _more(count: int, share: float) -> int:
    """Return `count` and a share of it, rounded up; tolerate binary rounding of the share."""
    return count + math.ceil(count * share - 1e-9)


def _popped(queue: deque[int], count: int) -> tuple[int, ...]:
    return tuple(queue.popleft() for _ in range(count))


T = TypeVar("T")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class SampleRun:
    """One episode: a try at sample number `sample` of a prompt.

    life: number of earlier starts of the prompt. attempt: number of earlier tries at this sample
    since that start.
    """

    prompt: int
    life: int
    sample: int
    attempt: int

    @property
    def group(self) -> str:
        """Name that all samples of this start of the prompt share, and no others."""
        return f"{self.prompt}.{self.life}"

    @property
    def name(self) -> str:
        """Name of this run, which no other run has."""
        return f"{self.group}.{self.sample}.{self.attempt}"


@dataclass(slots=True)
class GroupSamples(Generic[T]):
    """Samples of one started prompt: running ones, finished ones, and the number needed."""

    need: int
    runs: dict[int, SampleRun]
    done: dict[int, T] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if as many samples finished as are needed."""
        return len(self.done) >= self.need

    @property
    def hopeless(self) -> bool:
        """True if finished and running samples together are fewer than needed."""
        return len(self.done) + len(self.runs) < self.need

    def is_live(self, run: SampleRun) -> bool:
        """Return True if the run belongs to the group and has not ended."""
        return self.runs.get(run.sample) == run

    def values(self) -> tuple[T, ...]:
        """Return the finished samples' results, by sample index."""
        return tuple(self.done[sample] for sample in sorted(self.done))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Settings of training steps: `groups` prompts with `samples` trajectories each.

    bound: limit on versions that a token may be behind. concurrency: episodes that run at once.
    retries: retries of a failed sample before its group is dropped. restarts: times that a prompt
    may start again for age before steps wait for it. tail: rounds for slow prompts, None for none.
    """

    groups: int
    samples: int
    bound: StalenessBound
    concurrency: int = 256
    retries: int = 2
    restarts: int = 1
    tail: TailPlan | None = None

    def __post_init__(self) -> None:
        if min(self.groups, self.samples, self.concurrency) < 1:
            raise ValueError("StepPlan: groups, samples and concurrency of at least 1")
        if min(self.retries, self.restarts) < 0:
            raise ValueError("StepPlan: retries and restarts of at least 0")

    def line(self) -> BatchPolicy:
        """Return a new, empty batch policy: TailBatcher if `tail` is set, else PromptQueue."""
        if self.tail is None:
            return PromptQueue(self.samples)
        return TailBatcher(self.tail, self.groups, self.samples)


@dataclass(frozen=True, slots=True)
class TrainingGroup(Generic[P, T]):
    """Trajectories of one prompt, by sample index.

    oldest_version: policy version of their oldest token, None without tokens. restarts: times that
    the prompt was started again because its samples were too old.
    """

    prompt: P
    samples: tuple[T, ...]
    oldest_version: int | None
    restarts: int


@dataclass(frozen=True, slots=True)
class DroppedGroup(Generic[P]):
    """Prompt that is not trained on since a sample failed too often, with the last error."""

    prompt: P
    error: BaseException


@dataclass(frozen=True, slots=True)
class TrainingStep(Generic[P, T]):
    """Groups to train on from policy `version`; all their tokens are recent enough for it.

    dropped: prompts given up since the last one. last: False if more of the step's groups follow.
    Fewer groups than planned, or none, mean that the prompts are used up.
    """

    version: int
    groups: tuple[TrainingGroup[P, T], ...]
    dropped: tuple[DroppedGroup[P], ...]
    last: bool = True


@dataclass(slots=True)
class RolloutCounts:
    """Counts since the start; they only grow. trained, dropped, aged_out, deferred: groups.

    aged_out: started again since their tokens became too old. deferred: moved to a long round.
    retried: failed samples that were tried again.
    """

    trained: int = 0
    dropped: int = 0
    aged_out: int = 0
    deferred: int = 0
    retried: int = 0


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """State of a rollout buffer: numbers of prompts, groups and samples by state now.

    The last five fields are its `RolloutCounts`.
    """

    version: int
    prompts_waiting: int
    groups_running: int
    groups_ready: int
    samples_running: int
    samples_waiting: int
    trained: int
    dropped: int
    aged_out: int
    deferred: int
    retried: int


@dataclass(frozen=True, slots=True)
class StartRun:
    """Action of the rollout buffer: play this episode."""

    run: SampleRun


@dataclass(frozen=True, slots=True)
class CancelRun:
    """Action of the rollout buffer: cancel this episode, and report its end all the same."""

    run: SampleRun


@dataclass(slots=True)
class _Prompt(Generic[P]):
    value: P
    lives: int = 0
    aged_out: int = 0


class RolloutBuffer(Generic[P, T]):
    """One trainer's buffer of rollouts: starts episodes and gathers them into training steps.

    `P` is a prompt, `T` an episode's result. Its driver carries out `actions` and reports the end
    of each run.
    """

    def __init__(self, plan: StepPlan, version: int = 0) -> None:
        """Begin without prompts. version: newest policy version at the start."""
        self._plan = plan
        self._admission = StalenessAdmission(plan.bound, plan.groups, version)
        self._line = plan.line()
        self._prompts: dict[int, _Prompt[P]] = {}
        self._groups: dict[int, GroupSamples[T]] = {}
        self._waiting: OrderedDict[SampleRun, None] = OrderedDict()
        self._running: set[SampleRun] = set()
        self._actions: list[StartRun | CancelRun] = []
        self._dropped: list[DroppedGroup[P]] = []
        self._unseen = self._added = 0
        self._ended = False
        self._counts = RolloutCounts()

    @property
    def version(self) -> int:
        return self._admission.published

    @property
    def wanted(self) -> int:
        """Number of prompts that could start now, if they were added.

        It is 0 after `end`, and while `trouble` has a dropped group to return.
        """
        if self._ended or self._unseen >= self._plan.groups:
            return 0
        return self._line.wanted(self._admission.room)

    @property
    def exhausted(self) -> bool:
        """True after `end` once every prompt was returned in a step, trained on or dropped."""
        return self._ended and not self._prompts and not self._dropped

    def actions(self) -> tuple[StartRun | CancelRun, ...]:
        """Return the actions that arose since the last call, in order."""
        actions, self._actions = tuple(self._actions), []
        return actions

    def add(self, prompt: P) -> None:
        """Add a prompt to be trained on once; adding an equal one trains on it twice."""
        self._prompts[self._added] = _Prompt(prompt)
        self._line.add(self._added)
        self._added += 1
        self._fill()

    def end(self) -> None:
        """Record that no more prompts will be added, so that the last step may be smaller."""
        self._ended = True
        self._fill()

    def prompt_of(self, run: SampleRun) -> P:
        """Return the prompt of a run. Raises KeyError once the prompt was returned."""
        return self._prompts[run.prompt].value

    def is_live(self, run: SampleRun) -> bool:
        """Return True if the run's result is still wanted."""
        group = self._groups.get(run.prompt)
        return group is not None and group.is_live(run)

    def begin_turn(self, run: SampleRun) -> TurnTicket | None:
        """Return a ticket for the run's next turn; None if the run is void: send nothing."""
        if not self.is_live(run):
            return None
        return self._admission.begin_turn(run.prompt, run.sample)

    def stamp(self, run: SampleRun, turn: int, version: int) -> bool:
        """Record the policy version of a turn's tokens; return False if the run is void.

        A version that is too old voids the group, whose prompt starts again.
        """
        if not self.is_live(run):
            return False
        if self._admission.stamp(run.prompt, turn, version):
            return True
        self._age_out(run.prompt)
        self._fill()
        return False

    def end_turn(self, run: SampleRun, turn: int) -> None:
        """Record the end of a turn, with or without an answer."""
        if self.is_live(run):
            self._admission.end_turn(run.prompt, turn)

    def finished(self, run: SampleRun, value: T) -> None:
        """Record that the episode returned `value`; a void run's value is ignored."""
        self._running.discard(run)
        if self.is_live(run):
            group = self._groups[run.prompt]
            del group.runs[run.sample]
            group.done[run.sample] = value
            if group.complete:
                for sample in group.runs:
                    self._admission.forget(run.prompt, sample)
                self._end_runs(group)
                self._close(self._line.complete(run.prompt))
        self._fill()

    def failed(self, run: SampleRun, error: BaseException) -> None:
        """Record that the episode raised `error`: retry the sample, or drop its group.

        A void run's error is ignored.
        """
        self._running.discard(run)
        if self.is_live(run):
            self._admission.forget(run.prompt, run.sample)
            group = self._groups[run.prompt]
            if run.attempt < self._plan.retries:
                again = SampleRun(run.prompt, run.life, run.sample, run.attempt + 1)
                group.runs[run.sample] = again
                self._wait(again, first=True)
                self._counts.retried += 1
            else:
                del group.runs[run.sample]
                if group.hopeless:
                    self._drop(run.prompt, error)
        self._fill()

    def publish(self, version: int) -> None:
        """Record a newer policy version, and start groups again that are now too old.

        Raises ValueError for a version older than the last.
        """
        for prompt in self._admission.publish(version):
            self._age_out(prompt)
        self._fill()

    def take(self, *, part: bool = False) -> TrainingStep[P, T] | None:
        """Return the next training step, None while it is not complete or when all are returned.

        part: return those of its groups that are complete, and the others by later calls.
        """
        begun = self._admission.taken
        rest = self._ended and not self._line.waiting and len(self._groups) == self._admission.ready
        taken = self._admission.take(rest=rest, part=part)
        if not taken and not (rest and (self._dropped or begun)):
            # A caller that asks for a step has no other one under way: that is room.
            self._fill()
            return None
        groups = tuple(self._trained(group) for group in taken)
        last = not self._admission.taken
        step = TrainingStep(self.version, groups, tuple(self._dropped), last)
        self._dropped, self._unseen = [], 0
        self._fill()
        return step

    def trouble(self) -> DroppedGroup[P] | None:
        """Return the newest dropped group once a step's worth was dropped without a step, else
        None.

        Until this is called nothing new starts. The next step lists the dropped groups too.
        """
        if self._unseen < self._plan.groups:
            return None
        self._unseen = 0
        self._fill()
        return self._dropped[-1]

    def progress(self) -> RolloutProgress:
        """Return the numbers of prompts, groups and samples by state now."""
        ready = self._admission.ready
        return RolloutProgress(
            version=self.version,
            prompts_waiting=self._line.waiting,
            groups_running=len(self._groups) - ready,
            groups_ready=ready,
            samples_running=len(self._running),
            samples_waiting=len(self._waiting),
            **asdict(self._counts),
        )

    def _fill(self) -> None:
        """Start all groups and runs that may start."""
        while self._unseen < self._plan.groups:
            begun = self._line.begin(self._admission.room, last=self._ended)
            if begun is None:
                break
            for prompt in begun.prompts:
                self._open(prompt, begun.samples, spare=False)
            for prompt in begun.spares:
                self._open(prompt, begun.samples, spare=True)
        while self._waiting and len(self._running) < self._plan.concurrency:
            run, _ = self._waiting.popitem(last=False)
            self._running.add(run)
            self._actions.append(StartRun(run))

    def _open(self, prompt: int, samples: int, *, spare: bool) -> None:
        row = self._prompts[prompt]
        # Rounds are taken in their order, so that no group in them needs to be kept.
        kept = self._plan.tail is None and row.aged_out >= self._plan.restarts
        self._admission.start(prompt, kept=kept, spare=spare)
        runs = {sample: SampleRun(prompt, row.lives, sample, 0) for sample in range(samples)}
        row.lives += 1
        self._groups[prompt] = GroupSamples(self._plan.samples, runs)
        for run in sorted(runs.values(), key=lambda run: run.sample, reverse=row.aged_out > 0):
            self._wait(run, first=row.aged_out > 0)

    def _wait(self, run: SampleRun, *, first: bool) -> None:
        self._waiting[run] = None
        if first:
            self._waiting.move_to_end(run, last=False)

    def _end_runs(self, group: GroupSamples[T]) -> None:
        for run in group.runs.values():
            if run in self._running:
                self._actions.append(CancelRun(run))
            else:
                del self._waiting[run]
        group.runs.clear()

    def _void(self, prompt: int) -> None:
        group = self._groups.pop(prompt, None)
        if group is not None:
            self._end_runs(group)

    def _age_out(self, prompt: int) -> None:
        self._void(prompt)
        self._prompts[prompt].aged_out += 1
        self._counts.aged_out += 1
        self._line.put_back(prompt)

    def _drop(self, prompt: int, error: BaseException) -> None:
        self._void(prompt)
        self._admission.drop(prompt)
        self._dropped.append(DroppedGroup(self._prompts.pop(prompt).value, error))
        self._unseen += 1
        self._counts.dropped += 1
        self._close(self._line.drop(prompt))

    def _close(self, done: RoundDone | None) -> None:
        if done is None:
            return
        for prompt in done.deferred:
            self._counts.deferred += 1
            if prompt in self._groups:
                self._void(prompt)
                self._admission.drop(prompt)
        for prompt in done.delivered:
            self._admission.finish(prompt)

    def _trained(self, taken: TakenGroup) -> TrainingGroup[P, T]:
        row, group = self._prompts.pop(taken.number), self._groups.pop(taken.number)
        self._counts.trained += 1
        return TrainingGroup(row.value, group.values(), taken.oldest_version, row.aged_out)
