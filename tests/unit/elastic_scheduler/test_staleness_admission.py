"""No sample that is trained on is older than the bound, whatever happens in between."""

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_scheduler import StalenessAdmission, StalenessBound

EVENTS = st.tuples(
    st.sampled_from(["start", "tokens", "tokens", "finish", "finish", "train", "publish", "drop"]),
    st.integers(0, 50),
    st.integers(0, 3),
)


class Run:
    """A trainer's own books beside the admission under test."""

    def __init__(self, allowed: int, per_step: int) -> None:
        self.job = StalenessAdmission(StalenessBound(allowed), per_step)
        self.allowed, self.per_step = allowed, per_step
        self.stamps: dict[str, list[int]] = {}
        self.trained: set[str] = set()
        self.begun = 0

    def start(self, name: str, behind: int) -> None:
        self.begun += 1
        if not self.job.start(f"g{self.begun}"):
            self.stamps[f"g{self.begun}"] = []
        assert self.job.waiting <= (self.allowed + 1) * self.per_step

    def tokens(self, name: str, behind: int) -> None:
        version = max(0, self.job.published - behind)
        if name and not self.job.may_start_turn(name, version):
            assert version >= self.job.published - self.allowed
        if name and self.job.stamp(name, version):
            self.stamps[name].append(version)
        elif name:
            # Aged out with all its members: nothing of it comes back.
            del self.stamps[name]
            assert not self.job.finish(name)
            assert self.job.may_start_turn(name, self.job.published)

    def finish(self, name: str, behind: int) -> None:
        if name and self.stamps[name]:
            assert self.job.finish(name)

    def drop(self, name: str, behind: int) -> None:
        self.job.drop(name)
        self.stamps.pop(name, None)

    def train(self, name: str, behind: int) -> None:
        taken = self.job.take()
        assert len(taken) in (0, self.per_step)
        for each in taken:
            assert each not in self.trained
            self.trained.add(each)
            assert min(self.stamps.pop(each)) >= self.job.published - self.allowed

    def publish(self, name: str, behind: int) -> None:
        for each in self.job.publish(self.job.published + 1):
            self.stamps.pop(each)


@settings(max_examples=300)
@given(st.integers(0, 3), st.integers(1, 3), st.lists(EVENTS, max_size=120))
def test_no_sample_beyond_the_bound_is_ever_trained_on(
    allowed: int, per_step: int, script: list[tuple[str, int, int]]
) -> None:
    run = Run(allowed, per_step)
    for what, pick, behind in script:
        names = sorted(run.stamps)
        getattr(run, what)(names[pick % len(names)] if names else "", behind)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 8))
def test_a_job_that_keeps_up_is_never_refused_a_turn(
    allowed: int, per_step: int, steps: int
) -> None:
    job = StalenessAdmission(StalenessBound(allowed), per_step)
    begun, running = 0, []
    for _ in range(steps):
        while not job.start(f"g{begun}"):
            running.append(f"g{begun}")
            begun += 1
        assert len(running) == (allowed + 1) * per_step
        for name in running:
            assert not job.may_start_turn(name, job.published)
        for name in running[:per_step]:
            assert job.stamp(name, job.published)
            assert job.finish(name)
        assert set(job.take()) == set(running[:per_step])
        running = running[per_step:]
        assert job.publish(job.published + 1) == () or allowed == 0
    assert begun == (steps + allowed) * per_step


def test_a_turn_that_cannot_be_in_time_any_more_does_not_start() -> None:
    job = StalenessAdmission(StalenessBound(1), groups_per_step=1, published=5)
    assert job.start("a") == ""
    assert job.start("b") == ""
    assert "ahead" in job.start("c")
    # One group is ahead of b: it is trained on at 6 at the earliest, where 4 is too old.
    assert "trained on at 6" in job.may_start_turn("b", 4)
    assert job.may_start_turn("b", 5) == ""
    assert job.may_start_turn("a", 4) == ""


def test_groups_age_out_together() -> None:
    job = StalenessAdmission(StalenessBound(1), groups_per_step=2)
    for name in ("old", "new"):
        job.start(name)
    assert job.publish(1) == ()
    job.start("young")
    assert job.publish(2) == ("old", "new")
    assert job.waiting == 1
    assert "aged out" in job.may_start_turn("old", 2)
