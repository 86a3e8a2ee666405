"""The trainer's raw records: turns, trajectories and steps."""

from collections.abc import Sequence
from pathlib import Path

from rose.demo.gap import turn_gaps
from rose.demo.trajectory import Trajectory
from rose.eventlog import JsonlLog


class TrainRecords:
    """Writes `turns.jsonl`, `trajectories.jsonl` and `steps.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._turns = JsonlLog(folder / "turns.jsonl")
        self._trajectories = JsonlLog(folder / "trajectories.jsonl")
        self._steps = JsonlLog(folder / "steps.jsonl")

    def step(self, record: dict[str, object]) -> None:
        """One update of the policy."""
        self._steps.write(record)

    def trajectories(
        self,
        batch: Sequence[Trajectory],
        recomputed: Sequence[Sequence[float | None]],
        step: int | None,
        delivered: dict[str, int],
    ) -> None:
        """Finished episodes and their turns; `step` None for those that no step was trained on."""
        for trajectory, logprobs in zip(batch, recomputed, strict=True):
            self._trajectories.write(_trajectory(trajectory, step, delivered[trajectory.name]))
            for record in _turns(trajectory, logprobs, step):
                self._turns.write(record)

    def close(self) -> None:
        """Close the files."""
        for log in (self._turns, self._trajectories, self._steps):
            log.close()


def _trajectory(trajectory: Trajectory, step: int | None, delivered: int) -> dict[str, object]:
    return {
        "trajectory": trajectory.name,
        "group": trajectory.group,
        "step": step,
        "start_s": trajectory.start_s,
        "end_s": trajectory.end_s,
        "turns": len(trajectory.turns),
        "reward": trajectory.reward,
        "versions": trajectory.versions,
        "delivered": delivered,
        "revoked_mid_turn": trajectory.revoked_mid_turn,
    }


def _turns(
    trajectory: Trajectory, logprobs: Sequence[float | None], step: int | None
) -> list[dict[str, object]]:
    gaps = turn_gaps(trajectory.turns, trajectory.token_kinds(), logprobs)
    return [
        {
            "request_id": played.turn.request_id,
            "trajectory": trajectory.name,
            "group": trajectory.group,
            "step": step,
            "turn": played.index,
            "start_s": played.start_s,
            "end_s": played.end_s,
            "prompt_tokens": played.prompt_tokens,
            "output_tokens": len(played.turn.token_ids),
            "versions": played.turn.versions,
            "segments": played.turn.segments,
            "attempts": played.turn.attempts,
            "finish_reason": played.turn.finish_reason,
            "gap": gap,
            "unstamped": unstamped,
        }
        for played, (gap, unstamped) in zip(trajectory.turns, gaps, strict=True)
    ]
