"""Write the table of docs/models.md: what hosts, guests and weight updates do with which family.

    out/models/NAME[.kv].json ── --take ──► bench/results/contract/models.json ──► table

The nightly test tries each family, and compares its result with the committed one.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from scripts.generated import ROOT, main, with_parts

PAGE: Final = ROOT / "docs" / "models.md"
TAKEN: Final = ROOT / "bench" / "results" / "contract" / "models.json"
RUN: Final = ROOT / "out" / "models"
PARTS: Final = ("host", "guest", "weights")
WORKS: Final = "works"
REPLACED: Final = "works, modules replaced"
NOT_RUN: Final = "not run"
Cells = dict[str, str]


def weights_cell(outcome: Mapping[str, Any]) -> str:
    """Return the cell of a family's weight updates: WORKS, or the line that refused."""
    if outcome["refused"]:
        return re.sub(r"\[rose:\w+\] ", "", outcome["refused"])
    whole = outcome["updates"] == 2 and outcome["equal"] and not outcome["missed"]
    if not whole or outcome["flipped"]:
        return f"broken: {json.dumps(outcome)}"
    return REPLACED if outcome["packed"] else WORKS


def kv_cells(outcome: Mapping[str, Any]) -> Cells:
    """Return the cells of a family's guest and host."""
    broken = f"broken: {outcome['lost']} blocks in use lost content" if outcome["lost"] else ""
    return {part: broken or outcome[part] for part in ("guest", "host")}


def results() -> dict[str, dict[str, Cells]]:
    """Return the committed cells by engine and family."""
    found: dict[str, dict[str, Cells]] = json.loads(TAKEN.read_text(encoding="utf-8"))
    return found


def take() -> None:
    """Add what the last runs found."""
    known = results()
    for path in sorted(RUN.glob("*.json")):
        outcome = json.loads(path.read_text(encoding="utf-8"))
        cells = known.setdefault(outcome.get("engine", "vLLM"), {}).setdefault(
            outcome["family"], {}
        )
        if path.name.endswith(".kv.json"):
            cells |= kv_cells(outcome)
        else:
            cells["weights"] = weights_cell(outcome)
    TAKEN.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def table() -> Iterator[str]:
    """Yield the lines of the table, and of the lines by which families are refused."""
    found = results()
    yield f"| family | {' | '.join(f'{e}: {part}' for e in found for part in PARTS)} |\n"
    yield "| --- |" + " --- |" * len(found) * len(PARTS) + "\n"
    families = dict.fromkeys(family for cells in found.values() for family in cells)
    lines: dict[str, list[str]] = {}
    for family in families:
        words = []
        for engine, cells in found.items():
            for part in PARTS:
                cell = cells.get(family, {}).get(part, NOT_RUN)
                if cell not in (WORKS, REPLACED, NOT_RUN):
                    lines.setdefault(cell, []).append(f"{family} on {engine}, {part}")
                    cell = "**broken**" if cell.startswith("broken") else "refused"
                words.append(cell)
        yield f"| {family} | {' | '.join(words)} |\n"
    yield "\n| | refused with |\n| --- | --- |\n"
    for line, where in lines.items():
        yield f"| {'; '.join(where)} | {line} |\n"


def page() -> dict[Path, str]:
    """Return the page with its table as it is now."""
    return with_parts(PAGE, {"models": "\n" + "".join(table()) + "\n"})


if __name__ == "__main__":
    if "--take" in sys.argv:
        take()
    sys.exit(main(page, "scripts/models-table", [w for w in sys.argv[1:] if w != "--take"]))
