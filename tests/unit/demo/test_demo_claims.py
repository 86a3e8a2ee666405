from pathlib import Path
from typing import Any

import pytest
from standin_run import StandInRun

from rose.demo.claims import BROKEN_BY_CONTROL, Claim, claims_of, exit_code
from rose.demo.reading import read_records
from rose.demo.settings import CONTROLS


def judge(folder: Path, **knobs: Any) -> dict[str, Claim]:
    """Claims by name of a synthetic run with these knobs."""
    records = read_records(StandInRun(**{"steps": 40, **knobs}).write(folder))
    return {claim.name: claim for claim in claims_of(records, 0)}


def test_every_claim_holds_in_a_run_in_which_everything_went_well(tmp_path: Path) -> None:
    claims = judge(tmp_path)
    assert {name: c.verdict for name, c in claims.items() if c.verdict != "HOLDS"} == {}
    assert len(claims) == 19
    assert exit_code(list(claims.values()), None) == 0


@pytest.mark.parametrize(
    ("knobs", "broken"),
    [
        ({"last_reward": 0.45}, "learns: sampled reward"),
        ({"last_reward": 0.25}, "learns: sampled reward"),
        ({"final": 0.78}, "learns: held-out success"),
        (
            {"gap": {"guest": 0.02, "dedicated": 0.003, "continued": 0.004}},
            "borrowed tokens: logprob gap of guest",
        ),
        (
            {"gap": {"guest": 0.003, "dedicated": 0.02, "continued": 0.004}},
            "borrowed tokens: logprob gap of dedicated",
        ),
        (
            {"gap": {"guest": 0.003, "dedicated": 0.003, "continued": 0.02}},
            "borrowed tokens: logprob gap of continued",
        ),
        ({"leased_speedup": 1.1}, "harvest: gain"),
        ({"leased_speedup": 0.99}, "harvest: gain is real"),
        ({"busy": 0.6}, "harvest: host busy"),
        ({"ttft_ratio": 1.3}, "host does not notice: TTFT p50"),
        ({"slow_tail": 4.0}, "host does not notice: TTFT p95"),
        ({"tpot_ratio": 1.3}, "host does not notice: TPOT p50"),
        ({"tpot_ratio": 1.3}, "host does not notice: TPOT p95"),
        ({"leased_failures": 0.2}, "host does not notice: TTFT p95"),
        ({"lost": 1}, "trajectories: lost or delivered twice"),
        ({"duplicated": 1}, "trajectories: lost or delivered twice"),
        ({"unstamped": 1}, "tokens: without version or logprob"),
        ({"spanning": 0.02}, "trajectories: spanning two versions"),
        ({"staleness": 2}, "trajectories: staleness"),
        ({"digest_failures": 1}, "weights: digest and probe failures"),
        ({"probe_failures": 1}, "weights: digest and probe failures"),
        ({"forced_revocations": 9}, "faults: forced revocations mid-turn"),
        ({"mid_turn": False}, "faults: forced revocations mid-turn"),
        ({"kill_signal": None}, "faults: guest killed with SIGKILL"),
        ({"kill_signal": 15}, "faults: guest killed with SIGKILL"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_claim_fails_when_what_it_says_did_not_happen(
    tmp_path: Path, knobs: dict[str, Any], broken: str
) -> None:
    claims = judge(tmp_path, **knobs)
    assert claims[broken].verdict == "FAILS"
    assert exit_code(list(claims.values()), None) == 1


def test_a_slow_tail_breaks_the_tail_and_not_the_median(tmp_path: Path) -> None:
    claims = judge(tmp_path, slow_tail=4.0)
    assert claims["host does not notice: TTFT p50"].verdict == "HOLDS"


def test_too_few_requests_decide_nothing_about_the_tail(tmp_path: Path) -> None:
    claims = judge(tmp_path, rate_per_s=2.0)
    assert claims["host does not notice: TTFT p95"].verdict == "INCONCLUSIVE"
    assert claims["host does not notice: TTFT p50"].verdict == "HOLDS"


def test_latency_at_the_limit_is_inconclusive(tmp_path: Path) -> None:
    claims = judge(tmp_path, ttft_ratio=1.10)
    assert claims["host does not notice: TTFT p50"].verdict == "INCONCLUSIVE"


def test_a_short_run_that_hardly_learned_is_inconclusive_but_no_learning_at_all_fails(
    tmp_path: Path,
) -> None:
    short = {"steps": 12, "quick": True}
    name = "learns: sampled reward"
    assert judge(tmp_path, **short, last_reward=0.53)[name].verdict == "INCONCLUSIVE"
    assert judge(tmp_path, **short, last_reward=0.30)[name].verdict == "FAILS"


def test_two_pairs_of_blocks_decide_nothing_about_the_harvest(tmp_path: Path) -> None:
    claims = judge(tmp_path, steps=10, quick=True, leased_speedup=0.9)
    assert claims["harvest: gain"].verdict == "INCONCLUSIVE"
    assert claims["harvest: gain is real"].verdict == "INCONCLUSIVE"


def test_a_trajectory_known_only_by_its_turns_is_lost(tmp_path: Path) -> None:
    folder = StandInRun().write(tmp_path)
    path = folder / "trajectories.jsonl"
    path.write_text(path.read_text().split("\n", 1)[1])
    claims = {claim.name: claim for claim in claims_of(read_records(folder), 0)}
    assert claims["trajectories: lost or delivered twice"].value == 1


def test_one_moved_turn_vouches_for_one_revocation(tmp_path: Path) -> None:
    folder = StandInRun(forced_revocations=1).write(tmp_path)
    path = folder / "events.jsonl"
    storm = [line for line in path.read_text().splitlines() if "forced" in line]
    with path.open("a") as file:
        file.write((storm[0] + "\n") * 11)
    claims = {claim.name: claim for claim in claims_of(read_records(folder), 0)}
    assert claims["faults: forced revocations mid-turn"].value == 1


def test_a_control_succeeds_when_the_claim_it_breaks_fails(tmp_path: Path) -> None:
    assert set(BROKEN_BY_CONTROL) == set(CONTROLS)
    for control in CONTROLS:
        good = list(judge(tmp_path).values())
        assert exit_code(good, control) == 1
    flat = list(judge(tmp_path, last_reward=0.45).values())
    assert exit_code(flat, "lr0") == 0
    stale = {"guest": 0.05, "dedicated": 0.003, "continued": 0.004}
    assert exit_code(list(judge(tmp_path, gap=stale).values()), "stale-guest") == 0
