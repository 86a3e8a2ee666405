"""What a person asked the demo to do."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from rose.errors import RoseError

Control = Literal["shuffled-advantage", "lr0", "corrupt-chunk", "wrong-chunk", "stale-guest"]
CONTROLS: tuple[Control, ...] = get_args(Control)

DEFAULT_STEPS = 64
QUICK_STEPS = 12
MIN_STEPS = 8
MAX_STEPS = 1_000
# The demo takes consecutive ports from its base on.
PORTS_TAKEN = 32
MIN_PORT = 1_024
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One run of the demo; every field is an option of `rose demo`.

    Raises `RoseError` when a value cannot be run.
    """

    out: Path
    seed: int = 0
    steps: int = DEFAULT_STEPS
    quick: bool = False
    trace: Path | None = None
    long_turns: bool = False
    control: Control | None = None
    compare: bool = False
    port_base: int = 18_000
    host_model: Path | None = None
    # One arm for the whole run instead of the experiment: what `--compare` runs in pairs.
    only: Literal["leased", "frozen"] | None = None

    def __post_init__(self) -> None:
        if not MIN_STEPS <= self.steps <= MAX_STEPS:
            raise RoseError(
                f"--steps {self.steps}: choose {MIN_STEPS} to {MAX_STEPS};"
                " fewer leave no room for a leased and a frozen block, a ceiling and the storm"
            )
        if self.compare and self.control:
            raise RoseError("--compare and --control exclude each other; choose one")
        if self.seed < 0:
            raise RoseError(f"--seed {self.seed}: choose 0 or more")
        if not MIN_PORT <= self.port_base <= MAX_PORT - PORTS_TAKEN:
            raise RoseError(
                f"--port-base {self.port_base}: choose {MIN_PORT} to {MAX_PORT - PORTS_TAKEN}"
            )
        if self.trace is not None and not self.trace.is_file():
            raise RoseError(f"--trace {self.trace}: no such file")
        if self.host_model is not None and not (self.host_model / "config.json").is_file():
            raise RoseError(
                f"--host-model {self.host_model}: no config.json there; name a model directory"
            )

    def as_record(self) -> dict[str, object]:
        """The settings as JSON values, for `run.json`."""
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(self).items()
        }
