"""Latency targets of one model, and the presets that people quote."""

import math
from dataclasses import dataclass


class UnknownPresetError(ValueError):
    """No preset has that name."""


@dataclass(frozen=True, slots=True)
class SloSpec:
    """Targets that `percentile` of the requests to `model` must meet.

    `ttft_s`: time to first token; `tpot_s`: mean time per output token after the first;
    `percentile` in (0, 1]. Raises ValueError for a target that is not a positive finite number.
    """

    model: str
    ttft_s: float
    tpot_s: float
    percentile: float = 0.99

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"{name} of {self.model!r} is {value}; give a positive time in seconds"
                )
        if not 0 < self.percentile <= 1:
            raise ValueError(
                f"percentile of {self.model!r} is {self.percentile}; give a fraction in (0, 1]"
            )

    @property
    def ttft_ns(self) -> int:
        """TTFT target in nanoseconds."""
        return round(self.ttft_s * 1e9)

    @property
    def tpot_ns(self) -> int:
        """TPOT target in nanoseconds."""
        return round(self.tpot_s * 1e9)


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


def preset(name: str) -> SloSpec:
    """The preset called `name`; raises UnknownPresetError with the names there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise UnknownPresetError(
            f"no SLO preset {name!r}; choose one of {', '.join(sorted(PRESETS))}"
        ) from None
