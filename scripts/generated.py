"""Files and parts of pages that scripts generate: write them, or with --check name stale ones."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


def with_part(page: str, name: str, part: str) -> str:
    """Return a page with the text between its markers of this name replaced. Raises ValueError."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    return (
        page[: page.index(begin) + len(begin)] + part.rstrip("\n") + "\n" + page[page.index(end) :]
    )


def with_parts(page: Path, parts: Mapping[str, str]) -> dict[Path, str]:
    """Return the text of a page with several parts as they are now, by its path."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = with_part(text, name, part)
    return {page: text}


def main(
    made: Callable[[], Mapping[Path, str | None]], script: str, argv: Sequence[str] | None = None
) -> int:
    """Write files that differ, and remove those made as None; --check returns 1 for one instead."""
    parser = argparse.ArgumentParser(prog=script)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when one is stale")
    check = parser.parse_args(argv).check
    stale = False
    for path, text in made().items():
        there = path.read_text(encoding="utf-8") if path.exists() else None
        if there == text:
            continue
        stale = True
        if check:
            sys.stderr.write(f"{path.relative_to(ROOT)} is stale: run {script}\n")
        elif text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    return int(check and stale)
