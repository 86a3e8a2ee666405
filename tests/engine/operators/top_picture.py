"""A picture of `rose top` for the docs: `python -m tests.engine.operators.top_picture [FILE]`.

One frame over the stand-in nodes of the dashboard's tests, as a terminal of 150 columns shows it.
"""

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from rose.cli.cluster.top import Rates, fitted_view, frame_view
from rose.operate.fleet import fleet_of
from tests.harness.dashboard_fleet import DashboardFleet

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "_static" / "top.svg"
NODES, COLUMNS, LINES = 10, 150, 26
# Rich's own asks a network for its font.
FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.S)


def picture() -> str:
    """The frame as SVG."""
    fleet = DashboardFleet(NODES).play(90)
    rates = Rates(lambda: fleet.now_s)
    rates.frame(fleet_of(fleet.core.status(fleet.now_s)))
    fleet.play(2)
    view = frame_view(rates.frame(fleet_of(fleet.core.status(fleet.now_s))), "")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(fitted_view(view, LINES))
    form = FONTS.sub("", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="rose top", theme=MONOKAI, code_format=form, unique_id="top")


if __name__ == "__main__":
    (Path(sys.argv[1]) if sys.argv[1:] else PICTURE).write_text(picture(), encoding="utf-8")
