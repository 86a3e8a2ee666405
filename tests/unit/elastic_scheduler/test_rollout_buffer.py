"""Rollout buffer of a trainer: groups, staleness and batches of the tail."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_scheduler import (
    CancelRun,
    RolloutBuffer,
    Round,
    RoundDone,
    SampleRun,
    StalenessAdmission,
    StalenessBound,
    StartRun,
    StepPlan,
    TailBatcher,
    TailPlan,
    TrainingStep,
    TurnTicket,
)
from tests.harness.examples import times

PLANS = st.builds(
    StepPlan,
    groups=st.integers(1, 3),
    samples=st.integers(1, 3),
    bound=st.builds(StalenessBound, st.integers(0, 3)),
    concurrency=st.integers(1, 12),
    retries=st.integers(0, 2),
    restarts=st.integers(0, 2),
    tail=st.none() | st.builds(TailPlan, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.5])),
)
NAMES = "turn turn stamp end finish finish finish fail take publish"
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(NAMES.split()),
        st.integers(0, 99),
        st.integers(0, 3),
    ),
    max_size=150,
)


class Driver:
    """Carries out what the buffer decides, and keeps books of its own beside it."""

    def __init__(self, plan: StepPlan, prompts: int, *, parts: bool = False) -> None:
        self.plan, self.left, self.parts = plan, prompts, parts
        # Groups of the step so far, which came in parts.
        self.part = 0
        self.feed = RolloutBuffer[int, SampleRun](plan)
        self.running: list[SampleRun] = []
        self.cancelled: set[SampleRun] = set()
        self.started: set[SampleRun] = set()
        self.turns: dict[SampleRun, list[int]] = {}
        self.stamps: dict[SampleRun, list[int]] = {}
        self.out: Counter[int] = Counter()
        self.added = 0
        self.settle()

    def settle(self) -> None:
        """Hand in prompts that are wanted, and look at what is to be done."""
        while self.feed.wanted > 0 and self.left > 0:
            self.left -= 1
            self.feed.add(self.added)
            self.added += 1
        if self.left == 0:
            self.left = -1
            self.feed.end()
        for action in self.feed.actions():
            if isinstance(action, StartRun):
                assert action.run not in self.started
                self.started.add(action.run)
                self.running.append(action.run)
                self.turns[action.run], self.stamps[action.run] = [], []
            else:
                assert isinstance(action, CancelRun)
                assert action.run in self.running
                assert action.run not in self.cancelled
                self.cancelled.add(action.run)
        self.check()

    def check(self) -> None:
        progress, plan = self.feed.progress(), self.plan
        assert len(self.running) == progress.samples_running <= plan.concurrency
        for run in self.running:
            assert self.feed.is_live(run) == (run not in self.cancelled)
        groups = progress.groups_running + progress.groups_ready
        capacity = (plan.bound.max_versions + 1) * plan.groups
        # Spare prompts of a short round finish instead of others, not beside them.
        assert groups <= capacity + (plan.groups if plan.tail else 0)
        assert progress.groups_ready <= capacity

    def turn(self, run: SampleRun, behind: int) -> None:
        ticket = self.feed.begin_turn(run)
        assert (ticket is None) == (run in self.cancelled)
        if ticket is not None:
            assert 0 <= ticket.min_version <= self.feed.version
            self.turns[run].append(ticket.number)

    def stamp(self, run: SampleRun, behind: int) -> None:
        if self.turns[run]:
            version = max(0, self.feed.version - behind)
            if self.feed.stamp(run, self.turns[run][-1], version):
                self.stamps[run].append(version)

    def end(self, run: SampleRun, behind: int) -> None:
        for turn in self.turns[run]:
            self.feed.end_turn(run, turn)
        self.turns[run].clear()

    def finish(self, run: SampleRun, behind: int) -> None:
        self.end(run, behind)
        self.running.remove(run)
        self.feed.finished(run, run)

    def fail(self, run: SampleRun, behind: int) -> None:
        self.end(run, behind)
        self.running.remove(run)
        self.feed.failed(run, RuntimeError(run.name))

    def take(self) -> bool:
        step = self.feed.take(part=self.parts)
        if step is not None:
            self._look_at(step)
        taken = step is not None or self.feed.trouble() is not None
        self.settle()
        return taken

    def _look_at(self, step: TrainingStep[int, SampleRun]) -> None:
        assert step.version == self.feed.version
        self.part += len(step.groups)
        if step.last:
            assert self.part == self.plan.groups or self.left < 0
            self.part = 0
        else:
            assert self.parts
            assert 0 < len(step.groups) <= self.part < self.plan.groups
        for group in step.groups:
            assert len(group.samples) == self.plan.samples
            assert len({run.sample for run in group.samples}) == self.plan.samples
            assert len({run.life for run in group.samples}) == 1
            stamps = [v for run in group.samples for v in self.stamps[run]]
            assert min(stamps, default=None) == group.oldest_version
            assert min(stamps, default=step.version) >= step.version - self.plan.bound.max_versions
            assert not self.cancelled & set(group.samples)
            self.out[group.prompt] += 1
        for lost in step.dropped:
            self.out[lost.prompt] += 1

    def publish(self, by: int) -> None:
        self.feed.publish(self.feed.version + by)
        self.part *= by == 0


@settings(max_examples=times(3))
@given(PLANS, st.integers(0, 25), EVENTS, st.booleans())
def test_whatever_happens_steps_are_in_time_and_each_prompt_comes_out_once(
    plan: StepPlan, prompts: int, script: list[tuple[str, int, int]], parts: bool
) -> None:
    driver = Driver(plan, prompts, parts=parts)
    for what, pick, number in script:
        if what == "take":
            driver.take()
        elif what == "publish":
            driver.publish(number)
        elif driver.running:
            run = driver.running[pick % len(driver.running)]
            if what == "finish" and number == 0:
                driver.turn(run, 0)
                driver.stamp(run, pick % 3)
                driver.settle()
            getattr(driver, what)(run, number)
        driver.settle()
    # From here on every episode ends and every step is taken: nothing may stand still.
    for turn in range(20_000):
        if driver.feed.exhausted:
            break
        if driver.take():
            driver.publish(turn % 2)
        else:
            assert driver.running, "no step, no trouble, and nothing that runs"
            run = driver.running[turn % len(driver.running)]
            driver.turn(run, 0)
            driver.stamp(run, 0)
            driver.settle()
            driver.finish(run, 0)
        driver.settle()
    assert driver.feed.exhausted
    assert driver.feed.take() is None
    assert driver.out == Counter(range(prompts))
    progress = driver.feed.progress()
    assert progress.trained + progress.dropped == prompts
    assert (progress.groups_running, progress.groups_ready, progress.prompts_waiting) == (0, 0, 0)


PLAIN = StepPlan(groups=2, samples=2, bound=StalenessBound(1), concurrency=100)


def test_the_groups_of_a_step_come_as_they_are_complete() -> None:
    driver = Driver(replace(PLAIN, bound=StalenessBound(0)), 3, parts=True)
    feed = driver.feed
    assert feed.take(part=True) is None
    _played(driver, 1)
    assert feed.take() is None, "a whole step waits for both"
    for prompt, last in ((1, False), (0, True)):
        if last:
            assert feed.take(part=True) is None
            _played(driver, prompt)
        step = feed.take(part=True)
        assert step is not None
        assert ([group.prompt for group in step.groups], step.last) == ([prompt], last)
    assert not driver.running, "the third one would be a version too old"
    feed.publish(1)
    driver.settle()
    _played(driver, 2)
    step = feed.take(part=True)
    assert step is not None
    assert (len(step.groups), step.last, feed.exhausted) == (1, True, True)


def test_a_step_whose_last_group_is_dropped_ends_with_an_empty_part() -> None:
    driver = Driver(replace(PLAIN, bound=StalenessBound(0), retries=0), 2, parts=True)
    _played(driver, 0)
    step = driver.feed.take(part=True)
    assert step is not None
    assert not step.last
    for run in [run for run in driver.running if run.prompt == 1]:
        driver.fail(run, 0)
    step = driver.feed.take(part=True)
    assert step is not None
    assert (step.groups, len(step.dropped), step.last) == ((), 1, True)


def _played(driver: Driver, prompt: int) -> None:
    for run in [run for run in driver.running if run.prompt == prompt]:
        driver.turn(run, 0)
        driver.stamp(run, 0)
        driver.finish(run, 0)
    driver.settle()


def test_a_prompt_that_aged_out_starts_first_and_steps_wait_for_it() -> None:
    driver = Driver(PLAIN, 99)
    slow = [run for run in driver.running if run.prompt == 0]
    for run in slow:
        driver.turn(run, 0)
    quick = 1
    for version in (1, 2):
        _played(driver, quick)
        _played(driver, quick + 1)
        assert driver.take()
        quick += 2
        driver.publish(1)
        driver.settle()
        assert driver.feed.version == version
    assert driver.cancelled == set(slow)
    assert driver.feed.progress().aged_out == 1
    again = [run for run in driver.running if run.prompt == 0 and run not in slow]
    assert [(run.life, run.name) for run in again] == [(1, "0.1.0.0"), (1, "0.1.1.0")]
    for run in again:
        driver.turn(run, 0)
    # The next step leaves without it, the one after cannot: it would age out again.
    for leaves in (True, False):
        _played(driver, quick)
        _played(driver, quick + 1)
        assert driver.take() is leaves
        quick += 2
        if leaves:
            driver.publish(1)
            driver.settle()
    _played(driver, 0)
    assert driver.take()
    assert driver.out[0] == 1
    assert driver.feed.progress().aged_out == 1


def test_a_failed_sample_is_tried_again_and_then_costs_its_group() -> None:
    driver = Driver(replace(PLAIN, retries=1), 99)
    for attempt in range(2):
        bad = next(run for run in driver.running if (run.prompt, run.sample) == (0, 1))
        assert bad.attempt == attempt
        driver.fail(bad, 0)
        driver.settle()
    assert [run.sample for run in driver.cancelled] == [0]
    _played(driver, 1)
    _played(driver, 2)
    step = driver.feed.take()
    assert step is not None
    assert [(lost.prompt, str(lost.error)) for lost in step.dropped] == [(0, "0.0.1.1")]
    assert [group.prompt for group in step.groups] == [1, 2]


def test_an_outage_does_not_burn_the_prompts() -> None:
    driver = Driver(replace(PLAIN, retries=0), 1000)
    while driver.running:
        driver.fail(driver.running[0], 0)
        driver.settle()
    # The four that there is room for, and one more in place of the first that was dropped.
    assert driver.added == 5
    assert driver.feed.take() is None
    trouble = driver.feed.trouble()
    assert trouble is not None
    assert isinstance(trouble.error, RuntimeError)
    driver.settle()
    assert driver.running


def test_what_ages_out_in_an_outage_does_not_start_again_either() -> None:
    driver = Driver(replace(PLAIN, retries=0), 1000)
    for prompt in (0, 1):
        driver.fail(next(run for run in driver.running if run.prompt == prompt), 0)
        driver.settle()
    live = [run for run in driver.running if driver.feed.is_live(run)]
    for run in live:
        driver.turn(run, 0)
    driver.publish(2)
    driver.settle()
    assert driver.cancelled >= set(live)
    assert not [run for run in driver.running if driver.feed.is_live(run)]
    assert driver.feed.trouble() is not None
    driver.settle()
    again = {run.prompt for run in driver.running if driver.feed.is_live(run)}
    assert again >= {run.prompt for run in live}


def test_spare_samples_stand_in_for_those_that_fail() -> None:
    driver = Driver(replace(PLAIN, retries=0, tail=TailPlan(0.0, 0.5)), 99)
    for prompt in (0, 1):
        driver.fail(next(run for run in driver.running if run.prompt == prompt), 0)
        _played(driver, prompt)
    step = driver.feed.take()
    assert step is not None
    assert [[run.sample for run in group.samples] for group in step.groups] == [[1, 2], [1, 2]]
    assert step.dropped == ()


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"samples": 0}, {"retries": -1}])
def test_a_plan_that_cannot_be_carried_out_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="StepPlan"):
        replace(PLAIN, **wrong)  # type: ignore[arg-type]


# ---- staleness ----


STEPS = "start keep spare turn turn stamp stamp end forget finish finish drop train publish"
STEP_EVENTS = st.tuples(
    st.sampled_from(STEPS.split()),
    st.integers(0, 50),
    st.integers(0, 3),
)


class Run:
    """A trainer's own books beside the admission under test."""

    def __init__(self, allowed: int, per_step: int, *, parts: bool) -> None:
        self.job, self.parts = StalenessAdmission(StalenessBound(allowed), per_step), parts
        self.allowed, self.per_step = allowed, per_step
        self.came: dict[int, dict[int, list[int]]] = {}
        self.turns: dict[int, dict[int, int]] = {}
        self.ready: set[int] = set()
        self.spares: set[int] = set()
        self.trained: set[int] = set()
        self.begun = self.training = 0

    @property
    def running(self) -> list[int]:
        return sorted(set(self.came) - self.ready)

    def _begin(self, **how: bool) -> None:
        self.begun += 1
        if self.job.room < 1 and not how.get("spare"):
            with pytest.raises(ValueError, match="are ahead"):
                self.job.start(self.begun, **how)
            return
        self.job.start(self.begun, **how)
        self.came[self.begun], self.turns[self.begun] = {}, {}

    def start(self, pick: int, behind: int) -> None:
        self._begin()

    def keep(self, pick: int, behind: int) -> None:
        self._begin(kept=True)

    def spare(self, pick: int, behind: int) -> None:
        self._begin(spare=True)
        self.spares.add(self.begun)

    def turn(self, pick: int, behind: int) -> None:
        if self.running:
            group = self.running[pick % len(self.running)]
            ticket = self.job.begin_turn(group, behind)
            now = self.job.published
            assert max(0, now - self.allowed) <= ticket.min_version <= now
            self.turns[group][ticket.number] = behind

    def stamp(self, pick: int, behind: int) -> None:
        open_turns = [(g, t) for g in self.running for t in self.turns[g]]
        if open_turns:
            group, turn = open_turns[pick % len(open_turns)]
            version = max(0, self.job.published - behind)
            alive = self.job.stamp(group, turn, version)
            assert alive or version < self.job.published - self.allowed
            self.came[group].setdefault(self.turns[group][turn], []).append(version)
            if not alive:
                self._lost(group)

    def end(self, pick: int, behind: int) -> None:
        for group in self.running[: pick % 3]:
            for turn in self.turns[group]:
                self.job.end_turn(group, turn)
            self.turns[group].clear()

    def forget(self, pick: int, behind: int) -> None:
        for group in self.running[: pick % 2]:
            self.job.forget(group, behind)
            self.came[group].pop(behind, None)
            self.turns[group] = {t: s for t, s in self.turns[group].items() if s != behind}

    def finish(self, pick: int, behind: int) -> None:
        done = [g for g in self.running if not self.turns[g]]
        if done:
            group = done[pick % len(done)]
            if group not in self.spares or self.job.room > 0:
                self.job.finish(group)
                self.ready.add(group)

    def drop(self, pick: int, behind: int) -> None:
        if self.came:
            group = sorted(self.came)[pick % len(self.came)]
            self.job.drop(group)
            self._lost(group)

    def train(self, pick: int, behind: int) -> None:
        before = self.job.taken
        taken = self.job.take(part=self.parts)
        if self.parts:
            assert self.job.taken in (0, before + len(taken))
        else:
            assert len(taken) in (0, self.per_step)
        self.training = len(taken) + (self.training if before else 0)
        for each in taken:
            assert each.number in self.ready - self.trained
            self.trained.add(each.number)
            stamps = [v for sample in self.came[each.number].values() for v in sample]
            assert min(stamps, default=None) == each.oldest_version
            assert min(stamps, default=10**9) >= self.job.published - self.allowed
            self._lost(each.number)

    def publish(self, pick: int, behind: int) -> None:
        self.training = 0 if behind else self.training
        for each in self.job.publish(self.job.published + behind):
            self._lost(each)

    def _lost(self, group: int) -> None:
        del self.came[group], self.turns[group]
        self.ready.discard(group)

    def check(self) -> None:
        assert self.job.ready == len(self.ready)
        places = len([g for g in self.came if g in self.ready or g not in self.spares])
        assert self.job.room == self.job.capacity - places - self.training >= 0
        now = self.job.published
        for group, samples in self.came.items():
            for stamps in samples.values():
                assert min(stamps) >= now - self.allowed, f"{group} should have aged out"


@settings(max_examples=times(3))
@given(st.integers(0, 3), st.integers(1, 3), st.lists(STEP_EVENTS, max_size=120), st.booleans())
def test_no_sample_beyond_the_bound_is_ever_trained_on(
    allowed: int, per_step: int, script: list[tuple[str, int, int]], parts: bool
) -> None:
    run = Run(allowed, per_step, parts=parts)
    for what, pick, behind in script:
        getattr(run, what)(pick, behind)
        run.check()


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 8))
def test_a_job_that_keeps_up_never_ages_out(allowed: int, per_step: int, steps: int) -> None:
    job = StalenessAdmission(StalenessBound(allowed), per_step)
    begun, running = 0, []
    for _ in range(steps):
        while job.room:
            job.start(begun)
            running.append(begun)
            begun += 1
        assert len(running) == (allowed + 1) * per_step
        for name in running[:per_step]:
            ticket = job.begin_turn(name, 0)
            assert job.stamp(name, ticket.number, job.published)
            job.end_turn(name, ticket.number)
            job.finish(name)
        assert {taken.number for taken in job.take()} == set(running[:per_step])
        running = running[per_step:]
        assert job.publish(job.published + 1) == ()
    assert begun == (steps + allowed) * per_step


class KeepingUp:
    """Each step publishes one version; turns bring the oldest tokens that they may, or none."""

    def __init__(self, allowed: int, per_step: int, *, parts: bool) -> None:
        self.job, self.parts = StalenessAdmission(StalenessBound(allowed), per_step), parts
        self.kept: dict[int, bool] = {}
        self.sent: dict[int, list[TurnTicket]] = {}
        self.training = False

    def begin(self, die: int) -> None:
        while self.job.room:
            # Others age out now and then; of the kept ones none does.
            name = len(self.kept)
            self.kept[name], self.sent[name] = (die + name) % 3 > 0, []
            self.job.start(name, kept=self.kept[name])

    def trainer(self) -> None:
        if not self.training:
            self.training = bool(self.job.take(part=self.parts)) and not self.job.taken
            return
        self.training = False
        for name in self.job.publish(self.job.published + 1):
            assert not self.kept[name]
            self.sent.pop(name, None)

    def answer(self, name: int, pick: int, *, tokens: bool) -> None:
        ticket = self.sent[name].pop(pick % len(self.sent[name]))
        if tokens and not self.job.stamp(name, ticket.number, ticket.min_version):
            assert not self.kept[name]
            del self.sent[name]
        else:
            self.job.end_turn(name, ticket.number)

    def step(self, what: str, pick: int) -> None:
        self.begin(pick)
        name = sorted(self.sent)[pick % len(self.sent)] if self.sent else -1
        if what == "trainer":
            self.trainer()
        elif what == "turn" and self.sent:
            self.sent[name].append(self.job.begin_turn(name, pick % 2))
        elif self.sent and self.sent[name]:
            self.answer(name, pick, tokens=what == "tokens")
        elif what == "finish" and self.sent:
            self.job.finish(name)
            del self.sent[name]


@settings(max_examples=times(3))
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["trainer", "trainer", "turn", "turn", "tokens", "none", "finish"]),
            st.integers(0, 99),
        ),
        max_size=200,
    ),
    st.booleans(),
)
def test_steps_wait_for_kept_groups_so_that_none_of_them_ages_out(
    allowed: int, per_step: int, script: list[tuple[str, int]], parts: bool
) -> None:
    run = KeepingUp(allowed, per_step, parts=parts)
    for what, pick in script:
        run.step(what, pick)
    # And they do not wait for ever: once all that runs is ready, steps leave.
    for name in run.sent:
        run.job.finish(name)
    while run.job.ready >= per_step:
        assert run.job.take()


def test_a_step_waits_for_a_kept_group_whose_turns_may_bring_its_oldest_tokens_yet() -> None:
    job = StalenessAdmission(StalenessBound(1), groups_per_step=1)
    job.start(1, kept=True)
    first = job.begin_turn(1, 0)
    job.publish(1)
    second = job.begin_turn(1, 1)
    assert second.min_version == 0
    job.end_turn(1, first.number)  # it had no tokens, but the second may still be of version 0
    job.start(2)
    job.finish(2)
    assert job.take() == ()
    assert job.stamp(1, second.number, 0)
    job.end_turn(1, second.number)
    job.finish(1)
    assert [taken.number for taken in job.take()] == [1]


def test_parts_of_a_step_leave_room_for_a_kept_group_that_it_waits_for() -> None:
    job = StalenessAdmission(StalenessBound(1), groups_per_step=2)
    job.start(1, kept=True)
    turn = job.begin_turn(1, 0)
    job.publish(1)
    assert job.stamp(1, turn.number, 0)
    job.end_turn(1, turn.number)
    for other in (2, 3):
        job.start(other)
        job.finish(other)
    assert [[each.number for each in job.take(part=True)] for _ in range(2)] == [[2], []]
    job.finish(1)
    assert [each.number for each in job.take(part=True)] == [1]
    assert job.taken == 0


def test_what_starts_while_a_step_is_trained_on_is_trained_on_after_it() -> None:
    job = StalenessAdmission(StalenessBound(0), groups_per_step=1)
    job.start(1)
    job.finish(1)
    assert job.take()
    assert job.room == 0, "on-policy: nothing starts before the next version is out"
    assert job.publish(1) == ()
    job.start(2)
    job.finish(2)
    assert job.take()
    assert job.take() == ()
    assert job.room == 1, "a second step of the same version: the trainer gathers gradients"


def test_a_turn_asks_for_what_can_be_in_time_at_its_place() -> None:
    job = StalenessAdmission(StalenessBound(1), groups_per_step=1, published=5)
    job.start(1)
    job.start(2)
    with pytest.raises(ValueError, match="more than 1 versions old"):
        job.start(3)
    # One group is ahead of 2: it is trained on at 6 at the earliest, where 4 is too old.
    assert job.begin_turn(2, 0).min_version == 5
    assert job.begin_turn(1, 0).min_version == 4


def test_a_kept_group_asks_for_nothing_older_than_it_has_and_is_taken_first() -> None:
    job = StalenessAdmission(StalenessBound(2), groups_per_step=1, published=5)
    job.start(1)
    job.start(2, kept=True)
    assert job.begin_turn(2, 0).min_version == 5, "what it begins with is as new as can be"
    job.publish(6)
    assert job.begin_turn(2, 1).min_version == 5
    assert job.begin_turn(1, 0).min_version == 5, "the kept group is ahead"
    assert job.stamp(1, 1, 5)
    job.end_turn(1, 1)
    job.end_turn(2, 1)
    job.end_turn(2, 2)
    for group in (1, 2):
        job.finish(group)
    assert [[taken.number for taken in job.take()] for _ in range(2)] == [[2], [1]]


def test_the_oldest_go_first() -> None:
    job = StalenessAdmission(StalenessBound(2), groups_per_step=1, published=5)
    for group, version in ((1, 5), (2, 3), (3, 4)):
        job.start(group)
        ticket = job.begin_turn(group, 0)
        assert job.stamp(group, ticket.number, version)
        job.end_turn(group, ticket.number)
        job.finish(group)
    assert [job.take()[0].number for _ in range(3)] == [2, 3, 1]


def test_groups_age_out_together_by_their_oldest_token() -> None:
    job = StalenessAdmission(StalenessBound(1), groups_per_step=3)
    tickets = {}
    for group in (1, 2, 3):
        job.start(group)
        tickets[group] = [job.begin_turn(group, sample).number for sample in (0, 1)]
    assert job.publish(1) == ()
    # Sent under version 0; what came of group 2 is newer than that, and of 3 one sample is not.
    assert job.stamp(2, tickets[2][0], 1)
    assert job.stamp(2, tickets[2][1], 1)
    assert job.stamp(3, tickets[3][0], 1)
    assert job.publish(2) == (1, 3)
    assert not job.stamp(2, job.begin_turn(2, 0).number, 0)
    assert job.room == job.capacity


def test_what_came_for_a_sample_that_is_tried_anew_does_not_count() -> None:
    job = StalenessAdmission(StalenessBound(0), groups_per_step=1)
    job.start(1)
    first = job.begin_turn(1, 0)
    assert job.stamp(1, first.number, 0)
    job.forget(1, 0)
    assert job.publish(1) == ()
    again = job.begin_turn(1, 0)
    assert again.min_version == 1
    assert job.stamp(1, again.number, 1)
    job.end_turn(1, again.number)
    job.finish(1)
    assert [(taken.number, taken.oldest_version) for taken in job.take()] == [(1, 1)]


# ---- tail ----


@given(st.integers(1, 4), st.integers(0, 40), st.randoms(), st.integers(0, 3))
def test_every_prompt_is_trained_on_exactly_once_whatever_round_it_was_in(
    size: int, count: int, rng: random.Random, trouble: int
) -> None:
    batcher = TailBatcher(TailPlan(0.5, 0.5), size, 2)
    for number in range(count):
        batcher.add(number)
    trained: list[int] = []
    dropped: list[int] = []
    while (current := batcher.begin(size, last=True)) is not None:
        assert current.samples == (2 if current.is_long else 3)
        members = [*current.prompts, *current.spares]
        done = None
        while done is None:
            what, prompt = rng.randrange(8), members.pop(rng.randrange(len(members)))
            if what == 0 and trouble > 0:
                batcher.put_back(prompt)
                again = batcher.begin(size, last=True)
                assert again is not None
                assert [*again.prompts, *again.spares] == [prompt]
                assert again.samples == current.samples
                members.append(prompt)
            elif what == 1 and trouble > 1:
                done = batcher.drop(prompt)
                dropped.append(prompt)
            else:
                assert batcher.begin(size, last=True) is None
                done = batcher.complete(prompt)
        trained += done.delivered
        assert len(done.delivered) <= len(current.prompts)
        assert not (current.is_long and done.deferred)
    assert batcher.waiting == 0
    assert sorted(trained + dropped) == [*range(count)]


def test_what_was_too_slow_runs_in_a_long_round() -> None:
    batcher = TailBatcher(TailPlan(more_prompts=0.5, more_samples=0.0), prompts=2, samples=1)
    assert batcher.wanted(2) == 3
    for number in range(6):
        batcher.add(number)
    for slow in (0, 3):
        short = batcher.begin(2)
        assert short is not None
        assert (len(short.prompts), len(short.spares), short.is_long) == (2, 1, False)
        quick = [number for number in (*short.prompts, *short.spares) if number != slow]
        assert batcher.complete(quick[0]) is None
        assert batcher.complete(quick[1]) == RoundDone(tuple(quick), (slow,))
    assert (batcher.deferred, batcher.wanted(2)) == (2, 0)
    long = batcher.begin(2)
    assert long == Round((0, 3), 1, (), is_long=True)
    with pytest.raises(ValueError, match="shares"):
        TailPlan(-0.1)


def test_a_round_fills_up_the_step_that_another_left_too_small() -> None:
    batcher = TailBatcher(TailPlan(0.0, 0.0), prompts=4, samples=1)
    for number in range(8):
        batcher.add(number)
    assert batcher.begin(0) is None
    filling = batcher.begin(5)  # of 8 places 3 hold ready groups: one is missing for a step
    assert filling is not None
    assert filling.prompts == (0,)


def test_spares_that_waited_for_nothing_do_not_start_again_in_a_round_that_is_over() -> None:
    batcher = TailBatcher(TailPlan(1.0, 0.0), prompts=1, samples=1)
    for number in range(4):
        batcher.add(number)
    assert batcher.begin(1) == Round((0,), 1, (1,))
    batcher.put_back(0)
    assert batcher.complete(1) == RoundDone((1,), (0,))
    assert batcher.begin(1) == Round((0,), 1, (), is_long=True)
