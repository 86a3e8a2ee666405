"""Requests that skip a step while their block is lent, and for how long."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from executor.host.kv_lender import HOLD_NS
from executor.kv.shrink_plan import KvGroup
from executor.vllm.compat import RequestSurface
from executor.vllm.host.kv_lender import SkipPolicy

BLOCK = 16
STEP_TOKENS = 64


def running(*requests: tuple[int, int]) -> list[RequestSurface]:
    """Requests with so many tokens, of which so many are computed."""
    return [
        SimpleNamespace(
            request_id=f"r{number}",
            num_tokens_with_spec=tokens,
            num_computed_tokens=computed,
            num_output_placeholders=0,
        )
        for number, (tokens, computed) in enumerate(requests)
    ]


DECODING = ((17, 16), (20, 19), (33, 32))
"""The first and the last need a block for their next token, the second has it."""


def test_the_last_that_lack_a_block_skip_and_the_others_go_on() -> None:
    hold = SkipPolicy([KvGroup(BLOCK)], 0, STEP_TOKENS)
    assert hold.choose(0, running(*DECODING), 2, lent=3) == frozenset()
    assert hold.choose(0, running(*DECODING), 1, lent=3) == {"r2"}
    assert hold.choose(0, running(*DECODING), 0, lent=3) == {"r0", "r2"}
    assert hold.short_blocks == 2


def test_a_host_that_lent_nothing_schedules_as_vllm_does() -> None:
    hold = SkipPolicy([KvGroup(BLOCK)], 0, STEP_TOKENS)
    assert hold.choose(0, running(*DECODING), 0, lent=0) == frozenset()
    assert hold.short_blocks == 0


def test_nobody_skips_for_longer_than_the_bound_whatever_comes_back_meanwhile() -> None:
    hold, requests = SkipPolicy([KvGroup(BLOCK)], 0, STEP_TOKENS), running(*DECODING)
    assert hold.choose(0, requests, 0, lent=3)
    assert hold.choose(HOLD_NS - 1, requests, 0, lent=3)
    assert not hold.choose(HOLD_NS, requests, 0, lent=3)
    assert not hold.choose(9 * HOLD_NS, requests, 0, lent=3), "and not again for the same"
    assert not hold.choose(9 * HOLD_NS, requests, 0, lent=2), "a granule came, for another"
    assert not hold.choose(9 * HOLD_NS, running(*DECODING[1:2]), 0, lent=2)
    assert hold.choose(20 * HOLD_NS, requests, 0, lent=2), "this is another need"


def test_a_guest_that_gives_back_in_crumbs_stretches_no_hold() -> None:
    hold, requests, lent, held_ns = (
        SkipPolicy([KvGroup(BLOCK)], 0, STEP_TOKENS),
        running(*DECODING),
        200,
        0,
    )
    for now_ns in range(0, 50 * HOLD_NS, HOLD_NS // 50):
        lent -= now_ns % (HOLD_NS - HOLD_NS // 50) == 0
        if not hold.choose(now_ns, requests, 0, lent):
            break
        held_ns = now_ns
    assert held_ns < HOLD_NS


def test_what_a_chunked_prompt_still_needs_is_asked_for_as_a_whole() -> None:
    hold = SkipPolicy([KvGroup(BLOCK)], 0, STEP_TOKENS)
    assert hold.choose(0, running((400, 64)), 0, lent=9) == {"r0"}
    assert hold.short_blocks == (400 - 64) // BLOCK


def test_drafted_tokens_have_room() -> None:
    hold = SkipPolicy([KvGroup(BLOCK)], 3, STEP_TOKENS)
    assert hold.choose(0, running((15, 14)), 0, lent=1) == {"r0"}


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=20),
    st.integers(0, 60),
    st.integers(0, 4),
)
def test_who_is_left_has_its_blocks(
    drawn: list[tuple[int, int]], free: int, lookahead: int
) -> None:
    requests = running(*((computed + more, computed) for more, computed in drawn))
    held = SkipPolicy([KvGroup(BLOCK)], lookahead, STEP_TOKENS).choose(0, requests, free, lent=1)
    budget, needed = STEP_TOKENS, 0
    for request in requests:
        if request.request_id in held:
            continue
        computed = request.num_computed_tokens
        tokens = min(request.num_tokens_with_spec - computed, budget)
        budget -= tokens
        if tokens:
            needed += -(-(computed + tokens + lookahead) // BLOCK) - -(-computed // BLOCK)
    assert needed <= free


def test_a_request_needs_blocks_of_every_group_of_layers() -> None:
    """A window that is full already needs no block more, full attention needs one."""
    groups = [KvGroup(BLOCK), KvGroup(BLOCK, most_blocks=2), KvGroup(4 * BLOCK)]
    hold = SkipPolicy(groups, 0, STEP_TOKENS)
    (request,) = running((33, 32))
    assert hold.choose(0, [request], 0, lent=1) == {"r0"}
    assert hold.short_blocks == 1
    assert hold.choose(0, [request], 1, lent=1) == frozenset()
    (prompt,) = running((65, 0))
    assert hold.choose(0, [prompt], 0, lent=1) == {"r0"}
    assert hold.short_blocks == 5 + 2 + 2
