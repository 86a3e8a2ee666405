"""Which running requests of a host skip a step, because the blocks that they need are lent.

Stock vLLM preempts when a running request lacks a block: what was computed for a request is thrown
away to be computed again. Where the block is lent and asked back, that would be for nothing, so the
request keeps what it has and is left out of steps instead. HOLD_NS bounds a hold from its first
step on, about what computing it again costs, whatever comes back meanwhile: a host waits for no
guest. Only when nobody lacks a block any more may another hold begin.
"""

from collections.abc import Sequence
from typing import Final, Protocol

HOLD_NS: Final = 250_000_000


class RunningSurface(Protocol):
    """vllm.v1.request.Request, as far as a step's blocks depend on it."""

    request_id: str
    num_computed_tokens: int
    num_output_placeholders: int

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens of prompt and output so far, and drafted ones."""
        ...


class Hold:
    """Asked before each step; the clock is handed in."""

    def __init__(self, block_tokens: int, lookahead_tokens: int, step_tokens: int) -> None:
        """`step_tokens`: the most of one step."""
        self._block_tokens = block_tokens
        self._lookahead = lookahead_tokens
        self._step_tokens = step_tokens
        self._since_ns: int | None = None
        self.short_blocks = 0

    def choose(
        self, now_ns: int, running: Sequence[RunningSurface], free_blocks: int, lent: int
    ) -> frozenset[str]:
        """The ids of those that skip the next step, the last ones first; none holds for ever.

        `free_blocks` can be allocated now, `lent` granules are out. `short_blocks` is what all of
        `running` lack together until the tokens that they have now are computed.
        """
        if not lent or free_blocks >= self._most(len(running)):
            return self._nobody()
        held, left, lacking = [], free_blocks, -free_blocks
        for request in running:
            next_step, whole = self._needs(request)
            lacking += whole
            if next_step <= left:
                left -= next_step
            else:
                held.append(request.request_id)
        self.short_blocks = max(0, lacking)
        if not held:
            self._since_ns = None
            return frozenset()
        if self._since_ns is None:
            self._since_ns = now_ns
        return frozenset(held if now_ns - self._since_ns < HOLD_NS else ())

    def _nobody(self) -> frozenset[str]:
        self._since_ns, self.short_blocks = None, 0
        return frozenset()

    def _most(self, running: int) -> int:
        """Blocks that so many requests can need in one step."""
        each = 1 + -(-self._lookahead // self._block_tokens)
        return running * each + self._step_tokens // self._block_tokens

    def _needs(self, request: RunningSurface) -> tuple[int, int]:
        """Blocks for the next step, and for all tokens that are there."""
        computed = request.num_computed_tokens
        tokens = request.num_tokens_with_spec + request.num_output_placeholders - computed
        has = -(-computed // self._block_tokens)
        step, whole = (
            -(-(computed + count + self._lookahead) // self._block_tokens) - has
            for count in (min(tokens, self._step_tokens), tokens)
        )
        return max(0, step), max(0, whole)
