"""Configuration file of a training run, and the trainer's records: turns, trajectories, steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.demo.cli import JOB, MAX_SEED
from bench.demo.training.forward import turn_gap
from bench.demo.training.rollouts import Trajectory
from rose.errors import ConfigError
from rose.logs.eventlog import KEEP_ALL, JsonlLog

Control = Literal["none", "shuffled-advantage", "lr0", "drop-token", "corrupt-chunk"]


class TrainConfig(BaseModel):
    """One training run. `streams`: trajectories in flight; a step is `groups` x `group_size`. The
    learning rate falls until `decay_steps`. Without `held_out_maps` nothing is evaluated.
    `shared`: other jobs have its replicas at times."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    gateway_url: str
    scheduler: str
    out: Path
    publish_root: Path
    publish_port: int = Field(ge=0, le=65_535)
    key: Path
    job: str = JOB
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    steps: int = Field(default=34, ge=1, le=1_000)
    decay_steps: int | None = Field(default=None, ge=1)
    streams: int = Field(default=96, ge=1, le=4_096)
    groups: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=2)
    max_staleness: int = Field(default=1, ge=0, le=2)
    held_out_maps: int = Field(default=512, ge=0, le=512)
    control: Control = "none"
    long_turns: bool = False
    torch_threads: int = Field(default=1, ge=1)
    shared: bool = False

    @property
    def first_version(self) -> int:
        """The version that training begins with.

        A running engine that has another job's weights comes to a version of this job by an
        update, but to none before the first: so the model is published as version 1, too.
        """
        return int(self.shared)

    @classmethod
    def read(cls, path: Path) -> "TrainConfig":
        """Read a file. Raises ConfigError that names what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            first = str(error).replace("\n", " ")
            raise ConfigError(f"{path}: not a trainer configuration: {first}") from error


class TrainRecords:
    """Writes `turns.jsonl`, `trajectories.jsonl` and `steps.jsonl` of one job."""

    def __init__(self, folder: Path, job: str) -> None:
        self._job = job
        self._turns = JsonlLog(folder / "turns.jsonl", KEEP_ALL)
        self._trajectories = JsonlLog(folder / "trajectories.jsonl", KEEP_ALL)
        self._steps = JsonlLog(folder / "steps.jsonl", KEEP_ALL)

    def step(self, record: dict[str, object]) -> None:
        """One update of the policy."""
        self._steps.write({"job": self._job, **record})

    def delivered(
        self,
        batch: Sequence[Trajectory],
        scores: Mapping[str, Sequence[float | None]],
        step: int | None,
    ) -> None:
        """Finished episodes and their turns; `step` None for those that no step was trained on."""
        for trajectory in batch:
            self._trajectories.write({"job": self._job, **_trajectory(trajectory, step)})
            for record in _turns(trajectory, scores[trajectory.name], step):
                self._turns.write({"job": self._job, **record})

    def close(self) -> None:
        for log in (self._turns, self._trajectories, self._steps):
            log.close()


def _trajectory(trajectory: Trajectory, step: int | None) -> dict[str, object]:
    return {
        "trajectory": trajectory.name,
        "group": trajectory.group,
        "step": step,
        "start_s": trajectory.start_s,
        "end_s": trajectory.end_s,
        "turns": len(trajectory.turns),
        "reward": trajectory.reward,
        "versions": trajectory.versions(),
        "delivered": int(not trajectory.lost),
        "revoked_mid_turn": trajectory.revoked_mid_turn(),
    }


def _turns(
    trajectory: Trajectory, scores: Sequence[float | None], step: int | None
) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    at = 0
    for index, taken in enumerate(trajectory.turns):
        tokens = len(taken.turn.token_ids)
        gap, unstamped = turn_gap(taken, scores[at : at + tokens])
        at += tokens
        records.append(
            {
                "request_id": taken.turn.request_id,
                "trajectory": trajectory.name,
                "group": trajectory.group,
                "step": step,
                "turn": index,
                "start_s": taken.start_s,
                "end_s": taken.end_s,
                "prompt_tokens": taken.offset,
                "output_tokens": tokens,
                "versions": taken.turn.versions,
                "segments": taken.segments(),
                "attempts": taken.turn.attempts,
                "finish_reason": taken.turn.finish_reason,
                "gap": gap,
                "unstamped": unstamped,
            }
        )
    return records
