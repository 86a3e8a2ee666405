"""Targets that people quote, by name."""

from dataclasses import replace
from difflib import get_close_matches

from slo.errors import UnknownPresetError
from slo.spec import SloSpec

# MLPerf Inference (server, interactive), all at p99, and the two models of the ROSE paper.
PRESETS: dict[str, SloSpec] = {
    spec.model: spec
    for spec in (
        SloSpec("llama-2-70b-server", 2.0, 0.200),
        SloSpec("llama-2-70b-interactive", 0.450, 0.040),
        SloSpec("llama-3.1-8b-server", 2.0, 0.100),
        SloSpec("llama-3.1-8b-interactive", 0.500, 0.030),
        SloSpec("llama-3.1-405b-server", 6.0, 0.175),
        SloSpec("llama-3.1-405b-interactive", 4.5, 0.080),
        SloSpec("deepseek-r1-server", 2.0, 0.080),
        SloSpec("deepseek-r1-interactive", 1.5, 0.015),
        SloSpec("gpt-oss-120b-server", 3.0, 0.080),
        SloSpec("gpt-oss-120b-interactive", 2.0, 0.020),
        SloSpec("rose-7b", 0.500, 0.150),
        SloSpec("rose-32b", 1.0, 0.450),
    )
}


def preset(name: str, model: str | None = None) -> SloSpec:
    """The targets called `name`, for `model` where one is given.

    Raises UnknownPresetError with the nearest names, or with all when none is near.
    """
    try:
        spec = PRESETS[name]
    except KeyError:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5) or sorted(PRESETS)
        raise UnknownPresetError(
            f"no SLO preset {name!r}; choose one of {', '.join(near)}"
        ) from None
    return spec if model is None else replace(spec, model=model)
