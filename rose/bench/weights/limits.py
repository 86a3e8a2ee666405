"""What the figures have to be."""

from collections.abc import Mapping, Sequence
from typing import Any

# Bytes for each changed weight at these shares, container and manifest included.
SIZES = {0.019: (1.25, 0.86), 0.046: (1.10, 0.77), 0.119: (0.94, 0.68)}
OVER_BEST_PEER = 1.01
OVER_RAW = 1.001
# GB/s of model on one core at 1 to 2%.
SPEEDS = {"encode_fast": 8.0, "decode_fast": 20.0, "encode_compact": 1.0, "decode_compact": 1.5}
DIFF_OF_READ = 0.7
MEMORY_CHUNKS = 2.0
SCATTER = {"plain_m_s": 140.0, "with_digest_m_s": 100.0}
RANKS_OF_CHECKPOINT = 1.1
LINK_BYTES, GOODPUT, READY = 1.02, 0.85, 1.3
# Ethernet, IP and TCP, of which the interface counts every packet: 66 of 1514 bytes.
PACKET_HEADERS = 66 / 1448
OURS = ("fast", "compact")


def checks(result: Mapping[str, Any]) -> list[dict[str, object]]:
    """Every figure beside its limit."""
    found: list[dict[str, object]] = []
    for row in result["synthetic"]:
        each, label = row["bytes_per_change"], f"{row['wanted']:.1%}"
        for name, limit in zip(OURS, SIZES.get(row["wanted"], ()), strict=False):
            found.append(_most(f"{name} bytes at {label}", each[name], limit))
        best = min(size for name, size in each.items() if name not in OURS)
        ours = min(each[name] for name in OURS)
        found.append(_most(f"ours over the best peer at {label}", ours / best, OVER_BEST_PEER))
        raw = min(row["bytes"][name] for name in OURS) / row["raw_bytes"]
        found.append(_most(f"ours over raw at {label}", raw, OVER_RAW))
    for row in result["speed"]:
        if row["density"] > 0.03:
            continue
        label = f"{row['density']:.1%}"
        for name, limit in SPEEDS.items():
            found.append(_guide(f"{name} GB/s a core at {label}", row[name]["one"], limit))
        share = row["diff"]["one"] / row["read"]["one"]
        found.append(_least(f"diff of read bandwidth at {label}", share, DIFF_OF_READ))
        for name, limit in SCATTER.items():
            found.append(_guide(f"scatter {name} at {label}", row["scatter"][name], limit))
    for row in result["memory"]:
        label = f"{row['level']} at {row['density']:.0%}"
        found.append(_most(f"chunks held to encode, {label}", row["encode_chunks"], MEMORY_CHUNKS))
    for row in result["link"].get("rows", ()):
        label = f"to {row['receivers']} receivers"
        over = row["link_bytes_over_encoded"]
        found.append(_most(f"link bytes over encoded {label}", over, LINK_BYTES + PACKET_HEADERS))
        found.append(_least(f"goodput of the link {label}", row["goodput_of_link"], GOODPUT))
        found.append(_most(f"ready over link time {label}", row["ready_over_link"], READY))
    return found + rank_checks(result["ranks"])


def rank_checks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Of the memory of ranks that share a checkpoint; an update on its way is not counted."""
    found = []
    for row in rows:
        label = f"at tensor parallel size {row['ranks']}"
        for when in ("read", "active"):
            name = f"ranks' memory over the checkpoint {label}, {when}"
            found.append(_most(name, row[when], RANKS_OF_CHECKPOINT))
        found.append(_most(f"decodes of an update {label}", row["decodes"], 1))
    return found


def _most(name: str, value: float, limit: float) -> dict[str, object]:
    verdict = "HOLDS" if value <= limit else "FAILS"
    return {"check": name, "value": value, "at_most": limit, "verdict": verdict}


def _least(name: str, value: float, limit: float) -> dict[str, object]:
    verdict = "HOLDS" if value >= limit else "FAILS"
    return {"check": name, "value": value, "at_least": limit, "verdict": verdict}


def _guide(name: str, value: float, limit: float) -> dict[str, object]:
    """What depends on the machine more than on us fails nothing."""
    verdict = "HOLDS" if value >= limit else "BELOW"
    return {"check": name, "value": value, "at_least": limit, "verdict": verdict}
