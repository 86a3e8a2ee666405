"""Sampling options of turns that SGLang has no parameter for.

Allowed tokens: a turn names them in its custom parameters, and the batch's bias forbids all others.
SGLang filters and merges that with its batches, samples from it, and takes logprobs of it.

Stops without the model's own ends: SGLang checks no stop of a turn that ignores those.
"""

from collections.abc import Sequence
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


def ended_at_stop(original: Any, request: Any, new: Sequence[int]) -> bool:  # noqa: ANN401 -- SGLang's
    """Hook around `Req._check_token_based_finish`."""
    asked = request.sampling_params
    if not (asked.ignore_eos and asked.stop_token_ids):
        return bool(original(request, new))
    place = next((n for n, token in enumerate(new) if token in asked.stop_token_ids), None)
    if place is None:
        return False
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    request.finished_reason = FINISH_MATCHED_TOKEN(matched=new[place])
    request.finished_len = len(request.output_ids) - len(new) + place + 1
    return True
