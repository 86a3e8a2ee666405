"""Faults that the chaos run counts; the run itself is tests/engine/test_chaos.py."""

from typing import Any

import pytest

from bench.chaos import ChaosFindings
from rose.client import Turn


def _turn(**changes: Any) -> Turn:
    fields = {
        "request_id": "r",
        "token_ids": (1, 2, 3),
        "logprobs": (-1.0, -1.0, -1.0),
        "versions": ((0, 0, 3),),
        "segments": (("a", "guest", 0, 3),),
        "finish_reason": "length",
        "attempts": 1,
    }
    return Turn(**{**fields, **changes})


@pytest.mark.parametrize(
    ("bad", "count"),
    [
        ({"token_ids": (1, 2, 2)}, "wrong_tokens"),
        ({"token_ids": (1, 2), "logprobs": (-1.0, -1.0)}, "wrong_tokens"),
        ({"token_ids": (1, 1, 2, 3)}, "wrong_tokens"),
        ({"versions": ((0, 0, 2),)}, "unstamped"),
        ({"versions": ((0, 0, 2), (-1, 2, 3))}, "unstamped"),
        ({"segments": (("a", "guest", 0, 1), ("b", "guest", 2, 3))}, "gaps"),
    ],
)
def test_whatever_is_wrong_with_a_turn_is_found(bad: dict[str, Any], count: str) -> None:
    findings = ChaosFindings()
    findings.add(_turn(), _turn(), 3)
    assert findings.faults == 0
    findings.add(_turn(request_id="q", **bad), _turn(), 3)
    assert getattr(findings, count) == 1
    findings.add(_turn(), _turn(), 3)
    assert findings.doubled == 1
