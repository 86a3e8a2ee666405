"""What a person asked the demo to do."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from rose.errors import RoseError

Control = Literal[
    "shuffled-advantage",
    "lr0",
    "corrupt-chunk",
    "wrong-chunk",
    "stale-guest",
    "drop-token",
    "naive",
]
CONTROLS: tuple[Control, ...] = get_args(Control)

# The acceptance run goes on until it has taken so many, however slow the machine.
DEFAULT_STEPS = 60
MIN_STEPS = 4
HELD_OUT_MAPS = 512
MAX_STEPS = 1_000
MAX_SEED = 9_999
# The demo takes consecutive ports from its base on.
PORTS_TAKEN = 32
MIN_PORT = 1_024
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One run of the demo; every field is an option of `rose demo`.

    Without `accept`, `control` and `compare` it is the quickstart: the loop and its faults, seen
    once. A control is an acceptance run that breaks one thing, as short as its claim allows.
    Raises `RoseError` when a value cannot be run.
    """

    out: Path
    seed: int = 0
    steps: int = DEFAULT_STEPS
    accept: bool = False
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
            raise RoseError(f"--steps {self.steps}: choose {MIN_STEPS} to {MAX_STEPS}")
        if self.compare and (self.control or self.accept):
            raise RoseError("--compare goes with neither --accept nor --control; choose one")
        # `--compare` trains on the next seeds, too.
        most = MAX_SEED - 9 if self.compare else MAX_SEED
        if not 0 <= self.seed <= most:
            raise RoseError(f"--seed {self.seed}: choose 0 to {most}")
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

    @property
    def quickstart(self) -> bool:
        """Whether the run only shows the loop."""
        return not (self.accept or self.control or self.compare or self.only)

    @property
    def held_out_maps(self) -> int:
        """On how many maps the policy is evaluated before and after training."""
        learning = self.control in (None, "lr0", "shuffled-advantage")
        return HELD_OUT_MAPS if learning and not self.quickstart else 0

    def as_record(self) -> dict[str, object]:
        """The settings as JSON values, for `run.json`."""
        given = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(self).items()
        }
        return given | {"quickstart": self.quickstart}
