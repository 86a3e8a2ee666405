"""The page says what each role may do, as the table in force has it."""

import re
from pathlib import Path

from rose.security import RPCS, Role

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"


def test_the_page_has_the_table_that_is_asked() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| call of the scheduler"))
    roles = [Role(cell) for cell in cells(lines[begin])[1:]]
    assert set(roles) == set(Role)
    said: dict[str, dict[Role, str]] = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        method, *may = cells(line)
        said[method.strip("`")] = {
            role: re.sub(r"^yes ?|[(`)]", "", cell)
            for role, cell in zip(roles, may, strict=True)
            if cell
        }
    assert said == {
        method: {role: leave.field for role, leave in rules.items()}
        for method, rules in RPCS.items()
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
