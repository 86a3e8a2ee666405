"""Plan and evaluation of a profile run: the batches to run, their samples, and the printed report.

Batches of equal turns cover the step sizes that a lease may ask for. Each batch's steps give
samples of step size and time. The report shows the fit, and predictions beside measurements.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from executor.step_log import StepRecord
from slo import StepProfile, StepSample

DECODE_STEPS = 6
SMALLEST_PROMPT = 8
# Shares of the longest sequence that prompts fill: the long ones show the cost of attention.
PROMPT_SHARES = (0.05, 0.3, 0.9)
BUDGET_SHARES = (0.125, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of `sequences` turns of `prompt_tokens` each, in steps of `token_budget` tokens.

    The turns start together and generate DECODE_STEPS tokens each.
    """

    sequences: int
    prompt_tokens: int
    token_budget: int

    @property
    def kv_tokens(self) -> int:
        """Number of KV tokens that the batch fills in the end."""
        return self.sequences * (self.prompt_tokens + DECODE_STEPS)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine: sequences at once, tokens of a sequence, of a step, of its KV."""

    max_num_seqs: int
    max_model_len: int
    token_budget: int
    kv_tokens: int


def plan(limits: EngineLimits) -> list[Batch]:
    """Return the batches to run, whose steps differ in tokens, sequences and context.

    A budget holds a whole decode. Short prompts are run with every budget that their prefill fills.
    """
    longest = limits.max_model_len - DECODE_STEPS
    prompts = sorted({max(SMALLEST_PROMPT, int(longest * share)) for share in PROMPT_SHARES})
    found = dict[Batch, None]()
    for sequences, prompt in product(_doubling(limits.max_num_seqs), prompts):
        for budget in _budgets(limits.token_budget, sequences, sequences * prompt):
            batch = Batch(sequences, min(prompt, longest), budget)
            if batch.kv_tokens <= limits.kv_tokens:
                found[batch] = None
    return list(found)


def _budgets(most: int, sequences: int, prefill_tokens: int) -> Iterator[int]:
    for share in BUDGET_SHARES:
        budget = max(sequences, int(most * share))
        if budget >= most or prefill_tokens > budget:
            yield min(budget, most)


def _doubling(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return sizes if sizes[-1] == most else [*sizes, most]


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """Measured step of a batch. context_tokens: KV in use at its start. cpu_s: processor time."""

    tokens: int
    sequences: int
    context_tokens: int
    sampled: int
    seconds: float
    cpu_s: float


def steps_of(batch: Batch, records: Iterable[StepRecord]) -> list[LoggedStep]:
    """Return the batch's steps in a run's records, with the context at the start of each.

    Turns of a batch start together and end together, so the KV in use is all that was computed
    before. Steps after the first turn has ended are left out.
    """
    found: list[LoggedStep] = []
    computed = sampled = 0
    for record in records:
        # All running turns are in every step, so a smaller step means that a turn has ended.
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
    """Return one sample for each step size of a batch: the median time over its repeated runs."""
    times = defaultdict[tuple[int, int, int], list[float]](list)
    for run in runs:
        for step in run:
            times[step.tokens, step.sequences, step.context_tokens].append(step.seconds)
    return [StepSample(*size, median(seconds)) for size, seconds in times.items()]


def waited_share(runs: Iterable[Sequence[LoggedStep]]) -> float:
    """Return the share of all steps' time in which the engine's thread did not run; 0 to 1."""
    steps = [step for run in runs for step in run]
    wall_s = sum(step.seconds for step in steps)
    return max(0.0, 1 - sum(step.cpu_s for step in steps) / wall_s) if wall_s else 0.0


ROWS = 14
# Above this share the steps' times are those of the machine, not of the engine.
MAX_WAITED = 0.1


def report(profile: StepProfile, samples: Sequence[StepSample], waited: float) -> Iterator[str]:
    """Yield the lines of the printed report. waited: share of time without a core."""
    yield (
        f"a step takes {profile.base_s * 1e3:.3f} ms + {profile.per_token_s * 1e6:.2f} us a token"
        f" + {profile.per_sequence_s * 1e6:.2f} us a sequence"
        f" + {profile.per_context_token_s * 1e9:.1f} ns a token of context"
    )
    yield f"{profile.samples} sizes of step, off by {profile.fit_error:.1%} on the average"
    yield ""
    yield "  tokens  sequences  context  measured ms  predicted ms    off"
    for sample in _spread(samples):
        predicted_s = profile.seconds(sample.tokens, sample.sequences, sample.context_tokens)
        yield (
            f"{sample.tokens:8}  {sample.sequences:9}  {sample.context_tokens:7}"
            f"  {sample.seconds * 1e3:11.2f}  {predicted_s * 1e3:12.2f}"
            f"  {predicted_s / sample.seconds - 1:+5.0%}"
        )
    if waited > MAX_WAITED:
        yield ""
        yield (
            f"the engine waited for its core for {waited:.0%} of that time: these are the times of"
            " a busy machine; profile again when it is quiet"
        )


def _spread(samples: Sequence[StepSample]) -> list[StepSample]:
    """Return at most ROWS of the samples, from the shortest to the longest."""
    ordered = sorted(samples, key=lambda sample: sample.seconds)
    if len(ordered) <= ROWS:
        return ordered
    return [ordered[round(at * (len(ordered) - 1) / (ROWS - 1))] for at in range(ROWS)]
