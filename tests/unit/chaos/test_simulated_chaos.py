"""Deterministic chaos: worlds hold, a seed replays exactly, and planted bugs are found.

`make chaos-sim` runs many more seeds, new ones each time, and what is marked `chaos` here.
"""

import pytest

from tests.chaos.planted_bugs import CALM, FIRST_SEED, MOST_SEEDS
from tests.chaos.world import live, shrink

LEAST_EVENTS = 2_000
NEAR = 40


@pytest.mark.parametrize("seed", [0, 290])
def test_a_world_of_faults_breaks_no_invariant(seed: int) -> None:
    outcome = live(seed)
    assert outcome.broken == ""
    assert outcome.events >= LEAST_EVENTS


def test_a_seed_has_one_history() -> None:
    assert live(3) == live(3)


@pytest.mark.chaos
@pytest.mark.parametrize(("bug", "seed"), FIRST_SEED.items())
def test_a_planted_bug_is_found(bug: str, seed: int) -> None:
    # Any change of a core moves the seed a little.
    faults = () if bug in CALM else None
    assert any(live(at, faults, (bug,)).broken for at in range(seed, seed + NEAR))


@pytest.mark.nightly
@pytest.mark.parametrize("bug", FIRST_SEED)
def test_a_planted_bug_is_found_within_five_hundred_seeds(bug: str) -> None:
    faults = () if bug in CALM else None
    found = next(at for at in range(MOST_SEEDS) if live(at, faults, (bug,)).broken)
    assert not live(found, faults).broken


@pytest.mark.chaos
def test_a_failure_is_shrunk_to_the_faults_that_it_needs() -> None:
    bug = "grants before the epoch is durable"
    failed = live(FIRST_SEED[bug], bugs=(bug,))
    shrunk = shrink(failed, (bug,))
    assert shrunk.broken
    assert len(shrunk.faults) < len(failed.faults)
