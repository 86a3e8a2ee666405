"""Each alert has a runbook, whose diagnosis changes nothing; no page waits for its figures."""

import re
from pathlib import Path

import pytest
from operator_files import ROOT, RUNBOOKS, alerts

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_waits_for_its_figures(page: Path) -> None:
    assert not FIGURE.findall(page.read_text(encoding="utf-8"))


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
