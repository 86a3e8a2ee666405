"""Each alert has a runbook; each whole command in pages for operators is one of today's `rose`."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from operator_files import ROOT, RUNBOOKS, alerts

from rose.cli.main import parser_of
from rose.errors import ConfigError

BOOKS = sorted(RUNBOOKS.glob("*.md"))
# Generated pages are checked where they are made.
PAGES = [p for p in sorted((ROOT / "docs" / "operators").glob("*.md")) if p.name != "cli.md"]
HEADINGS = ["Impact", "Diagnosis", "Steps"]
# Commands of a diagnosis: they only read.
READS = {
    "status", "nodes", "replicas", "top", "explain", "audit", "doctor", "jobs", "policy", "certs",
}  # fmt: skip
CHANGES = re.compile(r"rose (policy (set|apply|delete)|certs (init|issue)|jobs end)")
# Words that stand for an operator's own.
FIGURE = re.compile(r"\b(FIGURES|TODO|TBD|XXX)\b")
# A part of a command, or one of several to choose from.
PART = re.compile(r"…|\.\.\.|\||\[|<")
# In the text a command may be mentioned without what it is told.
MENTIONED = re.compile(r"required|expected one argument")
parser_of = cache(parser_of)


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return why `rose` does not take a command, "" if it does."""
    _, name, *words = shlex.split(command.replace("ROLE", "node"))
    try:
        parser_of(name).parse_args(words)
    except (ConfigError, KeyError) as error:
        return repr(error)
    except SystemExit:
        return capsys.readouterr().err
    return ""


def in_blocks(page: Path) -> Iterator[str]:
    """Yield commands of blocks; words after a pipe or a `#` are left out."""
    for block in re.findall(r"^ *```bash\n(.*?)```", page.read_text("utf-8"), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.match(r"\s*(?:while |if |! )?(rose .*)", line):
                yield re.split(r"\s[#|>&;]|;|\)", found[1])[0].strip()


CASES = [
    pytest.param(command, page in BOOKS, id=f"{page.stem}: {command}"[:80])
    for page in (*PAGES, *BOOKS)
    for command in dict.fromkeys(
        [*in_blocks(page), *re.findall(r"`(rose [a-zA-Z-]+ [^`]+)`", page.read_text("utf-8"))]
    )
    if not PART.search(command)
]


@pytest.mark.parametrize(("command", "whole"), CASES)
def test_every_command_is_one_that_rose_takes(
    command: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(command, capsys)
    assert not said or (not whole and MENTIONED.search(said)), f"`{command}` is refused: {said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_waits_for_its_figures(page: Path) -> None:
    assert not FIGURE.findall(page.read_text(encoding="utf-8"))


def test_there_are_commands_to_check() -> None:
    assert len(CASES) > 100


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    assert [page.stem for page in BOOKS] == sorted(rule["alert"] for rule in alerts())
    text = (RUNBOOKS.parent / "alerts.md").read_text(encoding="utf-8")
    for rule in alerts():
        name, severity = rule["alert"], rule["labels"]["severity"]
        assert f"| [{name}](runbooks/{name}.md) | {severity} |" in text


@pytest.mark.parametrize("page", BOOKS, ids=lambda page: page.stem)
def test_a_runbook_says_what_to_look_at_and_its_diagnosis_changes_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS
    assert re.findall(r"^# (.+)$", text, re.M) == [page.stem]
    assert re.search(r"^1\. ", text, re.M)
    block = re.search(r"```bash\n(.*?)```", text, re.S)
    assert block, "a runbook says what to look at"
    for line in block[1].splitlines():
        assert line.split()[0] == "rose"
        assert line.split()[1] in READS
        assert not CHANGES.match(line)
