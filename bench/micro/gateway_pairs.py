"""`python -m bench.micro.gateway_pairs OLD NEW [OLD NEW …]`: two states of the gateway compared.

Each is a gateway.json of `bench.gateway`; those of a pair were measured one after the other, in the
trees of the two states. Prints for each row of ROSE's the ratio of NEW to OLD, of medians over the
pairs with its 95% interval: time added until a turn's first token, and the gateway's processor time
for a turn.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.checks import text_table
from bench.gateway import KEYS, ROSE
from bench.trainers.engines import ratio_of_medians, ratio_text
from rose.compare.bootstrap import PairedWindow

Row = Mapping[str, Any]
FIGURES: dict[str, Callable[[Row], float]] = {
    "first token": lambda row: float(row["added_ttft_p50_s"]),
    "processor": lambda row: float(row["router_busy"]) / float(row["turns_per_s"]),
}


def rows_of(path: Path) -> dict[tuple[Any, ...], Row]:
    """Return ROSE's rows of a result, by engine, router, wire and number of streams."""
    rows = json.loads(path.read_text())["rows"]
    return {tuple(row[key] for key in KEYS): row for row in rows if row["router"] == ROSE}


def compared(paths: Sequence[Path]) -> list[list[str]]:
    """Return a line for each row that all results have."""
    read = [*map(rows_of, paths)]
    pairs = [*zip(read[::2], read[1::2], strict=True)]
    lines = []
    for key in pairs[0][0]:
        if not all(key in rows for pair in pairs for rows in pair):
            continue
        line = [str(part) for part in key]
        for figure in FIGURES.values():
            windows = [PairedWindow([figure(new[key])], [figure(old[key])]) for old, new in pairs]
            line.append(ratio_text(ratio_of_medians(windows)))
        lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.micro.gateway_pairs", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT")
    paths = parser.parse_args(argv).results
    if len(paths) % 2:
        parser.error("give pairs: OLD NEW")
    title = f"{len(paths) // 2} pairs, NEW over OLD"
    sys.stdout.write(text_table(title, [*KEYS, *FIGURES], compared(paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
