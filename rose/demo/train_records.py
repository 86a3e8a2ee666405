"""The trainer's raw records: turns, trajectories and steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rose.demo.gap import turn_gap
from rose.demo.trajectory import Trajectory
from rose.eventlog import KEEP_ALL, JsonlLog


class TrainRecords:
    """Writes `turns.jsonl`, `trajectories.jsonl` and `steps.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._turns = JsonlLog(folder / "turns.jsonl", KEEP_ALL)
        self._trajectories = JsonlLog(folder / "trajectories.jsonl", KEEP_ALL)
        self._steps = JsonlLog(folder / "steps.jsonl", KEEP_ALL)

    def step(self, record: dict[str, object]) -> None:
        """One update of the policy."""
        self._steps.write(record)

    def delivered(
        self,
        batch: Sequence[Trajectory],
        scores: Mapping[str, Sequence[float | None]],
        step: int | None,
    ) -> None:
        """Finished episodes and their turns; `step` None for those that no step was trained on."""
        for trajectory in batch:
            self._trajectories.write(_trajectory(trajectory, step))
            for record in _turns(trajectory, scores[trajectory.name], step):
                self._turns.write(record)

    def close(self) -> None:
        """Close the files."""
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
