"""The guest's scheduler, vLLM's own underneath, with the balloon between its steps."""

import random
from pathlib import Path

import pytest
from kv_cases import BLOCK_TOKENS, NARROW, WIDE, GuestRig, guest_rig, undisturbed

from executor import GrantMode, GuestState
from executor.kv.backing import resident_bytes

MIB = 1 << 20


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(96) for _ in range(tokens)]


def published(rig: GuestRig) -> GuestState:
    state = rig.page.guest.read()
    assert state is not None
    return state


def held_resident(rig: GuestRig) -> int:
    """Bytes in memory under blocks that are held, where nothing may be."""
    pool = rig.scheduler._kv._pool
    return sum(
        resident_bytes(piece.whole_pages())
        for granule in pool.held
        for extent in pool.pages.extents
        for piece in extent.ranges(pool.granules.blocks_of(granule))
    )


@pytest.mark.parametrize("spec", [WIDE, NARROW], ids=["wide blocks", "narrow blocks"])
def test_a_fallen_cap_returns_the_memory_it_claims_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: object
) -> None:
    rig = guest_rig(tmp_path, monkeypatch, blocks=129, spec=spec)
    rng = random.Random(0)
    prompts = {f"r{n}": prompt_of(rng, 20 + 30 * n) for n in range(6)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 60)
    for _ in range(20):
        rig.turn()
    before, whole = published(rig), rig.resident
    assert before.bytes_mapped == rig.kv_bytes
    assert before.granules_mapped == before.granules_total > 4
    cap = before.granules_total // 4
    rig.allow(kv_granule_cap=cap)
    rig.scheduler.schedule()
    after = published(rig)
    assert after.granules_mapped == cap
    claimed = before.bytes_mapped - after.bytes_mapped
    assert claimed == whole - rig.resident
    assert claimed > 0.9 * rig.kv_bytes * (1 - cap / before.granules_total)
    assert held_resident(rig) == 0
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert 0 <= pool.get_usage() <= 1
    rig.allow(kv_granule_cap=0)
    rig.scheduler.schedule()
    assert published(rig).granules_mapped == before.granules_total
    assert published(rig).bytes_mapped == rig.kv_bytes


@pytest.mark.parametrize("mode", [GrantMode.FREEZE, GrantMode.DRAIN, GrantMode.THROTTLE])
def test_a_guest_that_may_not_run_gives_memory_back_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: GrantMode
) -> None:
    rig = guest_rig(tmp_path, monkeypatch)
    rig.add("frozen", list(range(40)), 10)
    rig.turn()
    rig.allow(mode=mode, token_budget=0, kv_granule_cap=8)
    rig.turn()
    assert published(rig).granules_mapped == 8
    rig.allow(mode=GrantMode.RUN, token_budget=512)
    rig.run_until_idle()
    assert rig.outputs["frozen"] == undisturbed(list(range(40)), 10)


def test_an_idle_guest_has_work_for_as_long_as_it_owes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = guest_rig(tmp_path, monkeypatch)
    rig.add("past", list(range(40)), 3)
    rig.run_until_idle()
    assert not rig.scheduler.has_requests()
    rig.allow(kv_granule_cap=5)
    assert rig.scheduler.has_requests()
    rig.turn()
    assert published(rig).granules_mapped == 5
    assert not rig.scheduler.has_requests()
    rig.allow(kv_granule_cap=0)
    assert not rig.scheduler.has_requests(), "growing can wait for the next request"


def test_silence_never_gives_memory_to_a_guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = guest_rig(tmp_path, monkeypatch)
    rig.allow(kv_granule_cap=5)
    rig.turn()
    rig.allow(kv_granule_cap=0)
    expired = rig.page.grant.read()
    assert expired is not None
    rig.page.grant.write(type(expired)())  # Zeroed memory: no cap, and long expired.
    rig.add("late", list(range(10)), 2)
    rig.turn()
    assert published(rig).granules_mapped == 5


def test_a_request_that_cannot_fit_is_handed_back_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = guest_rig(tmp_path, monkeypatch)  # A granule is one block of 16 tokens.
    rng = random.Random(1)
    large, small, late = prompt_of(rng, 200), prompt_of(rng, 30), prompt_of(rng, 150)
    rig.add("large", large, 40)
    rig.add("small", small, 40)
    for _ in range(10):
        rig.turn()
    rig.allow(kv_granule_cap=1 + 128 // BLOCK_TOKENS)
    rig.add("late", late, 4)
    rig.run_until_idle()
    assert rig.ends == {"large": "abort", "late": "abort", "small": "length"}
    assert rig.outputs["small"] == undisturbed(small, 40)
    partial = rig.outputs["large"]
    assert 0 < len(partial) < 40
    assert partial == undisturbed(large, len(partial)), "it can go on elsewhere from here"


def test_a_request_that_outgrows_the_cap_is_handed_back_with_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = guest_rig(tmp_path, monkeypatch)
    rig.allow(kv_granule_cap=1 + 64 // BLOCK_TOKENS)
    prompt = prompt_of(random.Random(2), 40)
    rig.add("grows", prompt, 100)
    rig.run_until_idle()
    assert rig.ends == {"grows": "abort"}
    assert len(rig.outputs["grows"]) >= 64 - 40
    assert rig.outputs["grows"] == undisturbed(prompt, len(rig.outputs["grows"]))


def test_the_prefix_cache_can_be_reset_while_granules_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = guest_rig(tmp_path, monkeypatch)
    prompt = prompt_of(random.Random(3), 50)
    rig.add("kept", prompt, 30)
    for _ in range(5):
        rig.turn()
    rig.allow(kv_granule_cap=20)
    rig.turn()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run_until_idle()
    assert rig.outputs["kept"] == undisturbed(prompt, 30)


@pytest.mark.parametrize("depth", [1, 2], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("seed", range(8))
def test_output_is_the_same_after_any_sequence_of_freeze_throttle_and_balloon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, depth: int
) -> None:
    rng = random.Random(seed)
    spec = rng.choice([WIDE, NARROW])
    rig = guest_rig(tmp_path, monkeypatch, blocks=97, spec=spec, depth=depth)
    total = published(rig).granules_total
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
                assert held_resident(rig) == 0, "a step began while memory was owed"
    rig.allow(mode=GrantMode.RUN, token_budget=512, max_sequences=16, kv_granule_cap=0)
    rig.run_until_idle()
    assert set(rig.ends) == set(prompts)
    for name, (prompt, count) in prompts.items():
        output = rig.outputs[name]
        assert output == undisturbed(prompt, count)[: len(output)]
        assert len(output) == count or rig.ends[name] == "abort"
    assert sum(end == "length" for end in rig.ends.values()) > len(prompts) / 3


def test_pages_of_a_step_in_flight_stay_until_it_is_processed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = guest_rig(tmp_path, monkeypatch, depth=2)
    rng = random.Random(4)
    prompts = {name: prompt_of(rng, 60) for name in ("one", "two", "three")}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 40)
    for _ in range(6):
        rig.turn()
    assert sum(out.total_num_scheduled_tokens > 0 for out in rig.in_flight) == 1
    whole = rig.resident
    rig.allow(kv_granule_cap=9)
    empty = rig.scheduler.schedule()
    rig.in_flight.append(empty)
    assert empty.total_num_scheduled_tokens == 0, "no step begins while one still uses the pages"
    assert published(rig).granules_mapped == 9
    assert rig.resident == whole
    assert published(rig).bytes_mapped == rig.kv_bytes, "nothing is claimed yet"
    rig.land()
    rig.land()
    rig.allow()
    rig.in_flight.append(rig.scheduler.schedule())
    assert rig.in_flight[-1].total_num_scheduled_tokens > 0
    assert rig.resident < whole
    assert held_resident(rig) == 0
    rig.run_until_idle()
    for name, prompt in prompts.items():
        assert rig.outputs[name] == undisturbed(prompt, len(rig.outputs[name]))
        assert rig.ends[name] == "length"
