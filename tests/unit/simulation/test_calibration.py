"""Step times come from a measured profile or from published tables, and from nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from rose.errors import ConfigError, RoseError
from rose.simulation.engine_specs import (
    StepWork,
    published_engine,
    published_engines,
    read_profile,
)
from slo import StepProfile


def test_a_profile_of_rose_profile_gives_the_times_of_its_steps(tmp_path: Path) -> None:
    profile = StepProfile(0.005, 2e-5, 1e-5, 3e-8, samples=40, fit_error=0.03)
    path = tmp_path / "step_profile.json"
    path.write_text(profile.to_json())
    assert read_profile(path) == profile
    engine = replace(published_engine("8b"), profile=profile)
    assert engine.seconds(StepWork(100, 4, 1, 1_000)) == pytest.approx(
        0.005 + 104 * 2e-5 + 5e-5 + 3e-5
    )


@pytest.mark.parametrize("text", ["", "[]", '{"kind":"rose.step_profile","layout":1}', "NaN"])
def test_any_other_file_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(RoseError, match="profile") as caught:
        read_profile(path)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(RoseError, match="cannot be read"):
        read_profile(tmp_path / "none.json")


def test_published_engines_are_plausible_and_fit_their_tables() -> None:
    for engine in published_engines():
        # A decode step reads the weights once: no card does that faster than its memory.
        least_s = engine.weight_bytes / engine.cards / 4.8e12
        assert engine.seconds(StepWork(0, 1)) > least_s
        assert engine.profile.fit_error < 0.12
        assert engine.kv_tokens > 100_000
    assert len({(e.model, e.card, e.engine) for e in published_engines()}) == 12


def test_a_model_is_named_in_short_and_gets_the_fewest_cards() -> None:
    engine = published_engine("70b")
    assert (engine.model, engine.card, engine.cards) == ("llama-3.1-70b", "h200", 4)
    slower = published_engine("llama-3.1-70b", "h100", "sglang")
    assert slower.profile.base_s > engine.profile.base_s
    assert published_engine("8B", cards=2).cards == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": "9b"}, "model 9b: .* llama-3.1-70b, qwen3-32b, qwen3-8b"),
        ({"model": "70b", "card": "b200"}, "card b200: .* h100, h200"),
        ({"model": "70b", "engine": "tgi"}, "engine tgi: .* sglang, vllm"),
        ({"model": "70b", "cards": 3}, "cards 3: .* 4, 8"),
    ],
)
def test_what_no_table_has_is_refused_with_what_there_is(
    asked: dict[str, str | int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        published_engine(**asked)  # type: ignore[arg-type] # of the names above
