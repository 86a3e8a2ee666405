"""Requests that outgrew what a guest may hold: ended at once, so that they go on elsewhere.

vLLM would wait for blocks that do not come, and everything behind such a request with it.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from executor.vllm.surfaces import RequestSurface


def too_large(
    requests: Iterable[RequestSurface], capacity_blocks: int, block_tokens: int, lookahead: int
) -> list[str]:
    """Ids of the requests whose tokens so far do not fit, were they alone in the guest.

    What a request may still generate does not count: it may stop before that, and its tokens are
    with its client already.
    """
    capacity_tokens = capacity_blocks * block_tokens
    return [
        request.request_id
        for request in requests
        if request.num_tokens + lookahead > capacity_tokens
    ]


class HandBack:
    """Keeps who was ended until the engine core next sends something out."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, str]] = []

    def ended(self, requests: Iterable[tuple[int, str]]) -> None:
        """Remember requests, by client and id, that the scheduler ended by itself."""
        self._ended.extend(requests)

    def tell(self, outputs: dict[int, Any]) -> None:
        """Add a last output of each to what goes to their clients."""
        for client, request_id in self._ended:
            last = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(last)
        self._ended.clear()
