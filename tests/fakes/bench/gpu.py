"""Stand-ins for the bench on a GPU: what the pieces would have measured. Nothing is measured."""

from collections.abc import Iterator
from typing import Any

from bench.coserve.plan import ALONE, ALONE_AGAIN, NAIVE_ARM, ROSE_ARMS, Arm
from bench.gpu.measure import Answered, PieceOrder
from tests.fakes.cuda.nvml import CARD, IDLE, StandInLibrary, StandInReader, card, usage

__all__ = [
    "CARD",
    "IDLE",
    "StandInLibrary",
    "StandInReader",
    "card",
    "usage",
]

MEASURED: dict[str, Any] = {
    "tests": {"files": ["device_cases.py"], "passed": 40, "left_out": {"pages": "needs cuda"}},
    "copy": {
        "within_card": [
            {"bytes": 64 << 20, "gb_s": 3_900.0},
            {"bytes": 1 << 30, "gb_s": 4_200.0},
            {"bytes": 4 << 30, "gb_s": 4_300.0},
        ],
        "to_host": {"bytes": 1 << 30, "gb_s": 55.0},
        "from_host": {"bytes": 1 << 30, "gb_s": 54.0},
    },
    "kernels": {
        "comparisons_equal": 180,
        "speed": {
            name: {"gb_s": 4_300.0 * share, "share_of_copy": share}
            for name, share in {
                "copy": 1.0,
                "digest": 0.7,
                "diff": 0.65,
                "encode_to_host": 0.1,
                "compact_ranks_of_a_chunk": 0.02,
                "overwrite_and_read_back": 0.62,
            }.items()
        },
    },
    "update": {
        "model": "8b",
        "tensors": 291,
        "weights": 8_030_261_248,
        "changed": 160_605_225,
        "staged_s": 9.0,
        "overwrite_s": {"p50": 0.031, "p99": 0.036, "least": 0.030, "most": 0.036, "count": 10},
    },
    "pages": {
        "page_bytes": 2 << 20,
        "pages": 512,
        "each_s": {
            name: {"p50": value}
            for name, value in {
                "create": 193e-6,
                "map": 1.5e-6,
                "access": 36e-6,
                "zero": 12e-6,
                "unmap": 26e-6,
                "release": 80e-6,
            }.items()
        },
        "at_once_s": {"access": {"p50": 900e-6}, "zero": {"p50": 500e-6}},
        "through_driver": {"moved_s": {"p50": 0.165}},
        "by_handle": {"moved_s": {"p50": 0.021}},
    },
}


def served_row(arm: Arm, ratio: float, guest_tok_s: float, verdict: str) -> dict[str, Any]:
    """Return a row of `bench.coserve.rows`, with the fields that are read here."""
    check = {"name": "ttft_p90", "value": ratio, "limit": 1.05, "verdict": verdict, "ci95": None}
    return {
        "mode": arm.policy or arm.name,
        "policy": arm.policy,
        "slack_share": arm.slack_share,
        "busy": 0.61,
        "host": {"requests": 240},
        "ratio_to_alone": {"ttft_p90": ratio, "tpot_p90": ratio},
        "ratio_to_alone_ci95": {"ttft_p90": [ratio * 0.98, ratio * 1.02], "tpot_p90": None},
        "guest_tok_s": guest_tok_s,
        "idle_efficiency": 0.87 if guest_tok_s else None,
        "spare_efficiency": 0.55 if guest_tok_s else None,
        "checks": [check | {"decisive": True}, check | {"name": "ttft_p99", "decisive": False}],
        "verdict": verdict,
    }


def served(traffic: dict[str, Any]) -> dict[str, Any]:
    arms = [served_row(arm, 1.01, 1_500.0, "HOLDS") for arm in ROSE_ARMS]
    return {
        "rows": [
            served_row(ALONE, 1.0, 0.0, "REFERENCE"),
            served_row(ALONE_AGAIN, 1.0, 0.0, "INCONCLUSIVE"),
            served_row(NAIVE_ARM, 2.4, 3_000.0, "FAILS"),
            *arms,
        ],
        "traffic": traffic,
    }


MEASURED |= {
    name: served({"poisson": True, "rate_per_s": 7.5}) for name in ("serve30", "serve60", "serve90")
}
MEASURED["update-serving"] = {
    "updates": [{"version": 2, "pause_s": 0.041}, {"version": 3, "pause_s": 0.043}],
    "pause_s": {"p50": 0.041, "most": 0.043, "count": 2},
    "host": {
        "during": {"requests": 1_200},
        "control": {"requests": 1_200},
        "ratio": {"ttft_p90_s": 1.02, "tpot_p90_s": 1.01},
    },
}
MEASURED["bursts"] = served({"trace": "generated", "mean_per_s": 2.57})


def measured_by_nobody(order: PieceOrder) -> Iterator[Answered]:
    """In place of a process of pieces."""
    assert order.card.name == CARD.name
    for piece in order.pieces:
        yield Answered(piece, MEASURED[piece.name])
