"""What the trainer is told: one JSON file."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rose.demo.settings import MAX_SEED
from rose.errors import ConfigError

Control = Literal["none", "shuffled-advantage", "lr0", "drop-token"]


class TrainConfig(BaseModel):
    """One training run. `streams`: trajectories in flight; a step is `groups` x `group_size`. The
    learning rate falls until `decay_steps`. Without `held_out_maps` nothing is evaluated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    gateway_url: str
    scheduler: str
    out: Path
    publish_root: Path
    publish_port: int = Field(ge=0, le=65_535)
    key: Path
    job: str = "frozen-lake"
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    steps: int = Field(default=34, ge=1, le=1_000)
    decay_steps: int | None = Field(default=None, ge=1)
    streams: int = Field(default=96, ge=1, le=4_096)
    groups: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=2)
    max_staleness: int = Field(default=1, ge=0, le=2)
    held_out_maps: int = Field(default=512, ge=0, le=512)
    control: Control = "none"
    corrupt_every: int = Field(default=0, ge=0)
    long_turns: bool = False
    torch_threads: int = Field(default=1, ge=1)

    @classmethod
    def read(cls, path: Path) -> "TrainConfig":
        """Read a file. Raises ConfigError that names what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            first = str(error).replace("\n", " ")
            raise ConfigError(f"{path}: not a trainer configuration: {first}") from error
