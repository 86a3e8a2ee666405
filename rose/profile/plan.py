"""Which steps are run: batches of equal turns that cover what a lease may ask for."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

DECODE_STEPS = 6
SMALLEST_PROMPT = 8
# Shares of the longest sequence that prompts fill: what attention costs shows in the long ones.
PROMPT_SHARES = (0.05, 0.3, 0.9)
BUDGET_SHARES = (0.125, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """`sequences` turns of `prompt_tokens` each, started together, in steps of `token_budget`."""

    sequences: int
    prompt_tokens: int
    token_budget: int

    @property
    def kv_tokens(self) -> int:
        """KV it fills in the end."""
        return self.sequences * (self.prompt_tokens + DECODE_STEPS)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine holds: sequences at once, tokens of one sequence, of a step, of its KV."""

    max_num_seqs: int
    max_model_len: int
    token_budget: int
    kv_tokens: int


def plan(limits: Limits) -> list[Batch]:
    """Batches whose steps differ in tokens, sequences and context; a budget holds a whole decode.

    Short prompts come in every budget only once their prefill fills it.
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
