"""Two steps in flight, as on a GPU: nothing is taken from under the one that is still running.

On CPU vLLM never has two, so its own scheduler is driven here in the order of its engine core's
loop: at schedule() at most one step is in flight, after it two.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kv_cases import BLOCK_TOKENS, GuestRig, guest_rig, host_rig, undisturbed
from vllm.v1.request import RequestStatus

from executor import GrantMode, GuestState

TOKENS = 40


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(96) for _ in range(tokens)]


def published(rig: GuestRig) -> GuestState:
    state = rig.page.guest.read()
    assert state is not None
    return state


def schedule(rig: GuestRig) -> int:
    """Schedule, and return how many tokens."""
    rig.allow()
    output = rig.scheduler.schedule()
    rig.in_flight.append(output)
    tokens: int = output.total_num_scheduled_tokens
    return tokens


def begin(rig: GuestRig, prompts: dict[str, list[int]], turns: int = 6) -> None:
    for name, prompt in prompts.items():
        rig.add(name, prompt, TOKENS)
    for _ in range(turns):
        rig.allow()
        rig.turn()
    assert [output.total_num_scheduled_tokens > 0 for output in rig.in_flight] == [True]


def finish(rig: GuestRig, prompts: dict[str, list[int]]) -> None:
    rig.allow(mode=GrantMode.RUN, kv_granule_cap=0, max_sequences=16)
    rig.run_until_idle()
    for name, prompt in prompts.items():
        assert rig.outputs[name] == undisturbed(prompt, TOKENS), name


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuestRig:
    return guest_rig(tmp_path, monkeypatch, depth=2)


@pytest.fixture
def prompts() -> dict[str, list[int]]:
    rng = random.Random(11)
    return {name: prompt_of(rng, 60) for name in ("one", "two", "three")}


@pytest.mark.parametrize("mode", [GrantMode.FREEZE, GrantMode.DRAIN])
def test_a_guest_that_yields_is_in_a_step_until_the_last_one_has_ended(
    rig: GuestRig, prompts: dict[str, list[int]], mode: GrantMode
) -> None:
    begin(rig, prompts)
    assert schedule(rig) > 0
    assert len(rig.in_flight) == 2
    before = published(rig)
    assert before.in_step
    rig.allow(mode=mode)
    rig.land()
    assert published(rig).in_step, "the second step still runs"
    assert schedule(rig) == 0, "the gate yields"
    assert published(rig).in_step
    assert published(rig).step_seq == before.step_seq
    rig.land()
    assert not published(rig).in_step
    rig.land()
    assert not published(rig).in_step, "an empty step is none"
    assert published(rig).tokens_total == sum(len(tokens) for tokens in rig.outputs.values())
    finish(rig, prompts)


def test_an_expired_grant_begins_no_step_beside_the_one_in_flight(
    rig: GuestRig, prompts: dict[str, list[int]]
) -> None:
    begin(rig, prompts)
    grant = rig.page.grant.read()
    assert grant is not None
    rig.page.grant.write(type(grant)(grant.mode, token_budget=512, max_sequences=16))
    output = rig.scheduler.schedule()
    rig.in_flight.append(output)
    assert output.total_num_scheduled_tokens == 0
    assert published(rig).in_step
    rig.land()
    assert not published(rig).in_step
    finish(rig, prompts)


def test_a_rollout_preempted_in_flight_keeps_the_token_that_was_on_its_way(
    rig: GuestRig, prompts: dict[str, list[int]]
) -> None:
    begin(rig, prompts)
    whole, tokens = rig.resident, sum(len(tokens) for tokens in rig.outputs.values())
    # Room for one of the three, so two go while a step with all three runs.
    rig.allow(kv_granule_cap=1 + 96 // BLOCK_TOKENS)
    assert schedule(rig) == 0, "no step begins while one still uses what has to go"
    gone = [r for r in rig.scheduler.requests.values() if r.status == RequestStatus.PREEMPTED]
    assert len(gone) == 2
    assert rig.resident == whole
    assert published(rig).bytes_mapped == rig.kv_bytes
    rig.land()
    assert sum(len(tokens) for tokens in rig.outputs.values()) == tokens + 3
    rig.land()
    assert schedule(rig) > 0
    assert rig.resident < whole
    assert rig.kv_bytes - published(rig).bytes_mapped == whole - rig.resident
    finish(rig, prompts)
    assert set(rig.ends.values()) == {"length"}


def test_a_rollout_handed_back_in_flight_ends_once_and_its_pages_outlast_the_step(
    rig: GuestRig, prompts: dict[str, list[int]]
) -> None:
    large = prompt_of(random.Random(12), 200)
    begin(rig, {"large": large})
    whole = rig.resident
    rig.allow(kv_granule_cap=1 + 96 // BLOCK_TOKENS)
    while "large" not in rig.ends:
        assert len(rig.in_flight) <= 2
        running = [output.total_num_scheduled_tokens for output in rig.in_flight]
        schedule(rig)
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
    end(rig, prompt_of(random.Random(13), 90))
    assert [out.total_num_scheduled_tokens > 0 for out in rig.in_flight] == [True]
    assert rig.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 64, (
        "vLLM has freed it"
    )
    whole = rig.resident
    rig.allow(kv_granule_cap=1)
    assert rig.scheduler.has_requests()
    assert schedule(rig) == 0
    assert rig.resident == whole
    assert published(rig).bytes_mapped == rig.kv_bytes
    rig.land()
    rig.land()
    rig.allow()
    assert rig.scheduler.has_requests(), "memory is owed still"
    schedule(rig)
    rig.land()
    assert published(rig).granules_mapped == 1
    assert rig.kv_bytes - published(rig).bytes_mapped == whole - rig.resident > 0.9 * whole
    rig.allow(kv_granule_cap=0)
    for name, prompt in prompts.items():
        rig.add(name, prompt, TOKENS)
    finish(rig, prompts)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grant_of_fewer_sequences_admits_nobody_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    rig = guest_rig(tmp_path, monkeypatch, depth=depth)
    rng = random.Random(14)
    prompts = {f"r{n}": prompt_of(rng, 30) for n in range(6)}
    for name in ("r0", "r1", "r2"):
        rig.add(name, prompts[name], TOKENS)
    for _ in range(3):
        rig.allow()
        rig.turn()
    assert published(rig).running == 3
    rig.allow(max_sequences=2)
    for name in ("r3", "r4", "r5"):
        rig.add(name, prompts[name], TOKENS)
    while "r0" not in rig.ends:
        counts = [len(tokens) for name, tokens in rig.outputs.items() if name in ("r0", "r1", "r2")]
        assert max(counts) - min(counts) <= 1, "those that run run on, all of them"
        assert not any(rig.outputs[name] for name in ("r3", "r4", "r5"))
        rig.allow()
        rig.turn()
    for _ in range(10):
        rig.allow()
        rig.turn()
        assert published(rig).running <= 2
    assert published(rig).running == 2
    finish(rig, prompts)


@pytest.mark.parametrize(("depth", "ahead"), [(1, 0), (2, 1)])
def test_a_token_is_scheduled_before_the_last_is_known_only_where_vllm_is_asynchronous(
    depth: int, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = guest_rig(tmp_path, monkeypatch, depth=depth)
    guest.add("one", prompt_of(random.Random(5), 40), TOKENS)
    assert [schedule(guest), schedule(guest)] == [40, ahead]
    (tmp_path / "host").mkdir()
    host = host_rig(tmp_path / "host", monkeypatch, level="observe", depth=depth)
    host.add("one", prompt_of(random.Random(5), 40), TOKENS)
    steps = [host.scheduler.schedule() for _ in range(2)]
    assert [step.total_num_scheduled_tokens for step in steps] == [40, ahead]


def test_a_diffusion_host_is_vllms_own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched import diffusion_scheduler

    from executor.vllm.host.scheduler import ObservedScheduler

    kind = type("Stock", (), {"__init__": lambda self, config, **more: None})
    monkeypatch.setattr(diffusion_scheduler, "DiffusionScheduler", kind)
    config = SimpleNamespace(
        diffusion_config=object(), scheduler_config=SimpleNamespace(async_scheduling=False)
    )
    made: object = ObservedScheduler(vllm_config=config, kv_cache_config=None)
    assert type(made) is kind
