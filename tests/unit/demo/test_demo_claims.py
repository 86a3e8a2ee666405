from pathlib import Path
from typing import Any

import pytest

from bench.demo.cli import CONTROLS
from bench.demo.report.claims import (
    BROKEN_BY_CONTROL,
    DemoClaim,
    claims_of,
    exact,
    exit_code,
    measured,
)
from bench.demo.report.records import read_records
from rose.compare.bootstrap import Estimate
from tests.fakes.bench.demo_run import StandInRun

TTFT_P95 = "host does not notice: TTFT p95"
TTFT_P50 = "host does not notice: TTFT p50"
REWARD = "learns: sampled reward"
HELD_OUT = "learns: held-out success"


def judge(folder: Path, **knobs: Any) -> dict[str, DemoClaim]:
    """Claims by name of a synthetic run with these knobs."""
    return claims_in(StandInRun(**knobs).write(folder))


def claims_in(folder: Path) -> dict[str, DemoClaim]:
    return {claim.name: claim for claim in claims_of(read_records(folder), 0)}


def test_every_claim_holds_in_a_run_in_which_everything_went_well(tmp_path: Path) -> None:
    claims = judge(tmp_path)
    assert {name: c.verdict for name, c in claims.items() if c.verdict != "HOLDS"} == {}
    assert len(claims) == 19
    assert exit_code(list(claims.values()), None) == 0


@pytest.mark.parametrize(
    ("knobs", "broken"),
    [
        ({"last_reward": 0.45}, REWARD),
        ({"final": 0.57}, HELD_OUT),
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
        ({"leased_speedup": 0.9}, "harvest: gain"),
        ({"idle_efficiency": 0.5}, "harvest: idle efficiency"),
        ({"busy": 0.6}, "harvest: host busy"),
        ({"ttft_ratio": 1.3}, TTFT_P50),
        ({"tpot_ratio": 1.3}, "host does not notice: TPOT p50"),
        ({"tpot_ratio": 1.3}, "host does not notice: TPOT p95"),
        ({"leased_failures": 0.2}, TTFT_P95),
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


@pytest.mark.parametrize(
    ("knobs", "verdicts"),
    [
        ({"slow_tail": 4.0}, {TTFT_P95: "FAILS", TTFT_P50: "HOLDS"}),
        ({"rate_per_s": 1.5}, {TTFT_P95: "INCONCLUSIVE", TTFT_P50: "HOLDS"}),
        (
            {"last_reward": 0.54, "final": 0.63},
            {REWARD: "INCONCLUSIVE", HELD_OUT: "INCONCLUSIVE"},
        ),
    ],
    ids=["slow tail", "too few requests for a tail", "interval contains the limit"],
)
def test_claims_of_one_run_have_their_own_verdicts(
    tmp_path: Path, knobs: dict[str, Any], verdicts: dict[str, str]
) -> None:
    claims = judge(tmp_path, **knobs)
    assert {name: claims[name].verdict for name in verdicts} == verdicts


@pytest.mark.parametrize(
    ("value", "ci95", "verdict"),
    [
        (1.05, (1.00, 1.09), "HOLDS"),
        (1.05, (0.90, 1.30), "HOLDS"),
        (1.12, (1.00, 1.30), "INCONCLUSIVE"),
        (1.12, (1.10, 1.30), "INCONCLUSIVE"),
        (1.30, (1.11, 1.50), "FAILS"),
        (1.30, None, "INCONCLUSIVE"),
    ],
)
def test_a_measured_claim_fails_only_when_its_whole_interval_misses(
    value: float, ci95: tuple[float, float] | None, verdict: str
) -> None:
    claim = measured("ratio", Estimate(value, ci95), "at most", 1.10, "why", "missing")
    assert claim.verdict == verdict
    assert not claim.exact
    # The same claim upside down.
    mirrored = None if ci95 is None else (-ci95[1], -ci95[0])
    least = measured("rise", Estimate(-value, mirrored), "at least", -1.10, "why", "missing")
    assert least.verdict == verdict


@pytest.mark.parametrize(
    ("ci95", "verdict"),
    [((1.01, 1.5), "HOLDS"), ((0.99, 1.5), "INCONCLUSIVE"), ((0.7, 0.9), "FAILS")],
)
def test_a_gain_that_may_be_none_does_not_hold(ci95: tuple[float, float], verdict: str) -> None:
    found = Estimate(sum(ci95) / 2, ci95)
    claim = measured("gain", found, "above", 1.0, "why", "missing", throughout=True)
    assert claim.verdict == verdict


def test_nothing_measured_decides_nothing() -> None:
    claim = measured("rise", None, "at least", 0.1, "why", "no data")
    assert (claim.verdict, claim.why) == ("INCONCLUSIVE", "no data")


@pytest.mark.parametrize(("value", "verdict"), [(0, "HOLDS"), (1, "FAILS"), (None, "INCONCLUSIVE")])
def test_an_exact_claim_needs_no_interval(value: int | None, verdict: str) -> None:
    claim = exact("lost", value, "at most", 0, "why")
    assert claim.verdict == verdict
    assert claim.exact


def test_evaluations_of_other_numbers_of_maps_decide_nothing(tmp_path: Path) -> None:
    folder = StandInRun().write(tmp_path)
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"crossed":"1', '"crossed":"', 1))
    claims = claims_in(folder)
    assert claims[HELD_OUT].verdict == "INCONCLUSIVE"


def test_the_quickstart_claims_only_what_is_exact(tmp_path: Path) -> None:
    claims = judge(tmp_path, quickstart=True, forced_revocations=1)
    assert "trajectories: spanning two versions" not in claims
    assert all(claim.exact for claim in claims.values())
    assert {claim.verdict for claim in claims.values()} == {"HOLDS"}
    assert (
        judge(tmp_path, quickstart=True, lost=1)["trajectories: lost or delivered twice"].verdict
        == "FAILS"
    )


def test_a_trajectory_known_only_by_its_turns_is_lost(tmp_path: Path) -> None:
    folder = StandInRun().write(tmp_path)
    path = folder / "trajectories.jsonl"
    path.write_text(path.read_text().split("\n", 1)[1])
    claims = claims_in(folder)
    assert claims["trajectories: lost or delivered twice"].value == 1


def test_one_moved_turn_vouches_for_one_revocation(tmp_path: Path) -> None:
    folder = StandInRun(forced_revocations=1).write(tmp_path)
    path = folder / "events.jsonl"
    storm = [line for line in path.read_text().splitlines() if "forced" in line]
    with path.open("a") as file:
        file.write((storm[0] + "\n") * 11)
    claims = claims_in(folder)
    assert claims["faults: forced revocations mid-turn"].value == 1


@pytest.mark.parametrize(
    ("control", "knobs"),
    [
        ("lr0", {"final": 0.55}),
        ("shuffled-advantage", {"last_reward": 0.40}),
        ("corrupt-chunk", {"digest_failures": 1}),
        ("wrong-chunk", {"probe_failures": 1}),
        ("stale-guest", {"gap": {"guest": 0.05, "dedicated": 0.003, "continued": 0.004}}),
        ("drop-token", {"gap": {"guest": 0.003, "dedicated": 0.003, "continued": 0.05}}),
        ("naive", {"tpot_ratio": 1.5}),
    ],
)
def test_a_control_succeeds_when_the_claim_it_breaks_fails(
    tmp_path: Path, control: str, knobs: dict[str, Any]
) -> None:
    assert exit_code(list(judge(tmp_path, control=control).values()), control) == 1
    noticed = judge(tmp_path, control=control, **knobs)
    assert exit_code(list(noticed.values()), control) == 0
    assert set(noticed) <= set(BROKEN_BY_CONTROL[control])


def test_every_control_has_a_claim_that_must_notice() -> None:
    assert set(BROKEN_BY_CONTROL) == set(CONTROLS)
