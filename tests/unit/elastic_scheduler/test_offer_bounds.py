"""An offer is what somebody else says: no figure of it can be one that breaks a reckoning."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Offer, ReplicaKind
from elastic_scheduler.leases.lease_table import MAX_EPOCH, MAX_TOK_S
from elastic_scheduler.policies.cost_model import supply_of

FIELDS: dict[str, object] = {
    "replica": "g0",
    "kind": ReplicaKind.GUEST,
    "url": "http://h",
    "node": "n0",
    "kv_tokens": 4096,
    "decode_tok_s": 100.0,
    "prefill_tok_s": 1000.0,
    "policy_version": 0,
    "healthy": True,
    "ttl_s": 3.0,
    "epoch": 0,
    "max_sequences": 8,
}
FIGURES = [
    "kv_tokens",
    "decode_tok_s",
    "prefill_tok_s",
    "policy_version",
    "ttl_s",
    "epoch",
    "max_sequences",
]


def offer(**changes: object) -> Offer:
    return Offer(**{**FIELDS, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 2.0**64])
def test_what_is_no_figure_is_refused_in_a_line_that_names_it(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        offer(**{name: value})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"replica": ""},
        {"replica": "x" * 254},
        {"replica": "g0\n"},
        {"node": ""},
        {"node": "\x00"},
        {"url": ""},
        {"url": "http://" + "x" * 2_048},
        {"epoch": MAX_EPOCH + 1},
    ],
)
def test_names_are_printable_and_everything_has_an_end(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"give|offer"):
        offer(**changes)


@given(st.lists(st.tuples(st.floats(), st.integers()), max_size=8), st.floats(0, 1e15))
def test_rates_of_accepted_offers_add_up_to_a_rate(
    said: list[tuple[float, int]], turns: float
) -> None:
    taken = []
    for rate, places in said:
        try:
            taken.append(offer(decode_tok_s=rate, max_sequences=places))
        except ValueError:
            continue
    assert 0 <= supply_of(taken).rate_tok_s(turns) <= len(taken) * MAX_TOK_S
