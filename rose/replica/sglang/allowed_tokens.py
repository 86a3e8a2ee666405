"""Turns that may sample some tokens alone, which SGLang has no parameter for.

A turn names them in its custom parameters, and the batch's bias forbids all others: SGLang filters
and merges that with its batches, samples from it, and takes logprobs of it.
"""

from typing import Any, Final

ALLOWED: Final = "rose_allowed_token_ids"


def biased_batch(original: Any, kind: Any, batch: Any, vocab_size: int) -> Any:  # noqa: ANN401 -- SGLang's
    """Hook around `SamplingBatchInfo.from_schedule_batch`."""
    import torch

    found = original(kind, batch, vocab_size)
    for row, request in enumerate(batch.reqs):
        allowed = (request.sampling_params.custom_params or {}).get(ALLOWED)
        if allowed is None:
            continue
        if found.logit_bias is None:
            found.logit_bias = torch.zeros(len(batch.reqs), vocab_size, device=batch.device)
        forbidden = torch.full((vocab_size,), float("-inf"), device=batch.device)
        inside = [token for token in allowed if 0 <= token < vocab_size]
        forbidden[torch.tensor(inside, dtype=torch.int64, device=batch.device)] = 0.0
        found.logit_bias[row] += forbidden
    return found
