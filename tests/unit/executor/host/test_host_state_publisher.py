"""State that a scheduler's turns publish, with stand-ins for vLLM's objects."""

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor import ControlPage, HostState
from executor.vllm.host.state_publisher import HostStatePublisher

MS = 1_000_000


@dataclass
class FakeRequest:
    request_id: str
    arrival_time: float = 100.0
    num_prompt_tokens: int = 10
    num_output_tokens: int = 0


def step_of(tokens: Mapping[str, int], new: Iterable[str] = (), total: int | None = None) -> Any:
    """Return what vLLM's scheduler returns for a step."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        total_num_scheduled_tokens=sum(tokens.values()) if total is None else total,
    )


@dataclass
class FakeEngineScheduler:
    """An engine whose pool has 100 blocks, 10 of them in use."""

    requests: dict[str, Any] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    running: int = 0

    @property
    def kv_cache_manager(self) -> Any:
        pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 90)
        return SimpleNamespace(block_pool=pool)

    def get_request_counts(self) -> tuple[int, int]:
        return self.running, len(self.requests) - self.running


class PublisherRig:
    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.now_ns = 1_000 * MS
        self.scheduler = FakeEngineScheduler()
        self.begun: set[str] = set()
        self.observer = HostStatePublisher(
            self.scheduler, page.take_host(), (0.5, 0.15), lambda: self.now_ns
        )
        self.observer.wall_s = lambda: 100.0
        self.observer.publish()

    def state(self) -> HostState:
        state = self.page.host.read()
        assert state is not None
        return state

    def add(self, name: str, age_s: float = 0.0) -> FakeRequest:
        request = FakeRequest(name, 100.0 - age_s)
        self.scheduler.requests[name] = request
        self.observer.arrived(request)
        return request

    def begin(self, **tokens: int) -> Any:
        step = step_of(tokens, tokens.keys() - self.begun)
        self.begun.update(tokens)
        self.scheduler.running = len(self.scheduler.requests)
        self.observer.scheduled(step, self.now_ns)
        return step

    def end(self, step: Any, *finished: str) -> None:
        for name in step.num_scheduled_tokens:
            self.scheduler.requests[name].num_output_tokens += 1
        for name in finished:
            del self.scheduler.requests[name]
        self.scheduler.finished_req_ids = set(finished)
        self.scheduler.running = len(self.scheduler.requests)
        self.observer.stepped(step)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[PublisherRig]:
    with ControlPage.create(tmp_path / "page") as page:
        yield PublisherRig(page)


def test_a_host_is_published_idle_before_its_first_request(rig: PublisherRig) -> None:
    assert rig.state() == HostState(kv_used=10, kv_total=100, heartbeat_ns=1_000 * MS)
    assert rig.state().idle


def test_a_request_counts_from_its_arrival_not_from_its_turn(rig: PublisherRig) -> None:
    rig.add("a", age_s=0.2)
    state = rig.state()
    assert (state.waiting, state.queued_prefill_tokens) == (1, 10)
    assert state.earliest_prefill_deadline_ns == rig.now_ns + 300 * MS


def test_a_wall_clock_that_jumped_back_cannot_postpone_a_deadline(rig: PublisherRig) -> None:
    rig.add("a", age_s=-3600)
    assert rig.state().earliest_prefill_deadline_ns == rig.now_ns + 500 * MS


def test_a_request_passes_from_prefill_to_decode_to_idle(rig: PublisherRig) -> None:
    rig.add("a")
    step = rig.begin(a=10)
    assert rig.state().in_step
    rig.now_ns += 20 * MS
    rig.end(step)
    state = rig.state()
    assert (state.in_step, state.running, state.queued_prefill_tokens) == (False, 1, 0)
    assert state.earliest_prefill_deadline_ns == 0
    assert state.earliest_decode_deadline_ns == rig.now_ns + 150 * MS
    assert (state.busy_ns, state.last_step_ns, state.step_seq) == (20 * MS, 20 * MS, 1)
    rig.now_ns += 5 * MS
    step = rig.begin(a=1)
    rig.now_ns += 7 * MS
    rig.end(step, "a")
    state = rig.state()
    assert state.idle
    assert (state.busy_ns, state.last_step_ns, state.step_seq) == (27 * MS, 7 * MS, 2)
    assert state.earliest_decode_deadline_ns == 0


def test_overlapping_steps_count_their_time_once(rig: PublisherRig) -> None:
    rig.add("a")
    first = rig.begin(a=10)
    rig.now_ns += 4 * MS
    second = rig.begin(a=1)
    rig.now_ns += 6 * MS
    rig.end(first)
    assert rig.state().in_step
    rig.now_ns += 10 * MS
    rig.end(second)
    state = rig.state()
    assert (state.in_step, state.busy_ns, state.last_step_ns) == (False, 20 * MS, 10 * MS)


def test_empty_schedules_are_no_steps(rig: PublisherRig) -> None:
    rig.observer.scheduled(step_of({}), rig.now_ns)
    rig.end(step_of({}))
    assert (rig.state().step_seq, rig.state().busy_ns) == (0, 0)


def test_an_aborted_request_leaves_an_idle_host(rig: PublisherRig) -> None:
    rig.add("a")
    del rig.scheduler.requests["a"]
    rig.scheduler.finished_req_ids = {"a"}
    rig.observer.ended()
    assert rig.state().idle
    assert rig.state().earliest_prefill_deadline_ns == 0


def test_what_comes_in_while_the_host_is_busy_is_told_with_its_next_step(rig: PublisherRig) -> None:
    rig.add("a")
    step = rig.begin(a=10)
    rig.end(step)
    rig.add("b", age_s=0.1)
    assert rig.state().waiting == 0, "the next schedule() is a moment away"
    rig.begin(a=1)
    state = rig.state()
    assert (state.running, state.queued_prefill_tokens) == (2, 10)
    assert state.earliest_prefill_deadline_ns == rig.now_ns + 400 * MS


def test_a_step_that_ends_while_another_is_in_flight_is_told_with_the_next(
    rig: PublisherRig,
) -> None:
    rig.add("a")
    first = rig.begin(a=10)
    second = rig.begin(a=1)
    rig.now_ns += 10 * MS
    rig.end(first)
    third = rig.begin(a=1)
    state = rig.state()
    assert (state.in_step, state.step_seq, state.last_step_ns) == (True, 3, 10 * MS)
    assert state.earliest_decode_deadline_ns == rig.now_ns + 150 * MS
    rig.end(second)
    rig.end(third, "a")
    assert rig.state().idle, "that nothing is left is told at once"


def test_what_is_untold_is_told_by_a_schedule_without_tokens_too(rig: PublisherRig) -> None:
    rig.add("a")
    rig.end(rig.begin(a=10))
    rig.add("b")
    rig.observer.scheduled(step_of({}), rig.now_ns)
    assert rig.state().queued_prefill_tokens == 10


def test_a_step_writes_to_the_page_once(rig: PublisherRig) -> None:
    rig.add("a")
    rig.end(rig.begin(a=10))
    before = rig.page.host.sequence
    for _ in range(10):
        rig.end(rig.begin(a=1))
    assert rig.page.host.sequence == before + 10 * 2, "the sequence grows by two with every write"


class CountingMapping(UserDict[str, int]):
    """Scheduled tokens that count how often anybody looks at one request of the step."""

    looks = 0

    def __getitem__(self, name: str) -> int:
        self.looks += 1
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.looks += 1
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        for name in self.data:
            self.looks += 1
            yield name


@pytest.mark.parametrize("running", [16, 1024])
def test_a_step_looks_at_the_requests_that_changed_not_at_all_that_run(
    rig: PublisherRig, running: int
) -> None:
    names = [f"r{number}" for number in range(running)]
    for name in names:
        rig.add(name)
    for number in range(2_000):
        rig.add(f"waiting{number}")
    rig.end(rig.begin(**dict.fromkeys(names, 10)))
    rig.add("late")
    looks = []
    for new in (["late"], [], [], []):
        tokens = CountingMapping(dict.fromkeys([*names, "late"], 1))
        tokens.looks = 0
        step = step_of(tokens, new, running + 1)
        rig.observer.scheduled(step, rig.now_ns)
        rig.scheduler.requests["late"].num_output_tokens += 1
        rig.scheduler.finished_req_ids = set()
        rig.observer.stepped(step)
        looks.append(tokens.looks)
    assert looks == [1, 0, 0, 0]
