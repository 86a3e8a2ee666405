"""Targets and presets."""

import pytest

from slo import PRESETS, SloSpec, TargetError, UnknownPresetError, preset


def test_presets_carry_the_published_targets() -> None:
    assert {name: (s.ttft_s, s.tpot_s) for name, s in PRESETS.items()} == {
        "llama-2-70b-server": (2.0, 0.2),
        "llama-2-70b-interactive": (0.45, 0.04),
        "llama-3.1-8b-server": (2.0, 0.1),
        "llama-3.1-8b-interactive": (0.5, 0.03),
        "llama-3.1-405b-server": (6.0, 0.175),
        "llama-3.1-405b-interactive": (4.5, 0.08),
        "deepseek-r1-server": (2.0, 0.08),
        "deepseek-r1-interactive": (1.5, 0.015),
        "gpt-oss-120b-server": (3.0, 0.08),
        "gpt-oss-120b-interactive": (2.0, 0.02),
        "rose-7b": (0.5, 0.15),
        "rose-32b": (1.0, 0.45),
    }
    assert preset("rose-7b").ttft_ns == 500_000_000
    assert preset("rose-32b").tpot_ns == 450_000_000


def test_a_preset_can_be_taken_for_another_model() -> None:
    spec = preset("rose-7b", model="qwen2.5-7b")
    assert (spec.model, spec.ttft_s, spec.percentile) == ("qwen2.5-7b", 0.5, 0.99)


@pytest.mark.parametrize(
    ("name", "named"),
    [("rose-8b", "rose-7b"), ("Llama-3.1-8B", "llama-3.1-8b-server"), ("xyzzy", "rose-32b")],
)
def test_an_unknown_preset_names_the_nearest_ones(name: str, named: str) -> None:
    with pytest.raises(UnknownPresetError) as caught:
        preset(name)
    message = str(caught.value)
    assert message.startswith(f"no SLO preset {name!r}; choose one of ")
    assert named in message
    assert "\n" not in message


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["ttft_s", "tpot_s", "itl_s", "e2e_s"])
def test_targets_must_be_positive_times(target: str, bad: float) -> None:
    with pytest.raises(TargetError, match=f"^{target} of 'm' is .*; give a positive time"):
        SloSpec("m", **({"ttft_s": 0.1, "tpot_s": 0.1} | {target: bad}))


@pytest.mark.parametrize("bad", [0.0, 1.5, float("nan")])
def test_percentile_must_be_a_fraction(bad: float) -> None:
    with pytest.raises(TargetError, match=r"\(0, 1\]"):
        SloSpec("m", 0.1, 0.1, bad)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"e2e_s": 1.5}, "e2e_s of 'm' is 1.5, below ttft_s of 2.0"),
        ({"itl_s": 0.05}, "itl_s of 'm' is 0.05, below tpot_s of 0.1"),
    ],
)
def test_targets_that_contradict_each_other_are_refused(
    targets: dict[str, float], message: str
) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        SloSpec("m", 2.0, 0.1, **targets)
    assert "\n" not in str(caught.value)
