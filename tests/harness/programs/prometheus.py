"""A real Prometheus on loopback, and promtool, where they can be had."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose.addresses import free_port
from tests.harness.waiting import PATIENCE_S


def _found(name: str) -> Path | None:
    """A program: in the folder ROSE_PROMETHEUS_BIN, where the script puts it, or on the PATH."""
    folder = os.environ.get("ROSE_PROMETHEUS_BIN")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tried = (
        Path(folder) / name if folder else None,
        cache / "rose-prometheus" / "bin" / name,
        shutil.which(name),
    )
    return next((Path(each) for each in tried if each and Path(each).is_file()), None)


PROMETHEUS, PROMTOOL = _found("prometheus"), _found("promtool")
ALERTMANAGER = _found("alertmanager")
WHERE = "`scripts/prometheus` fetches it, ROSE_PROMETHEUS_BIN=FOLDER names its folder"
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=f"needs promtool: {WHERE}")
needs_alertmanager = pytest.mark.skipif(ALERTMANAGER is None, reason=f"needs alertmanager: {WHERE}")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason=f"needs prometheus: {WHERE}")


def promtool(*words: str) -> "subprocess.CompletedProcess[str]":
    assert PROMTOOL is not None
    return subprocess.run([str(PROMTOOL), *words], capture_output=True, text=True, check=False)


class Prometheus:
    """One that scrapes each target every second."""

    def __init__(self, url: str) -> None:
        self.url = self._url = url

    def samples(self, expression: str) -> list[dict[str, Any]]:
        """The answer to an instant query. AssertionError where it is refused."""
        return list(self._get("query", query=expression)["result"])

    def troubles(self) -> dict[str, str]:
        """Why a target was not scraped the last time, or not yet, by its job's name."""
        targets = self._get("targets")["activeTargets"]
        said = {each["labels"]["job"]: each for each in targets}
        return {
            name: each["lastError"] or each["health"]
            for name, each in said.items()
            if each["health"] != "up"
        }

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **query: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return dict(said["data"])


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str], rules: Path) -> Iterator[Prometheus]:
    """Scrape `targets`, by their names, and follow `rules` with all intervals a second long."""
    assert PROMETHEUS is not None
    said = yaml.safe_load(rules.read_text(encoding="utf-8"))
    for group in said["groups"]:
        group["interval"] = "1s"
    quick = folder / "rules.yaml"
    quick.write_text(yaml.safe_dump(said, sort_keys=False), encoding="utf-8")
    jobs = [
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [address]}]}
        for name, address in targets.items()
    ]
    seconds = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    whole = {"global": seconds, "rule_files": [str(quick)], "scrape_configs": jobs}
    options = {"storage.tsdb.path": folder / "tsdb", "log.level": "warn"}
    with _running(PROMETHEUS, folder, whole, options) as url:
        yield Prometheus(url)


class Alertmanager:
    """One that is told of alerts as a Prometheus tells it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def tell(self, labels: Mapping[str, str], *, over: bool = False) -> None:
        """Post an alert that begins now, or is over."""
        begun = datetime.now(UTC) - timedelta(minutes=1)
        said: dict[str, object] = {"labels": labels, "startsAt": begun.isoformat()}
        if over:
            said["endsAt"] = datetime.now(UTC).isoformat()
        request = urllib.request.Request(
            f"{self._url}/api/v2/alerts",
            json.dumps([said]).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200


@contextmanager
def alertmanager(folder: Path, config: Mapping[str, Any]) -> Iterator[Alertmanager]:
    """Run one with this configuration."""
    assert ALERTMANAGER is not None
    options = {"storage.path": folder / "alertmanager", "cluster.listen-address": ""}
    with _running(ALERTMANAGER, folder, config, options) as url:
        yield Alertmanager(url)


@contextmanager
def _running(
    program: Path, folder: Path, config: Mapping[str, Any], options: Mapping[str, object]
) -> Iterator[str]:
    """Run a program of Prometheus until the end; give its address once it is ready."""
    file = folder / f"{program.name}.log"
    said, port = folder / f"{program.name}.yaml", free_port()
    said.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    own = {"config.file": said, "web.listen-address": f"127.0.0.1:{port}"}
    with file.open("wb") as log:
        words = [f"--{name}={value}" for name, value in {**own, **options}.items()]
        process = subprocess.Popen([str(program), *words], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _until_ready(url, process, file)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready"):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{log.stem} is not ready: {log.read_text()[-2000:]}")


_TOKEN = re.compile(
    r"""
    (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<range>\[[^\]]*\])
  | (?P<number>\d[\w.]*)
  | (?P<word>[A-Za-z_:$][\w:]*)
  | (?P<sign>=~|!~|!=|==|>=|<=|[^\s\w])
    """,
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "start", "end", *_GROUPING}


@dataclass
class Asked:
    """metrics: labels that stand in the braces of each; grouped: labels of by, on and the like."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)


def asked_by(expression: str) -> Asked:
    """The names in an expression. Raises ValueError for brackets that do not match."""
    tokens = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(expression)]
    _check_brackets([text for kind, text in tokens if kind == "sign"], expression)
    asked = Asked()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "word":
            continue
        if text in _GROUPING and following == "(":
            end = next(n for n in range(at, len(tokens)) if tokens[n][1] == ")")
            asked.grouped.update(t for k, t in tokens[at:end] if k == "word")
            at = end
        elif text not in _WORDS and following != "(" and following not in _GROUPING:
            labels = asked.metrics.setdefault(text, set())
            if following == "{":
                end = next(n for n in range(at, len(tokens)) if tokens[n][1] == "}")
                labels.update(t for k, t in tokens[at:end] if k == "word")
                at = end
    return asked


def _check_brackets(signs: list[str], expression: str) -> None:
    opened: list[str] = []
    for sign in signs:
        if sign in "([{":
            opened.append({"(": ")", "[": "]", "{": "}"}[sign])
        elif sign in ")]}" and (not opened or opened.pop() != sign):
            raise ValueError(f"brackets do not match: {expression}")
    if opened:
        raise ValueError(f"brackets do not match: {expression}")
