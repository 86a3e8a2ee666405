"""The table over many seeds: what meets the bar, what misses it, and that runs are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.micro import demo_accept as bench

SEEDS = 10


def claim(name: str, verdict: str, *, exact: bool = False) -> dict[str, Any]:
    return {"name": name, "verdict": verdict, "exact": exact, "value": 1.0}


def keep(
    out: Path, seed: int, claims: list[dict[str, Any]], control: str = "", rc: int = 0
) -> None:
    """A run that ended before."""
    folder = out / f"{control or 'accept'}-{seed}"
    folder.mkdir(parents=True)
    ran = {"seed": seed, "control": control, "rc": rc, "elapsed_s": 250.0 + seed, "claims": claims}
    (folder / "ran.json").write_text(json.dumps(ran))


def seeds(out: Path, measured: dict[int, str], exact: dict[int, str]) -> None:
    """Ten runs of two claims, which hold where no other verdict is told."""
    for seed in range(101, 101 + SEEDS):
        keep(
            out,
            seed,
            [
                claim("lost", exact.get(seed, "HOLDS"), exact=True),
                claim("gain", measured.get(seed, "HOLDS")),
            ],
        )


def ended(out: Path, *more: str) -> int:
    """The exit code over the runs in `out`; none of them is run again."""
    return bench.main([f"--seeds={SEEDS}", "--controls=0", f"--out={out}", *more])


def test_runs_that_are_there_are_told_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds(tmp_path, {105: "INCONCLUSIVE"}, {})
    assert ended(tmp_path) == 0
    page = (tmp_path / "accept.md").read_text()
    assert "| gain | 9 | 1 | 0 |" in page
    assert "| lost (exact) | 10 | 0 | 0 |" in page
    assert "The bar is met." in page
    assert page in capsys.readouterr().out
    assert json.loads((tmp_path / "accept.json").read_text())["shortfalls"] == []


@pytest.mark.parametrize(
    ("measured", "exact", "why"),
    [
        ({105: "FAILS"}, {}, "gain: FAILS 1 times"),
        ({}, {105: "FAILS"}, "lost: FAILS 1 times"),
        ({}, {105: "INCONCLUSIVE"}, "lost: exact, and INCONCLUSIVE"),
        ({105: "INCONCLUSIVE", 106: "INCONCLUSIVE"}, {}, "measured claims: 80% HOLDS"),
    ],
)
def test_what_misses_the_bar_is_said_and_ends_with_one(
    tmp_path: Path, measured: dict[int, str], exact: dict[int, str], why: str
) -> None:
    seeds(tmp_path, measured, exact)
    assert ended(tmp_path) == 1
    assert why in (tmp_path / "accept.md").read_text()


@pytest.mark.parametrize(
    ("verdict", "rc", "code"), [("FAILS", 0, 0), ("INCONCLUSIVE", 1, 1), ("FAILS", 2, 1)]
)
def test_a_control_must_be_noticed_by_its_own_claim(
    tmp_path: Path, verdict: str, rc: int, code: int
) -> None:
    seeds(tmp_path, {}, {})
    must = claim("learns: held-out success", verdict)
    keep(tmp_path, 101, [must], "lr0", rc)
    assert ended(tmp_path, "--controls=1", "--only=lr0") == code
    missed = "lr0 seed 101: not noticed" in (tmp_path / "accept.md").read_text()
    assert missed == bool(code)


def test_a_claim_that_fails_beside_the_control_is_not_its_notice(tmp_path: Path) -> None:
    seeds(tmp_path, {}, {})
    keep(tmp_path, 101, [claim("gain", "FAILS")], "lr0")
    assert ended(tmp_path, "--controls=1", "--only=lr0") == 1
