"""How long a run measures, and what it loads its engines with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rose.errors import ConfigError

BUSY_TARGETS = (0.3, 0.6, 0.9)
# The first window of a weight apply, a guest kill and a guest start has this load.
EVENT_BUSY = 0.6


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """One run.

    block_s: host load of one block. requests_per_arm: host requests wanted in each arm.
    idle_block_s: a block of a guest alone. budget_s: what all blocks together may take; rounds are
    dropped, evenly, until they fit. lent_priority: how the kernel
    schedules a guest that may use slack; one that may not is always in the background.
    window_s: arrivals this close share batches and bursts, so the
    bootstrap takes them together. event_rounds: windows of each event.
    """

    out: Path
    seed: int = 0
    quick: bool = False
    trace: Path | None = None
    only_traffic: str | None = None
    port_base: int = 18_100
    busy_targets: tuple[float, ...] = BUSY_TARGETS
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    block_s: float = 20.0
    min_rounds: int = 3
    requests_per_arm: int = 1_050
    idle_block_s: float = 12.0
    calibration_s: float = 16.0
    calibration_tries: int = 5
    budget_s: float = 5_700.0
    window_s: float = 2.0
    event_rounds: int = 2
    event_s: float = 40.0
    lent_priority: Literal["background", "normal"] = "background"
    guest_streams: int = 16
    guest_prompt_tokens: int = 32
    guest_output_tokens: int = 64
    guest_token_budget: int = 64

    def __post_init__(self) -> None:
        if not self.busy_targets or not all(0 < busy < 1 for busy in self.busy_targets):
            raise ConfigError("busy targets are fractions between 0 and 1; give at least one")
        if (self.ttft_target_s is None) != (self.tpot_target_s is None):
            raise ConfigError("give both --ttft-target-s and --tpot-target-s, or neither")
        if min(self.ttft_target_s or 1.0, self.tpot_target_s or 1.0) <= 0:
            raise ConfigError("targets are positive times in seconds")
        if self.trace is not None and not self.trace.is_file():
            raise ConfigError(f"{self.trace} is no file; name a trace in the Azure format")

    @property
    def traffics(self) -> tuple[str, ...]:
        """Poisson arrivals, and bursts: generated, or of the trace."""
        both = ("poisson", "trace" if self.trace else "bursty")
        return tuple(kind for kind in both if self.only_traffic in (None, kind))

    @property
    def targets_given(self) -> bool:
        """Whether latency targets came with the command."""
        return self.ttft_target_s is not None


def quick_settings(out: Path, **changes: object) -> BenchSettings:
    """The same rows within a quarter of an hour."""
    quick: dict[str, object] = {
        "quick": True,
        "block_s": 9.0,
        "min_rounds": 1,
        "requests_per_arm": 1,
        "idle_block_s": 3.0,
        "calibration_s": 6.0,
        "calibration_tries": 3,
        "budget_s": 620.0,
        "window_s": 1.0,
        "event_rounds": 1,
        "event_s": 12.0,
    }
    return BenchSettings(out, **(quick | changes))  # type: ignore[arg-type] # names are checked there
