"""Every whole command in the pages for operators is one that today's `rose` takes."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_files import ROOT

from rose.cli.main import main

# Generated pages are checked where they are made; runbooks' commands have a test of their own.
PAGES = [p for p in sorted((ROOT / "docs" / "operators").glob("*.md")) if p.name != "cli.md"]
# Words that stand for an operator's own.
FIGURE = re.compile(r"\b(FIGURES|TODO|TBD|XXX)\b")
# A part of a command, or one of several to choose from.
PART = re.compile(r"…|\.\.\.|\||\[|<")
# In the text a command may be mentioned without what it is told.
MENTIONED = re.compile(r"required|expected one argument")


class Parsed(BaseException):
    """The command line was taken; nothing is carried out."""


def commands(page: Path) -> Iterator[str]:
    """Return commands of blocks and of the text; words after a pipe or a `#` are left out."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^ *```bash\n(.*?)```", text, re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:while |if |! )?(rose .*)", line)
            if found:
                yield re.split(r"\s[#|>&;]|;|\)", found[1])[0].strip()
    yield from re.findall(r"`(rose [a-z-]+ [^`]+)`", text)


CASES = [
    pytest.param(command, id=f"{page.stem}: {command}"[:80])
    for page in PAGES
    for command in dict.fromkeys(commands(page))
    if not PART.search(command)
]


@pytest.mark.parametrize("command", CASES)
def test_every_command_is_one_that_rose_takes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: Any, *args: Any, **options: Any) -> None:
        parse(self, *args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    try:
        main(shlex.split(command)[1:])
    except Parsed:
        return
    except SystemExit:
        pass
    said = capsys.readouterr().err
    assert MENTIONED.search(said), f"`{command}` is refused: {said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_waits_for_its_figures(page: Path) -> None:
    assert not FIGURE.findall(page.read_text(encoding="utf-8"))


def test_there_are_commands_to_check() -> None:
    assert len(CASES) > 30
