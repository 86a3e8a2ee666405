"""A guest inside SGLang's scheduler: what its hooks let a step do, and what they do to requests."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import executor.sglang.guest.plugin as guest_module
from executor import ControlPage, Grant, GrantMode, GuestState
from executor.engine_settings import EngineSettings
from executor.errors import ExecutorError
from executor.sglang.compat import GUEST_NEEDED, NEEDED, STAMP, check_features, check_version, stamp
from executor.sglang.guest.plugin import GuestHooks, GuestScheduler
from executor.sglang.surfaces import GUEST
from tests.fakes.sglang_scheduler import StandInBatch, StandInPool, StandInScheduler
from tests.harness.seated_host import SeatedHost

MS = 1_000_000
SLOTS = 4095


class SglangGuestRig:
    """A guest of stand-ins beside an idle host; time is the machine's."""

    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.scheduler = StandInScheduler(SLOTS, StandInPool(SLOTS + 1, width=64))
        settings = EngineSettings("guest", str(page.path), 0.0, 0.0, orphan_s=60.0)
        self.hooks = GuestHooks(settings)
        self.guest = self.hooks._guest = GuestScheduler(self.scheduler, settings)
        self.host = SeatedHost(page, time.monotonic_ns)

    def grant(self, tokens: int = 64, sequences: int = 8, cap: int = 0) -> None:
        now_ns = time.monotonic_ns()
        self.host.tell()
        self.page.grant.write(
            Grant(
                GrantMode.RUN,
                token_budget=tokens,
                max_sequences=sequences,
                kv_granule_cap=cap,
                expiry_ns=now_ns + 2_000 * MS,
                heartbeat_ns=now_ns,
            )
        )

    def freeze(self) -> None:
        now_ns = time.monotonic_ns()
        self.page.grant.write(
            Grant(GrantMode.FREEZE, expiry_ns=now_ns + 2_000 * MS, heartbeat_ns=now_ns)
        )

    def begin(self) -> bool:
        return self.guest.begin(self.scheduler.running_batch)

    def state(self) -> GuestState:
        state = self.page.guest.read()
        assert state is not None
        return state

    @property
    def running(self) -> list[str]:
        return [request.rid for request in self.scheduler.running_batch.reqs]

    @property
    def waiting(self) -> list[str]:
        return [request.rid for request in self.scheduler.waiting_queue]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangGuestRig]:
    monkeypatch.setattr(
        "executor.guest.plugin.Watchdog", lambda *_, **__: SimpleNamespace(start=lambda: None)
    )
    with ControlPage.create(tmp_path / "page") as page:
        rig = SglangGuestRig(page)
        for name, module in rig.scheduler.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        yield rig


def test_without_a_grant_no_step_begins_and_requests_stay(rig: SglangGuestRig) -> None:
    rig.scheduler.run("a", 20)
    assert not rig.begin()
    batch = rig.scheduler.running_batch
    assert rig.guest.update_running_batch(_never, rig.scheduler, batch) is None
    assert rig.hooks.should_defer_prefill(_never, rig.scheduler, batch) is True
    assert rig.running == ["a"]
    assert rig.state().gate_reason == "page_unreadable"


def test_a_frozen_guest_takes_up_where_it_was(rig: SglangGuestRig) -> None:
    rig.scheduler.run("a", 20)
    rig.grant()
    assert rig.begin()
    rig.freeze()
    assert not rig.begin()
    assert rig.state().gate_reason == "frozen"
    rig.grant()
    assert rig.begin()
    assert rig.running == ["a"]
    assert rig.scheduler.running_batch.reqs[0].retractions == 0


def test_a_prefill_has_no_more_tokens_than_are_granted_chunks_included(rig: SglangGuestRig) -> None:
    rig.scheduler.run("a", 20)
    rig.grant(tokens=10)
    assert rig.begin()
    seen: list[tuple[int | None, int]] = []

    def plan(scheduler: StandInScheduler, *_: Any, **__: Any) -> str:
        seen.append((scheduler.chunked_prefill_size, scheduler.max_prefill_tokens))
        return "planned"

    batch = rig.scheduler.running_batch
    said = rig.guest.get_new_batch_prefill(plan, rig.scheduler, running_batch=batch)
    assert (said, seen) == ("planned", [(10, 10)])
    assert (rig.scheduler.chunked_prefill_size, rig.scheduler.max_prefill_tokens) == (32, 64)


def test_nobody_is_admitted_beyond_the_granted_sequences(rig: SglangGuestRig) -> None:
    for name in "abc":
        rig.scheduler.run(name, 4)
    rig.grant(tokens=64, sequences=5)
    rig.begin()
    room = lambda running: rig.guest.get_num_allocatable_reqs(  # noqa: E731
        lambda *_: 100, rig.scheduler, running
    )
    assert (room(3), room(5), room(9)) == (2, 0, -4)
    rig.grant(tokens=4, sequences=5)
    rig.begin()
    assert room(3) == 1, "whoever is admitted decodes in the next step"


def test_a_flag_that_no_more_fit_does_not_outlast_the_grant(rig: SglangGuestRig) -> None:
    rig.scheduler.run("a", 4)
    rig.grant()
    rig.begin()
    assert rig.scheduler.running_batch.batch_is_full is False


def test_decode_beyond_the_tokens_is_parked_with_its_kv(rig: SglangGuestRig) -> None:
    for name in "abcd":
        rig.scheduler.run(name, 30)
    rig.scheduler.waiting_queue.append(rig.scheduler.running_batch.reqs.pop())
    rig.grant(tokens=2)
    assert rig.begin()
    assert rig.running == ["a", "b"]
    assert rig.waiting == ["c", "d"], "in front of whoever has not run yet"
    assert rig.scheduler.tree_cache.evictable_size() == 30, "its KV is a prefix now"


def test_an_aborted_request_ends_without_another_step(rig: SglangGuestRig) -> None:
    rig.scheduler.run("a", 30)
    rig.scheduler.run("b", 30).to_finish = SimpleNamespace(to_json=lambda: {"type": "abort"})
    free = rig.scheduler.token_to_kv_pool_allocator.available_size()
    assert not rig.begin(), "nobody granted anything"
    assert rig.running == ["a"]
    assert rig.scheduler.told == [("b", {"type": "abort"})]
    assert rig.scheduler.token_to_kv_pool_allocator.available_size() == free + 30


def test_a_cap_takes_free_granules_then_prefixes_then_requests_whose_tokens_stay(
    rig: SglangGuestRig,
) -> None:
    granules = rig.guest._pool.granules
    size = granules.granule_blocks
    first = rig.scheduler.run("a", size)
    rig.scheduler.tree_cache.keep(rig.scheduler.token_to_kv_pool_allocator.alloc(size))
    rig.grant(cap=3)
    assert rig.begin()
    assert rig.state().granules_mapped == 3
    assert rig.scheduler.tree_cache.evictable_size() == size, "what is free goes first"
    rig.grant(cap=2)
    assert rig.begin()
    assert not rig.scheduler.tree_cache.evictable_size(), "then what is cached"
    assert rig.running == ["a"]
    rig.grant(cap=1)
    assert rig.begin() or rig.begin()
    assert rig.running == []
    assert first.retractions == 1
    assert first.output_ids == [2], "retracted, not restarted"
    assert rig.state().granules_mapped == 1


def test_sglang_counts_the_pool_as_large_as_it_is(rig: SglangGuestRig) -> None:
    rig.scheduler.run("a", 10)
    rig.grant(cap=2)
    rig.begin()
    left = rig.guest._pool.capacity_blocks
    assert rig.scheduler.invariant_checker.max_total_num_tokens == left < SLOTS
    rig.grant(cap=0)
    while rig.guest._kv.ballooned:
        rig.begin()
    assert rig.scheduler.invariant_checker.max_total_num_tokens == SLOTS


def test_a_request_larger_than_the_cap_is_handed_back(rig: SglangGuestRig) -> None:
    size = rig.guest._pool.granules.granule_blocks
    rig.scheduler.run("small", 10)
    large = rig.scheduler.run("large", size * 2)
    rig.grant(cap=1)
    rig.begin()
    assert "large" not in rig.running + rig.waiting
    assert [name for name, _ in rig.scheduler.told] == ["large"]
    assert not large.kv.holds_kv


def test_a_request_between_two_chunks_is_retracted_too(rig: SglangGuestRig) -> None:
    size = rig.guest._pool.granules.granule_blocks
    rig.scheduler.chunked_req = rig.scheduler.run("chunked", size)
    rig.scheduler.running_batch.reqs.clear()
    rig.grant(cap=1)
    rig.begin()
    assert rig.scheduler.chunked_req is None


def test_an_idle_guest_hears_that_its_memory_is_wanted(rig: SglangGuestRig) -> None:
    polls: list[int] = []
    poller = SimpleNamespace(poll=lambda ms: polls.append(ms))
    rig.grant(cap=2)
    rig.guest.maybe_sleep(_never, SimpleNamespace(poller=poller))
    assert len(polls) == 1
    rig.grant(cap=0)
    rig.guest.maybe_sleep(_never, SimpleNamespace(poller=poller))
    assert len(polls) == 1 + guest_module.IDLE_ROUNDS, "it slept as long as it may"


def test_a_step_is_published_from_its_begin_to_its_end(rig: SglangGuestRig) -> None:
    request = rig.scheduler.run("a", 10)
    warm = rig.scheduler.run("rose-warm-up-0", 10)
    rig.grant()
    rig.begin()
    batch = rig.scheduler.running_batch

    def run(_: Any, __: Any) -> Any:
        assert rig.state().in_step
        return SimpleNamespace(logits_output=SimpleNamespace(customized_info=None))

    def process(_: Any, __: Any, ___: Any) -> None:
        request.output_ids.append(5)
        warm.output_ids.append(5)

    result = rig.guest.run_batch(run, rig.scheduler, batch)
    rig.guest.process_batch_result(process, rig.scheduler, batch, result)
    state = rig.state()
    assert not state.in_step
    assert state.step_seq == 1
    assert state.tokens_total == 1, "a warm-up's tokens are nobody's"


def test_every_token_is_stamped_beside_what_a_model_says_itself() -> None:
    batch = StandInBatch([SimpleNamespace(), SimpleNamespace()])  # type: ignore[list-item]
    result = SimpleNamespace(logits_output=SimpleNamespace(customized_info={"own": [1, 2]}))
    stamp(batch, result, {"ROSE_POLICY_VERSION": "7"})
    assert result.logits_output.customized_info == {"own": [1, 2], STAMP: [7, 7]}
    stamp(batch, SimpleNamespace(logits_output=None), {})


def test_an_allocator_that_begins_anew_gives_out_no_held_granule(rig: SglangGuestRig) -> None:
    rig.grant(cap=2)
    rig.begin()
    allocator = rig.scheduler.token_to_kv_pool_allocator
    free = allocator.available_size()
    rig.guest.clear(type(allocator).clear, allocator)
    assert allocator.available_size() == free


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("speculative_algorithm", "EAGLE", "speculative decoding; leave out"),
        ("disaggregation_mode", "prefill", "disaggregated"),
        ("enable_custom_logit_processor", True, "custom samplers"),
        ("nnodes", 2, "several machines"),
        ("disable_overlap_schedule", False, "give --disable-overlap-schedule"),
    ],
)
def test_what_breaks_a_promise_is_refused_in_one_line(name: str, value: object, said: str) -> None:
    given = {each: needed for each, (needed, _) in (*NEEDED.items(), *GUEST_NEEDED.items())}
    check_features(SimpleNamespace(**given), {**NEEDED, **GUEST_NEEDED})
    with pytest.raises(ExecutorError, match=said):
        check_features(SimpleNamespace(**{**given, name: value}), {**NEEDED, **GUEST_NEEDED})


def test_another_version_is_refused() -> None:
    check_version(GUEST, "0.5.23")
    check_version(GUEST, "0.5.23+cpu")
    with pytest.raises(ExecutorError, match=r"SGLang 0\.5\.15 .* this is 0\.5\.24; install one of"):
        check_version(GUEST, "0.5.24")


def test_a_model_with_windows_or_states_has_no_guest(rig: SglangGuestRig) -> None:
    rig.scheduler.tree_cache.supports_mamba = lambda: True  # type: ignore[method-assign]
    with pytest.raises(ExecutorError, match="full attention"):
        GuestScheduler(rig.scheduler, rig.hooks._settings)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("SGLang's own would begin a step")
