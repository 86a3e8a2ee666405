"""Any order of events: what is taken is in time, each prompt comes out once, and steps go on."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_scheduler import (
    CancelRun,
    RolloutBuffer,
    SampleRun,
    StalenessBound,
    StartRun,
    StepPlan,
    TailPlan,
    TrainingStep,
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

    def __init__(self, plan: StepPlan, prompts: int) -> None:
        self.plan, self.left = plan, prompts
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
        step = self.feed.take()
        if step is not None:
            self._look_at(step)
        taken = step is not None or self.feed.trouble() is not None
        self.settle()
        return taken

    def _look_at(self, step: TrainingStep[int, SampleRun]) -> None:
        assert step.version == self.feed.version
        assert len(step.groups) == self.plan.groups or self.left < 0
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


@settings(max_examples=times(3))
@given(PLANS, st.integers(0, 25), EVENTS)
def test_whatever_happens_steps_are_in_time_and_each_prompt_comes_out_once(
    plan: StepPlan, prompts: int, script: list[tuple[str, int, int]]
) -> None:
    driver = Driver(plan, prompts)
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
