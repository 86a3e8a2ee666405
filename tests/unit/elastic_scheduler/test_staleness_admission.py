"""No sample that is trained on is older than the bound, whatever happens in between."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_scheduler import StalenessAdmission, StalenessBound, TurnTicket
from tests.harness.examples import times

NAMES = "start keep spare turn turn stamp stamp end forget finish finish drop train publish"
EVENTS = st.tuples(
    st.sampled_from(NAMES.split()),
    st.integers(0, 50),
    st.integers(0, 3),
)


class Run:
    """A trainer's own books beside the admission under test."""

    def __init__(self, allowed: int, per_step: int) -> None:
        self.job = StalenessAdmission(StalenessBound(allowed), per_step)
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
        taken = self.job.take()
        assert len(taken) in (0, self.per_step)
        self.training = len(taken)
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
@given(st.integers(0, 3), st.integers(1, 3), st.lists(EVENTS, max_size=120))
def test_no_sample_beyond_the_bound_is_ever_trained_on(
    allowed: int, per_step: int, script: list[tuple[str, int, int]]
) -> None:
    run = Run(allowed, per_step)
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

    def __init__(self, allowed: int, per_step: int) -> None:
        self.job = StalenessAdmission(StalenessBound(allowed), per_step)
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
            self.training = bool(self.job.take())
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
)
def test_steps_wait_for_kept_groups_so_that_none_of_them_ages_out(
    allowed: int, per_step: int, script: list[tuple[str, int]]
) -> None:
    run = KeepingUp(allowed, per_step)
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
