"""What a batch's steps say about the size of a step and its time."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from executor.step_log import StepRecord
from rose.profile.plan import Batch
from slo import StepSample


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step of a batch; `context_tokens`: KV in use when it began. `cpu_s` of `seconds` it ran."""

    tokens: int
    sequences: int
    context_tokens: int
    sampled: int
    seconds: float
    cpu_s: float


def steps_of(batch: Batch, records: Iterable[StepRecord]) -> list[LoggedStep]:
    """The batch's steps with the context that each began with.

    Turns of a batch start together and end together, so the KV in use is all that was computed
    before. Steps after the first turn has ended are left out.
    """
    found: list[LoggedStep] = []
    computed = sampled = 0
    for record in records:
        # All that have begun are in every step, so a smaller one says that a turn has ended.
        if found and record.sequences < found[-1].sequences:
            break
        found.append(
            LoggedStep(
                record.tokens,
                record.sequences,
                computed,
                record.sampled,
                (record.end_ns - record.begin_ns) / 1e9,
                record.cpu_ns / 1e9,
            )
        )
        computed += record.tokens
        sampled += record.sampled
    assert computed <= batch.sequences * batch.prompt_tokens + sampled, "a step of another batch"
    return found


def samples_of(runs: Sequence[Sequence[LoggedStep]]) -> list[StepSample]:
    """One sample for each size of step that repeated runs of a batch have seen: the median."""
    times = defaultdict[tuple[int, int, int], list[float]](list)
    for run in runs:
        for step in run:
            times[step.tokens, step.sequences, step.context_tokens].append(step.seconds)
    return [StepSample(*size, median(seconds)) for size, seconds in times.items()]


def waited_share(runs: Iterable[Sequence[LoggedStep]]) -> float:
    """Share of all steps' time in which the engine's thread did not run."""
    steps = [step for run in runs for step in run]
    wall_s = sum(step.seconds for step in steps)
    return max(0.0, 1 - sum(step.cpu_s for step in steps) / wall_s) if wall_s else 0.0
