"""Targets and presets."""

import pytest

from slo import PRESETS, SloSpec, UnknownPresetError, preset


def test_presets_carry_the_published_targets() -> None:
    assert (preset("rose-7b").ttft_s, preset("rose-7b").tpot_s) == (0.5, 0.15)
    assert (preset("llama-2-70b-interactive").ttft_ns, preset("rose-32b").tpot_ns) == (
        450_000_000,
        450_000_000,
    )
    assert len(PRESETS) == 12


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(
        UnknownPresetError, match=r"no SLO preset 'rose-8b'; choose one of .*rose-7b"
    ):
        preset("rose-8b")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_targets_must_be_positive_times(bad: float) -> None:
    with pytest.raises(ValueError, match="give a positive time"):
        SloSpec("m", bad, 0.1)
    with pytest.raises(ValueError, match="tpot_s"):
        SloSpec("m", 0.1, bad)


@pytest.mark.parametrize("bad", [0.0, 1.5])
def test_percentile_must_be_a_fraction(bad: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        SloSpec("m", 0.1, 0.1, bad)
