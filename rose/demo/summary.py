"""The last thing a run prints: every claim with its measurement and verdict."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose.demo.claims import Claim
from rose.demo.report_text import claim_row

STYLES = {"HOLDS": "green", "FAILS": "bold red", "INCONCLUSIVE": "yellow"}
# Wide enough for every claim on one line each, also where stdout is a file.
MIN_WIDTH = 120


def print_summary(claims: Sequence[Claim], out: Path) -> None:
    """Write the table of claims and where the report is."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in ("claim", "measured", "95% interval", "must be", "verdict"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for claim in claims:
        table.add_row(*claim_row(claim), style=STYLES[claim.verdict])
    console.print(table)
    console.print(f"report: {out / 'report.md'}   check it: rose demo verify {out}")
