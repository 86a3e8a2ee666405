"""The guest's scheduler, vLLM's own underneath, with the balloon between its steps."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kv_cases import (
    BLOCK_TOKENS,
    NARROW,
    WIDE,
    GuestRig,
    guest_of,
    host_rig,
    prompt_of,
    undisturbed,
)
from vllm.v1.request import RequestStatus

from executor import Grant, GrantMode

__all__ = ["guest_of"]


TOKENS = 40
Rigs = Callable[..., GuestRig]


@pytest.mark.parametrize("spec", [WIDE, NARROW], ids=["wide blocks", "narrow blocks"])
def test_a_fallen_cap_returns_the_memory_it_claims_before_the_next_step(
    guest_of: Rigs, spec: object
) -> None:
    rig = guest_of(blocks=129, spec=spec)
    for n in range(6):
        rig.add(f"r{n}", prompt_of(n, 20 + 30 * n), 60)
    rig.turns(20)
    before, whole = rig.published, rig.resident
    assert before.bytes_mapped == rig.kv_bytes
    assert before.granules_mapped == before.granules_total > 4
    cap = before.granules_total // 4
    rig.allow(kv_granule_cap=cap)
    rig.scheduler.schedule()
    assert rig.published.granules_mapped == cap
    claimed = before.bytes_mapped - rig.published.bytes_mapped
    assert claimed == whole - rig.resident
    assert claimed > 0.9 * rig.kv_bytes * (1 - cap / before.granules_total)
    assert rig.held_resident == 0
    assert 0 <= rig.blocks.get_usage() <= 1
    rig.allow(kv_granule_cap=0)
    rig.scheduler.schedule()
    assert rig.published.granules_mapped == before.granules_total
    assert rig.published.bytes_mapped == rig.kv_bytes


@pytest.mark.parametrize("mode", [GrantMode.FREEZE, GrantMode.DRAIN, GrantMode.THROTTLE])
def test_a_guest_that_may_not_run_gives_memory_back_all_the_same(
    guest_of: Rigs, mode: GrantMode
) -> None:
    rig, prompt = guest_of(), list(range(40))
    rig.add("frozen", prompt, 10)
    rig.turn()
    rig.allow(mode=mode, token_budget=0, kv_granule_cap=8)
    rig.turn()
    assert rig.published.granules_mapped == 8
    rig.allow(mode=GrantMode.RUN, token_budget=512)
    rig.run_until_idle()
    assert rig.outputs["frozen"] == undisturbed(prompt, 10)


def test_an_idle_guest_has_work_for_as_long_as_it_owes_memory(guest_of: Rigs) -> None:
    rig = guest_of()
    rig.add("past", list(range(40)), 3)
    rig.run_until_idle()
    assert not rig.scheduler.has_requests()
    rig.allow(kv_granule_cap=5)
    assert rig.scheduler.has_requests()
    rig.turn()
    assert rig.published.granules_mapped == 5
    rig.allow(kv_granule_cap=0)
    assert not rig.scheduler.has_requests(), "growing can wait for the next request"
    rig.allow(kv_granule_cap=5)
    assert not rig.scheduler.has_requests()
    rig.page.grant.write(Grant())  # Zeroed memory: no cap, and long expired.
    rig.add("late", list(range(10)), 2)
    rig.turn()
    assert rig.published.granules_mapped == 5, "silence never gives memory"


def test_a_request_that_cannot_fit_is_handed_back_and_the_others_go_on(guest_of: Rigs) -> None:
    rig = guest_of()  # A granule is one block of 16 tokens.
    large, small = prompt_of(1, 200), prompt_of(2, 30)
    rig.add("large", large, 40)
    rig.add("small", small, 40)
    rig.turns(10)
    rig.allow(kv_granule_cap=1 + 128 // BLOCK_TOKENS)
    rig.add("late", prompt_of(3, 150), 4)
    rig.run_until_idle()
    assert rig.ends == {"large": "abort", "late": "abort", "small": "length"}
    assert rig.outputs["small"] == undisturbed(small, 40)
    partial = rig.outputs["large"]
    assert 0 < len(partial) < 40
    assert partial == undisturbed(large, len(partial)), "it can go on elsewhere from here"
    rig.allow(kv_granule_cap=1 + 64 // BLOCK_TOKENS)
    grows = prompt_of(4, 40)
    rig.add("grows", grows, 100)
    rig.run_until_idle()
    assert rig.ends["grows"] == "abort"
    assert len(rig.outputs["grows"]) >= 64 - 40
    assert rig.outputs["grows"] == undisturbed(grows, len(rig.outputs["grows"]))


def test_the_prefix_cache_can_be_reset_while_granules_are_held(guest_of: Rigs) -> None:
    rig, prompt = guest_of(), prompt_of(3, 50)
    rig.add("kept", prompt, 30)
    rig.turns(5)
    rig.allow(kv_granule_cap=20)
    rig.turn()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run_until_idle()
    assert rig.outputs["kept"] == undisturbed(prompt, 30)


@pytest.mark.parametrize("depth", [1, 2], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("seed", range(3))
def test_output_is_the_same_after_any_sequence_of_freeze_throttle_and_balloon(
    guest_of: Rigs, seed: int, depth: int
) -> None:
    rng = random.Random(seed)
    rig = guest_of(blocks=97, spec=rng.choice([WIDE, NARROW]), depth=depth)
    total = rig.published.granules_total
    shared = prompt_of(rng, 40)
    prompts: dict[str, tuple[list[int], int]] = {}
    for _ in range(400):
        act = rng.random()
        if act < 0.12 and len(prompts) < 30:
            prompt = (shared if rng.random() < 0.5 else []) + prompt_of(rng, rng.randint(1, 90))
            name, count = f"r{len(prompts)}", rng.randint(1, 80)
            prompts[name] = (prompt, count)
            rig.add(name, prompt, count)
        elif act < 0.2:
            mode = rng.choice([GrantMode.RUN, GrantMode.RUN, GrantMode.FREEZE, GrantMode.DRAIN])
            rig.allow(mode=mode)
        elif act < 0.25:
            rig.allow(token_budget=rng.choice([1, 16, 512]), max_sequences=rng.choice([1, 4, 16]))
        elif act < 0.4:
            least = rng.choice([1, total // 2, total // 2, total])
            rig.allow(kv_granule_cap=rng.randint(least, total))
        else:
            rig.allow()
            steps_out = [out for out in rig.in_flight if out.total_num_scheduled_tokens]
            rig.turn()
            scheduled = rig.in_flight[-1] if rig.in_flight else None
            if scheduled is not None and scheduled.total_num_scheduled_tokens and not steps_out:
                assert rig.held_resident == 0, "a step began while memory was owed"
    rig.allow(mode=GrantMode.RUN, token_budget=512, max_sequences=16, kv_granule_cap=0)
    rig.run_until_idle()
    assert set(rig.ends) == set(prompts)
    for name, (prompt, count) in prompts.items():
        output = rig.outputs[name]
        assert output == undisturbed(prompt, count)[: len(output)]
        assert len(output) == count or rig.ends[name] == "abort"
    assert sum(end == "length" for end in rig.ends.values()) > len(prompts) / 3


# Two steps in flight, as on a GPU: nothing is taken from under the one that is still running. On
# CPU vLLM never has two, so its own scheduler is driven here in the order of its engine core's
# loop: at schedule() at most one step is in flight, after it two.


@pytest.fixture
def rig(guest_of: Rigs) -> GuestRig:
    return guest_of(depth=2)


@pytest.fixture
def prompts() -> dict[str, list[int]]:
    return {name: prompt_of(seed, 60) for seed, name in enumerate(("one", "two", "three"))}


def begin(rig: GuestRig, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        rig.add(name, prompt, TOKENS)
    rig.turns(6)
    assert [output.total_num_scheduled_tokens > 0 for output in rig.in_flight] == [True]


def finish(rig: GuestRig, prompts: dict[str, list[int]]) -> None:
    rig.allow(mode=GrantMode.RUN, kv_granule_cap=0, max_sequences=16)
    rig.run_until_idle()
    for name, prompt in prompts.items():
        assert rig.outputs[name] == undisturbed(prompt, TOKENS), name


@pytest.mark.parametrize("mode", [GrantMode.FREEZE, GrantMode.DRAIN])
def test_a_guest_that_yields_is_in_a_step_until_the_last_one_has_ended(
    rig: GuestRig, prompts: dict[str, list[int]], mode: GrantMode
) -> None:
    begin(rig, prompts)
    assert rig.schedule() > 0
    assert len(rig.in_flight) == 2
    before = rig.published
    assert before.in_step
    rig.allow(mode=mode)
    rig.land()
    assert rig.published.in_step, "the second step still runs"
    assert rig.schedule() == 0, "the gate yields"
    assert (rig.published.in_step, rig.published.step_seq) == (True, before.step_seq)
    rig.land()
    assert not rig.published.in_step
    rig.land()
    assert not rig.published.in_step, "an empty step is none"
    assert rig.published.tokens_total == sum(len(tokens) for tokens in rig.outputs.values())
    finish(rig, prompts)


def test_an_expired_grant_begins_no_step_beside_the_one_in_flight(
    rig: GuestRig, prompts: dict[str, list[int]]
) -> None:
    begin(rig, prompts)
    rig.page.grant.write(Grant(GrantMode.RUN, token_budget=512, max_sequences=16))
    rig.in_flight.append(rig.scheduler.schedule())
    assert rig.in_flight[-1].total_num_scheduled_tokens == 0
    assert rig.published.in_step
    rig.land()
    assert not rig.published.in_step
    finish(rig, prompts)


def test_a_rollout_preempted_in_flight_keeps_its_token_and_its_pages_until_the_step_is_over(
    rig: GuestRig, prompts: dict[str, list[int]]
) -> None:
    begin(rig, prompts)
    whole, tokens = rig.resident, sum(len(tokens) for tokens in rig.outputs.values())
    # Room for one of the three, so two go while a step with all three runs.
    rig.allow(kv_granule_cap=1 + 96 // BLOCK_TOKENS)
    assert rig.schedule() == 0, "no step begins while one still uses what has to go"
    gone = [r for r in rig.scheduler.requests.values() if r.status == RequestStatus.PREEMPTED]
    assert len(gone) == 2
    assert rig.resident == whole
    assert rig.published.bytes_mapped == rig.kv_bytes, "nothing is claimed yet"
    rig.land()
    assert sum(len(tokens) for tokens in rig.outputs.values()) == tokens + 3
    rig.land()
    assert rig.schedule() > 0
    assert rig.resident < whole
    assert rig.held_resident == 0
    assert rig.kv_bytes - rig.published.bytes_mapped == whole - rig.resident
    finish(rig, prompts)
    assert set(rig.ends.values()) == {"length"}


def test_a_rollout_handed_back_in_flight_ends_once_and_its_pages_outlast_the_step(
    rig: GuestRig, prompts: dict[str, list[int]]
) -> None:
    large = prompt_of(12, 200)
    begin(rig, {"large": large})
    whole = rig.resident
    rig.allow(kv_granule_cap=1 + 96 // BLOCK_TOKENS)
    while "large" not in rig.ends:
        assert len(rig.in_flight) <= 2
        running = [output.total_num_scheduled_tokens for output in rig.in_flight]
        rig.schedule()
        if any(running):
            assert rig.resident == whole, "a step that may touch them is in flight"
        rig.land()
    assert rig.ends == {"large": "abort"}
    assert 0 < len(rig.outputs["large"]) < TOKENS
    assert rig.outputs["large"] == undisturbed(large, len(rig.outputs["large"]))
    for name, prompt in prompts.items():
        rig.add(name, prompt, TOKENS)
    finish(rig, prompts)
    assert rig.ends["large"] == "abort"


def end_by_stop(rig: GuestRig, prompt: list[int]) -> None:
    """At its stop token, which is seen when the step after it is in flight already."""
    expected = undisturbed(prompt, 8)
    rig.add("ends", prompt, TOKENS, stop_token_ids=[expected[-1]])
    while "ends" not in rig.ends:
        rig.allow()
        rig.turn()
    assert rig.outputs["ends"] == expected[: expected.index(expected[-1]) + 1]


def end_by_abort(rig: GuestRig, prompt: list[int]) -> None:
    """By its client, between two turns of the loop."""
    begin(rig, {"ends": prompt})
    rig.scheduler.finish_requests(["ends"], RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize("end", [end_by_stop, end_by_abort])
def test_memory_of_a_request_that_ended_in_flight_stays_until_its_last_step_has(
    rig: GuestRig, prompts: dict[str, list[int]], end: Any
) -> None:
    end(rig, prompt_of(13, 90))
    assert [out.total_num_scheduled_tokens > 0 for out in rig.in_flight] == [True]
    assert rig.blocks.get_num_free_blocks() == 64, "vLLM has freed it"
    whole = rig.resident
    rig.allow(kv_granule_cap=1)
    assert rig.scheduler.has_requests()
    assert rig.schedule() == 0
    assert rig.resident == whole
    assert rig.published.bytes_mapped == rig.kv_bytes
    rig.land()
    rig.land()
    rig.allow()
    assert rig.scheduler.has_requests(), "memory is owed still"
    rig.schedule()
    rig.land()
    assert rig.published.granules_mapped == 1
    assert rig.kv_bytes - rig.published.bytes_mapped == whole - rig.resident > 0.9 * whole
    rig.allow(kv_granule_cap=0)
    for name, prompt in prompts.items():
        rig.add(name, prompt, TOKENS)
    finish(rig, prompts)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grant_of_fewer_sequences_admits_nobody_and_stops_nobody(
    guest_of: Rigs, depth: int
) -> None:
    rig = guest_of(depth=depth)
    prompts = {f"r{n}": prompt_of(n, 30) for n in range(6)}
    first, later = ("r0", "r1", "r2"), ("r3", "r4", "r5")
    for name in first:
        rig.add(name, prompts[name], TOKENS)
    rig.turns(3)
    assert rig.published.running == 3
    rig.allow(max_sequences=2)
    for name in later:
        rig.add(name, prompts[name], TOKENS)
    while "r0" not in rig.ends:
        counts = [len(rig.outputs[name]) for name in first]
        assert max(counts) - min(counts) <= 1, "those that run run on, all of them"
        assert not any(rig.outputs[name] for name in later)
        rig.turns(1)
    for _ in range(10):
        rig.turns(1)
        assert rig.published.running <= 2
    assert rig.published.running == 2
    finish(rig, prompts)


@pytest.mark.parametrize(("depth", "ahead"), [(1, 0), (2, 1)])
def test_a_token_is_scheduled_before_the_last_is_known_only_where_vllm_is_asynchronous(
    depth: int, ahead: int, tmp_path: Path, guest_of: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host").mkdir()
    host = host_rig(tmp_path / "host", monkeypatch, level="observe", depth=depth)
    for rig in (guest_of(depth=depth), host):
        rig.add("one", prompt_of(5, 40), TOKENS)
        assert [rig.schedule(), rig.schedule()] == [40, ahead]


def test_a_diffusion_host_is_vllms_own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.vllm.host.scheduler import ObservedScheduler

    module = pytest.importorskip("vllm.v1.core.sched.diffusion_scheduler")
    kind = type("Stock", (), {"__init__": lambda self, config, **more: None})
    monkeypatch.setattr(module, "DiffusionScheduler", kind, raising=False)
    config = SimpleNamespace(
        diffusion_config=object(), scheduler_config=SimpleNamespace(async_scheduling=False)
    )
    made: object = ObservedScheduler(vllm_config=config, kv_cache_config=None)
    assert type(made) is kind
