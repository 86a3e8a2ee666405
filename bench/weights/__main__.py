"""`python -m bench.weights`: sizes and speeds of weight updates, beside another scheme.

Writes weights.json and weights.txt, with `--only ranks` weights-ranks.json and .txt.
Exit code 0, 1 when a limit fails, 2 for bad input.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.checks import (
    FAILS,
    Check,
    at_least,
    at_most,
    checks_table,
    columns_table,
    row_verdict,
)
from bench.common.report import OUT, machine, parser_of, put_both, reported, say
from bench.weights.codec import PEER, adam_step, peaks, rate_for, sizes, speeds, training_steps
from bench.weights.link import link_figures
from bench.weights.ranks import rank_memory

PROG = "bench.weights"
Column = Callable[[Mapping[str, Any]], str]
MODELS = Path("out/models")
DENSITIES = (0.001, 0.01, 0.019, 0.02, 0.046, 0.05, 0.119, 0.2, 0.5)
SPEED_DENSITIES = (0.01, 0.02, 0.1)
MEMORY_DENSITIES = (0.02, 0.2, 0.5)
RATES = (1e-6, 3e-6, 1e-5, 2e-4)
TRAINED_STEPS = 3
SIZE_ROWS, SIZE_COLUMNS = 4096, 4096
# Bytes for each changed weight at these shares, container and manifest included.
SIZES = {0.019: (1.25, 0.86), 0.046: (1.10, 0.77), 0.119: (0.94, 0.68)}
OVER_PEER = 1.01
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


def checks(result: Mapping[str, Any]) -> list[Check]:
    found: list[Check] = []
    for row in result["synthetic"]:
        each, label = row["bytes_per_change"], f"{row['wanted']:.1%}"
        for name, limit in zip(OURS, SIZES.get(row["wanted"], ()), strict=False):
            found.append(at_most(f"{name} bytes at {label}", each[name], limit))
        ours = min(each[name] for name in OURS)
        found.append(at_most(f"ours over {PEER} at {label}", ours / each[PEER], OVER_PEER))
        raw = min(row["bytes"][name] for name in OURS) / row["raw_bytes"]
        found.append(at_most(f"ours over raw at {label}", raw, OVER_RAW))
    for row in result["speed"]:
        if row["density"] > 0.03:
            continue
        label = f"{row['density']:.1%}"
        for name, limit in SPEEDS.items():
            # The machine's speed decides more than the code's: it fails nothing.
            speed = row[name]["one"]
            found.append(at_least(f"{name} GB/s a core at {label}", speed, limit, decisive=False))
        share = row["diff"]["one"] / row["read"]["one"]
        found.append(at_least(f"diff of read bandwidth at {label}", share, DIFF_OF_READ))
        for name, limit in SCATTER.items():
            rate = row["scatter"][name]
            found.append(at_least(f"scatter {name} at {label}", rate, limit, decisive=False))
    for row in result["memory"]:
        label = f"{row['level']} at {row['density']:.0%}"
        found.append(
            at_most(f"chunks held to encode, {label}", row["encode_chunks"], MEMORY_CHUNKS)
        )
    for row in result["link"].get("rows", ()):
        label = f"to {row['receivers']} receivers"
        over = row["link_bytes_over_encoded"]
        found.append(at_most(f"link bytes over encoded {label}", over, LINK_BYTES + PACKET_HEADERS))
        found.append(at_least(f"goodput of the link {label}", row["goodput_of_link"], GOODPUT))
        found.append(at_most(f"ready over link time {label}", row["ready_over_link"], READY))
    return found + rank_checks(result["ranks"])


def rank_checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Judge the memory of ranks that share a checkpoint."""
    found = []
    for row in rows:
        label = f"at tensor parallel size {row['ranks']}"
        for when in ("read", "active"):
            name = f"ranks' memory over the checkpoint {label}, {when}"
            found.append(at_most(name, row[when], RANKS_OF_CHECKPOINT))
        found.append(at_most(f"decodes of an update {label}", row["decodes"], 1))
    return found


def field(name: str, shown: str) -> Column:
    return lambda row: format(row[name], shown)


def per_change(scheme: str) -> Column:
    return lambda row: f"{row['bytes_per_change'][scheme]:.3f}"


def speed(name: str) -> Column:
    return lambda row: f"{row[name]['one']:.1f} {row[name]['all']:.1f}"


def table(result: Mapping[str, Any]) -> str:
    schemes = {name: per_change(name) for name in result["synthetic"][0]["bytes_per_change"]}
    timed = [
        name
        for name, value in result["speed"][0].items()
        if isinstance(value, dict) and "one" in value
    ]
    blocks = [
        columns_table(
            "Bytes for each changed weight, synthetic bf16 steps",
            result["synthetic"],
            {"density": field("density", ".2%"), **schemes},
        ),
        columns_table(
            "The same, consecutive checkpoints of a training",
            result["trained"],
            {"rate": field("rate", "g"), "density": field("density", ".2%"), **schemes},
        ),
        columns_table(
            "GB/s of model: one core, all cores",
            result["speed"],
            {"density": field("density", ".1%"), **{name: speed(name) for name in timed}},
        ),
        columns_table(
            "Peak memory beside the weights, in chunks of 64 MiB",
            result["memory"],
            {
                "density": field("density", ".0%"),
                "level": field("level", ""),
                **{n: field(f"{n}_chunks", ".2f") for n in ("encode", "decode", "overwrite")},
            },
        ),
        _link(result["link"]),
    ]
    return "\n".join([*blocks, rank_table(result)])


def rank_table(result: Mapping[str, Any]) -> str:
    """Lay out the memory of ranks and all checks."""
    ranks = columns_table(
        "Host memory of all ranks over the checkpoint: read, an update decoded, it active",
        result.get("ranks", ()),
        {
            "ranks": field("ranks", ""),
            **{name: field(name, ".3f") for name in ("read", "decoded", "active")},
            "decodes": field("decodes", ""),
        },
    )
    blocks = [ranks] if "ranks" in result else []
    return "\n".join([*blocks, checks_table(result["checks"], ".3f")])


def _link(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"A base across a shaped link: skipped, {found['skipped']}\n"
    shape = found["link"]
    return columns_table(
        f"A base across a link of {shape['mbit']} Mbit/s, {shape['delay_ms']} ms,"
        f" {shape['loss_percent']}% loss",
        found["rows"],
        {
            "receivers": field("receivers", ""),
            "encoded MB": lambda row: f"{row['encoded_bytes'] / 1e6:.1f}",
            "link MB": lambda row: f"{row['link_bytes'] / 1e6:.1f}",
            **{f"{name} s": field(f"{name}_s", ".2f") for name in ("link", "fetched", "ready")},
        },
    )


progress = partial(say, "weights")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, PROG, OUT, seed=0)
    parser.add_argument("--only", choices=["ranks"], help="one part alone")
    args = parser.parse_args(argv)
    return reported(PROG, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.only:
        name, result = f"weights-{args.only}", ranks_of(args.seed)
        judged, lay_out = rank_checks(result["ranks"]), rank_table
    else:
        name, result = "weights", measure(args.seed)
        judged, lay_out = checks(result), table
    result["checks"] = judged
    put_both(args.out, name, result, lay_out(result))
    return int(row_verdict(judged) == FAILS)


def measure(seed: int) -> dict[str, Any]:
    from bench.demo.frozen_lake.models import ensure_models

    synthetic = []
    for density in DENSITIES:
        progress(f"synthetic step, {density:.1%} of the weights change")
        step = adam_step(SIZE_ROWS, SIZE_COLUMNS, rate_for(density), seed)
        synthetic.append({"wanted": density, **sizes([step])})
    fast = []
    for density in SPEED_DENSITIES:
        progress(f"speed at {density:.0%}")
        fast.append(speeds(rate_for(density), seed))
    progress("memory")
    memory = [row for density in MEMORY_DENSITIES for row in peaks(rate_for(density), seed)]
    policy = ensure_models(MODELS, False, lambda label, share: None).policy_dir
    trained = []
    for rate in RATES:
        progress(f"training at a rate of {rate:g}")
        for number, steps in enumerate(training_steps(policy, rate, TRAINED_STEPS, seed)):
            trained.append({"rate": rate, "step": number, **sizes(steps)})
    result: dict[str, Any] = {
        "machine": {**machine(), "seed": seed},
        "synthetic": synthetic,
        "speed": fast,
        "memory": memory,
        "trained": trained,
    }
    progress("a base across a shaped link")
    result["link"] = link_figures(seed)
    return result | ranks_of(seed)


def ranks_of(seed: int) -> dict[str, Any]:
    """Measure the memory of ranks that share a checkpoint, and nothing else."""
    progress("ranks that share a checkpoint")
    return {"ranks": rank_memory(seed)}


if __name__ == "__main__":
    sys.exit(main())
