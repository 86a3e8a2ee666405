"""Stand-ins for the bench on a GPU: what the pieces would have measured. Nothing is measured."""

from typing import Any

from rose.nvml import Card
from tests.unit.nvml.standin_nvml import CARD, IDLE, StandInLibrary, StandInReader, card, usage

__all__ = [
    "CARD",
    "IDLE",
    "MEASURED",
    "StandInLibrary",
    "StandInReader",
    "card",
    "measured_by_nobody",
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
                "decode_a_chunk": 0.01,
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


def measured_by_nobody(piece: Any, sizes: Any, which: Card, log: Any) -> dict[str, Any]:
    """In place of a piece's process."""
    assert which.name == CARD.name
    found: dict[str, Any] = MEASURED[piece.name]
    return found
