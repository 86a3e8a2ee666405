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
    """Action: start `samples` of each prompt.

    `spares` stand by: as many prompts finish as are in `prompts`, in any order.
    """

    prompts: tuple[int, ...]
    samples: int
    spares: tuple[int, ...] = ()
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Action: train on `delivered`; cancel `deferred`, whose prompts wait for a later round."""

    delivered: tuple[int, ...]
    deferred: tuple[int, ...] = ()


class BatchPolicy(Protocol):
    """Policy of batches: which prompts start together, and when finished ones are trained on."""

    @property
    def waiting(self) -> int:
        """Prompts that have not started or must start anew."""
        ...

    def add(self, prompt: int) -> None:
        """Add a prompt to be trained on; numbers must not repeat."""
        ...

    def put_back(self, prompt: int) -> None:
        """Put a started prompt back that aged out: it starts anew before others."""
        ...

    def wanted(self, room: int) -> int:
        """Return the number of further prompts that could start now."""
        ...

    def begin(self, room: int, *, last: bool) -> Round | None:
        """Return the starts with room for this many groups. last: no more prompts will come."""
        ...

    def complete(self, prompt: int) -> RoundDone | None:
        """Record a prompt with all its samples; return the groups to train on by that."""
        ...

    def drop(self, prompt: int) -> RoundDone | None:
        """Drop a running prompt; return the groups to train on by that."""
        ...


class PromptQueue:
    """First come, first started; every finished prompt is delivered."""

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
        """Start one prompt at a time."""
        del last
        if room < 1 or not self._queue:
            return None
        return Round((self._queue.popleft(),), self._samples)

    def complete(self, prompt: int) -> RoundDone | None:
        """Deliver it: no prompt waits for another one."""
        return RoundDone((prompt,))

    def drop(self, prompt: int) -> RoundDone | None:
        """Drop it: no other prompt waits for this one."""
        del prompt
        return None


@dataclass(frozen=True, slots=True)
class TailPlan:
    """The share of prompts, and of samples of each, that a short round starts beyond its need."""

    more_prompts: float = 0.25
    more_samples: float = 0.25

    def __post_init__(self) -> None:
        if not (0 <= self.more_prompts <= 10 and 0 <= self.more_samples <= 10):
            raise ValueError("more_prompts and more_samples are shares: give 0 up to 10")


class TailBatcher:
    """Forms rounds of `prompts` (a step's) with `samples` each, one round at a time."""

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
        """Put an aged-out prompt back: into its round if that still runs, else into the next."""
        if prompt in self._members:
            self._members[prompt] = False
            self._again.append(prompt)
        else:
            self._fresh.appendleft(prompt)

    def wanted(self, room: int) -> int:
        """Return the number of further prompts that a round could start with."""
        need = self._need(room)
        if self._round is not None or len(self._deferred) >= need:
            return 0
        return max(0, _more(need, self._plan.more_prompts) - len(self._fresh))

    def begin(self, room: int, *, last: bool = False) -> Round | None:
        """Return the prompts of the running round that aged out, or the next round.

        None while a round runs or prompts are missing. last: no more prompts will come, so that the
        rest runs to its end. A round fills up a step if ready groups are too few for one.
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
        """Drop a prompt of the round; the round may end by that."""
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
        """Return the prompts that the next round must finish: ready groups leave room in steps."""
        return 0 if room < 1 else room % self._prompts or self._prompts


def _more(count: int, share: float) -> int:
    """Return `count` and a share of it, rounded up; the share may be off in binary."""
    return count + math.ceil(count * share - 1e-9)


def _popped(queue: deque[int], count: int) -> tuple[int, ...]:
    return tuple(queue.popleft() for _ in range(count))


T = TypeVar("T")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class SampleRun:
    """`life`: how often the prompt was started; `attempt`: how often this sample in that life."""

    prompt: int
    life: int
    sample: int
    attempt: int

    @property
    def group(self) -> str:
        """A name that all samples of this life of the prompt share, and no others."""
        return f"{self.prompt}.{self.life}"

    @property
    def name(self) -> str:
        """A name that no other run has."""
        return f"{self.group}.{self.sample}.{self.attempt}"


@dataclass(slots=True)
class GroupSamples(Generic[T]):
    """A prompt's samples in one life: `need` of those that were started."""

    need: int
    runs: dict[int, SampleRun]
    done: dict[int, T] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if it has the samples it needs."""
        return len(self.done) >= self.need

    @property
    def hopeless(self) -> bool:
        """True if too many samples were lost."""
        return len(self.done) + len(self.runs) < self.need

    def is_live(self, run: SampleRun) -> bool:
        """Return True if the run is still wanted."""
        return self.runs.get(run.sample) == run

    def values(self) -> tuple[T, ...]:
        """Return the samples' results, by index."""
        return tuple(self.done[sample] for sample in sorted(self.done))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step trains on `groups` prompts with `samples` trajectories each, all within `bound`.

    concurrency: episodes that run at once. retries: of a sample whose episode failed; then its
    group is dropped. restarts: how often a prompt may age out before steps wait for it.
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
        """Return an empty line of prompts: rounds if the tail is batched, else a queue."""
        if self.tail is None:
            return PromptQueue(self.samples)
        return TailBatcher(self.tail, self.groups, self.samples)


@dataclass(frozen=True, slots=True)
class TrainingGroup(Generic[P, T]):
    """One prompt's trajectories, by sample index.

    `oldest_version` is that of its oldest token, None without tokens; `restarts` counts how often
    the prompt aged out before.
    """

    prompt: P
    samples: tuple[T, ...]
    oldest_version: int | None
    restarts: int


@dataclass(frozen=True, slots=True)
class DroppedGroup(Generic[P]):
    """A prompt that is not trained on: a sample's episode failed, the last time with `error`."""

    prompt: P
    error: BaseException


@dataclass(frozen=True, slots=True)
class TrainingStep(Generic[P, T]):
    """Train from policy `version`: every token of every group is within the bound there.

    dropped: prompts given up since the step before. Fewer groups than planned, or none: the
    prompts are used up.
    """

    version: int
    groups: tuple[TrainingGroup[P, T], ...]
    dropped: tuple[DroppedGroup[P], ...]


@dataclass(slots=True)
class RolloutCounts:
    """Counts of groups; they only grow.

    trained: returned in a step. dropped. aged out: begun anew because the policy moved on.
    deferred: moved to a long round. retried: samples.
    """

    trained: int = 0
    dropped: int = 0
    aged_out: int = 0
    deferred: int = 0
    retried: int = 0


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """A rollout buffer now; the last five are its `RolloutCounts`."""

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
    """Action: play this episode."""

    run: SampleRun


@dataclass(frozen=True, slots=True)
class CancelRun:
    """Action: end this episode, whose result is void. Its end is still to be reported."""

    run: SampleRun


@dataclass(slots=True)
class _Prompt(Generic[P]):
    value: P
    lives: int = 0
    aged_out: int = 0


class RolloutBuffer(Generic[P, T]):
    """One trainer's rollout buffer. `P` is a prompt, `T` an episode's result."""

    def __init__(self, plan: StepPlan, version: int = 0) -> None:
        """version: the newest one at the start."""
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
        """Prompts that could start now, if there were any."""
        if self._ended or self._unseen >= self._plan.groups:
            return 0
        return self._line.wanted(self._admission.room)

    @property
    def exhausted(self) -> bool:
        """True if every prompt was returned, and no more will come."""
        return self._ended and not self._prompts and not self._dropped

    def actions(self) -> tuple[StartRun | CancelRun, ...]:
        """Return the actions since the last call, in order."""
        actions, self._actions = tuple(self._actions), []
        return actions

    def add(self, prompt: P) -> None:
        """Add a prompt to be trained on once."""
        self._prompts[self._added] = _Prompt(prompt)
        self._line.add(self._added)
        self._added += 1
        self._fill()

    def end(self) -> None:
        """Record that no more prompts will come."""
        self._ended = True
        self._fill()

    def prompt_of(self, run: SampleRun) -> P:
        """Return the prompt of a run that is to be started."""
        return self._prompts[run.prompt].value

    def is_live(self, run: SampleRun) -> bool:
        """Return True if the run is still wanted; else it is void."""
        group = self._groups.get(run.prompt)
        return group is not None and group.is_live(run)

    def begin_turn(self, run: SampleRun) -> TurnTicket | None:
        """Begin a turn of the run; None: the run is void, send nothing."""
        if not self.is_live(run):
            return None
        return self._admission.begin_turn(run.prompt, run.sample)

    def stamp(self, run: SampleRun, turn: int, version: int) -> bool:
        """Record tokens of `version` in a turn; False: they and the run are void."""
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
        """Record that the episode returned `value`."""
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
        """Record that the episode raised `error`, or ended because it was to be cancelled."""
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
        """Record a newer version. Raises ValueError if it is older than the last."""
        for prompt in self._admission.publish(version):
            self._age_out(prompt)
        self._fill()

    def take(self) -> TrainingStep[P, T] | None:
        """Return the groups of a step; None while it must wait, or when all are returned."""
        rest = self._ended and not self._line.waiting and len(self._groups) == self._admission.ready
        taken = self._admission.take(rest=rest)
        if not taken and not (rest and self._dropped):
            # A caller that asks for a step has no other one under way: that is room.
            self._fill()
            return None
        groups = tuple(self._trained(group) for group in taken)
        step = TrainingStep(self.version, groups, tuple(self._dropped))
        self._dropped, self._unseen = [], 0
        self._fill()
        return step

    def trouble(self) -> DroppedGroup[P] | None:
        """Return the last of a step's worth of groups dropped while no step was complete.

        Nothing new starts until this is called. The next step has the groups.
        """
        if self._unseen < self._plan.groups:
            return None
        self._unseen = 0
        self._fill()
        return self._dropped[-1]

    def progress(self) -> RolloutProgress:
        """Return the state of all groups."""
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
        """Start the groups that may start."""
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
