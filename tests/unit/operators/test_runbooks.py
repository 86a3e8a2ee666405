"""Each alert has a runbook, and each command in it is one that today's `rose` takes."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_files import RUNBOOKS, alerts

from rose.cli.main import main

PAGES = sorted(RUNBOOKS.glob("*.md"))
HEADINGS = ["Impact", "Diagnosis", "Steps"]
# Commands of a diagnosis: they only read.
READS = {
    "status", "nodes", "replicas", "top", "explain", "audit", "doctor", "jobs", "policy", "certs",
}  # fmt: skip
CHANGES = re.compile(r"rose (policy (set|apply|delete)|certs (init|issue)|jobs end)")


class Parsed(BaseException):
    """The command line was taken; nothing is carried out."""


def commands(page: Path) -> Iterator[str]:
    """Return commands of blocks and of the text, without the prose about them."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        yield from (line.partition("#")[0].strip() for line in block.splitlines())
    yield from re.findall(r"`(rose [^`]+)`", text)


def diagnosis(page: Path) -> list[str]:
    block = re.search(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    assert block, "a runbook says what to look at"
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    assert [page.stem for page in PAGES] == sorted(rule["alert"] for rule in alerts())


def test_the_list_of_alerts_is_whole_and_says_their_severity() -> None:
    text = (RUNBOOKS.parent / "alerts.md").read_text(encoding="utf-8")
    for rule in alerts():
        name, severity = rule["alert"], rule["labels"]["severity"]
        assert f"| [{name}](runbooks/{name}.md) | {severity} |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_it_means_what_to_look_at_and_what_to_do(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS
    assert re.findall(r"^# (.+)$", text, re.M) == [page.stem]
    assert re.search(r"^1\. ", text, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one_that_rose_takes(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: Any, *args: Any, **options: Any) -> None:
        parse(self, *args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    for command in commands(page):
        words = shlex.split(command)
        assert words[0] == "rose"
        words = ["node" if word == "ROLE" else word for word in words]
        with pytest.raises(Parsed):
            assert not main(words[1:]), f"`{command}` is refused"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_diagnosis_changes_nothing(page: Path) -> None:
    for command in diagnosis(page):
        assert command.split()[1] in READS
        assert not CHANGES.match(command)
