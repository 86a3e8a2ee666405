"""Every command that a page prints is one that its program takes; what needs no cluster is run.

A block of commands is marked `bash`; one that also shows answers is marked `console`, with `$ `
before its commands. Words in capitals (NODE, HOST:PORT) stand for the reader's own; `…` stands for
more words or, in a file, for fields that are left out.
"""

import asyncio
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest
import yaml
from helm_python import Chart
from markdown_it import MarkdownIt
from pydantic import BaseModel, ValidationError
from safetensors.numpy import save_file

from elastic_scheduler.capacity import crd, policies_of
from rose.cli.main import COMMANDS, parser_of
from rose.contract.gateway import Versions
from rose.contract.replica import GenerateBody
from rose.controller.alerts import read_rules
from rose.core_yaml import documents
from rose.errors import ConfigError
from rose.node.config import NodeConfig, ReplicaConfig
from rose.scheduler.persistence import save_epoch_floor
from rose.security.audit_log import AuditLog, audit_file
from rose.simulation.scenario_file import read_scenario
from rose.store import SqliteStore

ROOT: Final = Path(__file__).resolve().parents[3]
# Generated from the parsers, with examples that a test of the scheduler runs.
GENERATED: Final = {"cli.md", "CHANGELOG.md", "changelog.md"}
PAGES: Final = [
    page
    for pattern in ("*.md", "docs/**/*.md", "helm/**/*.md", "examples/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.name not in GENERATED
]
# Placeholders that a parser would not take as they are.
STANDS_FOR: Final = {"N": "1", "N:HASH": "1:" + "0" * 64}
A_CHOICE: Final = re.compile(r"there is no '[A-Z_]+'; choose from")
# The text mentions commands without all that they need.
MENTIONED: Final = re.compile(r"required|expected (one|at least one) argument")
# Files that a reader has by then, by `rose init`, a build or a command before.
MADE: Final = re.compile(r"run/|models/|out/|wheels/|digests/|[\w-]+\.(?:json|yaml|pem|key|csv)$")
OTHERS: Final = frozenset(
    [
        "curl",
        "openssl",
        "echo",
        "rm",
        "mkdir",
        "find",
        "cat",
        "grep",
        "sort",
        "tw-make",
        "vllm",
        ".",
        "for",
        "done",
        "eval",
    ]
)


class Command(NamedTuple):
    """A simple command of a page; `whole` where it is printed to be typed, in a block's `line`."""

    page: str
    words: tuple[str, ...]
    whole: bool
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


@cache
def code(page: Path) -> tuple[tuple[str, str], ...]:
    """Return the marks and texts of a page's blocks, and `inline` for code between backticks."""
    found = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    blocks = [(each.info, each.content) for each in found if each.type == "fence"]
    inner = (child for each in found for child in each.children or ())
    inline = (("inline", child.content) for child in inner if child.type == "code_inline")
    return (*blocks, *inline)


def simple(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each simple command of a line, without what is assigned before."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    between = ""
    for operator, group in itertools.groupby(lexer, lambda word: set(word) <= set("();<>|&")):
        words = list(group)
        if operator:
            between = words[0]
            continue
        while words and (re.match(r"\w+=", words[0]) or words[0] in ("export", "do", "nice")):
            words.pop(0)
        if words and not set(between) & set("<>"):
            yield tuple(words)
            for word in words:
                if inner := re.fullmatch(r"\$\((.*)\)", word):
                    yield from simple(inner[1])


@cache
def commands() -> tuple[Command, ...]:
    """Return all commands of all pages."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for mark, text in code(page):
            shown = mark != "inline"
            for line in _typed(mark, text).replace("\\\n", " ").splitlines():
                whole = shown or "runbooks" in page.parts
                found += [
                    Command(name, words, whole, line if shown else "") for words in simple(line)
                ]
    return tuple(found)


def _typed(mark: str, text: str) -> str:
    if mark == "console":
        return "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    is_command = mark == "inline" and INLINE.match(text) and not re.search(r"\[|\.\.\.", text)
    return text if mark == "bash" or is_command else ""


# ---- what each program takes ----


def rose(command: Command) -> Iterator[str]:
    words = [STANDS_FOR.get(word, word) for word in command.words[1:] if word != "…"]
    if words[0] not in COMMANDS:
        yield f"there is no `rose {words[0]}`"
        return
    try:
        parser_of(words[0]).parse_args(words[1:])
    except SystemExit as error:
        yield from ("the parser refuses it",) if error.code else ()
    except ConfigError as error:
        partly = not command.whole or "…" in command.words
        if not (partly and MENTIONED.search(str(error))) and not A_CHOICE.search(str(error)):
            yield str(error)


def make(command: Command) -> Iterator[str]:
    text = (ROOT / "Makefile").read_text()
    read = "".join(
        path.read_text() for path in ROOT.glob("scripts/*") if path.is_file() and not path.suffix
    )
    for word in command.words[1:]:
        name, given, _ = word.partition("=")
        variable = re.search(rf"\$\({name}\)", text) or re.search(rf"\${{{name}[:}}]", read)
        if not (variable if given else re.search(rf"^{name}:", text, re.M)):
            yield f"make takes no {name}"


def script(command: Command) -> Iterator[str]:
    path = ROOT / command.words[0]
    if not os.access(path, os.X_OK):
        yield f"{command.words[0]} is no program"
        return
    beside = path.with_name(path.name.replace("-", "_") + ".py")
    text = path.read_text() + (beside.read_text() if beside.exists() else "")
    for word in command.words[1:]:
        if re.fullmatch(r"--[\w-]+", word) and word not in text:
            yield f"it takes no {word}"


def python(command: Command) -> Iterator[str]:
    words = [word for word in command.words if word != "…"]
    if words[1] != "-m":
        if not MADE.match(words[1]) and not (ROOT / words[1]).is_file():
            yield f"there is no {words[1]}"
        return
    path = ROOT / words[2].replace(".", "/")
    files = [path.with_suffix(".py"), path / "__main__.py"]
    if (ROOT / words[2].partition(".")[0]).is_dir() and not any(map(Path.is_file, files)):
        yield f"there is no module {words[2]}"


def pip(command: Command) -> Iterator[str]:
    extras = (ROOT / "pyproject.toml").read_text().partition("optional-dependencies")[2]
    for word in command.words:
        for extra in re.findall(r"\w+", word.partition("[")[2]):
            if not re.search(rf"^{extra} = ", extras, re.M):
                yield f"there is no extra {extra}"


def helm(command: Command) -> Iterator[str]:
    words, values = command.words, dict[str, Any]()
    for option, word in itertools.pairwise(words):
        if option in ("--values", "-f") and not MADE.match(word):
            yield f"there is no {word}"
        if option == "--set":
            *path, last = (inner := word.partition("="))[0].split(".")
            there = values
            for key in path:
                there = there.setdefault(key, {})
            is_list = inner[2].startswith("{")
            there[last] = inner[2][1:-1].split(",") if is_list else yaml.safe_load(inner[2])
    local = [word for word in words if word.startswith("helm/")]
    if any(not (ROOT / word / "Chart.yaml").is_file() for word in local):
        yield f"there is no chart {local}"
    if values:
        refused = chart_values(values)
        # Templates miss what `…` stands for; the schema misses nothing.
        yield from (each for each in refused if "…" not in words or "execution error" not in each)


def kubectl(command: Command) -> Iterator[str]:
    words = command.words
    if "--" in words:
        inner = words[words.index("--") + 1 :]
        yield from rose(command._replace(words=inner)) if inner[0] == "rose" else ()
    kinds = {"deploy": "Deployment", "svc": "Service", "cronjob": "CronJob", "rcp": None}
    for kind, name in re.findall(r"(?:=|\s)(\w+)/(rose-[\w-]+)", " ".join(words)):
        if f"{kinds[kind]}/{name}" not in installed():
            yield f"the chart has no {kind}/{name}"
    for option, word in itertools.pairwise(words):
        if option in ("-n", "--namespace") and word not in ("rose-system", "serving", "training"):
            yield f"the pages install into rose-system, and this is {word}"
        if option == ("-f" if "apply" in words else "--patch-file") and not MADE.match(word):
            yield from () if (ROOT / word).exists() else (f"there is no {word}",)
        if option == "get" and word == "rcp" and "rcp" not in crd()["spec"]["names"]["shortNames"]:
            yield "there is no rcp"


@cache
def chart() -> Chart:
    return Chart.load(str(ROOT / "helm" / "rose"))


@cache
def installed() -> frozenset[str]:
    """Return KIND/NAME of all that a release named rose has, on trial and to stay."""
    stays = {"toolbox": {"enabled": True}, "backup": {"enabled": True}}
    texts = [
        text
        for values in (stays, {"trial": True})
        for name, text in chart().render(values=values, name="rose", namespace="r").items()
        if name.endswith(".yaml")
    ]
    found = (each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if each)
    return frozenset(f"{each['kind']}/{each['metadata']['name']}" for each in found)


def chart_values(values: dict[str, Any]) -> Iterator[str]:
    try:
        chart().render(values=values, name="rose", namespace="rose-system")
    except Exception as error:
        yield f"the chart refuses: {error}"


TAKES: Final[dict[str, Callable[[Command], Iterator[str]]]] = {
    "rose": rose,
    "make": make,
    "helm": helm,
    "kubectl": kubectl,
    "python": python,
    "python3": python,
    ".venv/bin/python": python,
    "pip": pip,
}


INLINE: Final = re.compile(rf"(?:{'|'.join(map(re.escape, TAKES))}|scripts/\S+) [^|]*$")


def faults(command: Command) -> Iterator[str]:
    program = command.words[0]
    if program in TAKES:
        yield from TAKES[program](command)
    elif program.startswith(("scripts/", "examples/")):
        yield from script(command)
    elif program not in OTHERS and not MADE.match(program):
        yield f"{program} is known neither here nor to readers"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_take_the_commands_of_a_page(page: Path) -> None:
    here = str(page.relative_to(ROOT))
    found = [command for command in commands() if command.page == here]
    complaints = [f"{command}: {fault}" for command in found for fault in faults(command)]
    assert not complaints, "\n".join(complaints)


def test_there_are_commands() -> None:
    assert len(commands()) > 500


def test_blocks_of_commands_are_marked() -> None:
    bare = [
        f"{page.relative_to(ROOT)}: {text.splitlines()[0]}"
        for page in PAGES
        for info, text in code(page)
        if info in ("", "text") and INLINE.match(text.removeprefix("$ "))
    ]
    assert not bare, "\n".join(bare)


# ---- files in blocks ----


def whole(model: type[BaseModel], said: Any) -> None:
    """Raise what the model refuses, but for fields that `…` stands for."""
    try:
        model.model_validate(said)
    except ValidationError as error:
        left = [each for each in error.errors() if each["type"] != "missing"]
        assert not left, left


# Fields of a file's first object, and the parser that reads such files.
FILES: Final[list[tuple[set[str], Callable[[Path, Any], object]]]] = [
    ({"setup"}, lambda path, _: read_scenario(path)),
    ({"match"}, lambda path, _: read_rules(path)),
    ({"apiVersion", "kind", "spec"}, lambda _, said: policies_of(said)),
    ({"name"}, lambda _, said: policies_of(said)),
    ({"id", "kind"}, lambda _, said: whole(ReplicaConfig, said)),
    ({"request_id", "token_ids"}, lambda _, said: msgspec.convert(said, GenerateBody)),
    ({"jobs", "replicas"}, lambda _, said: msgspec.convert(said, Versions)),
    ({"replicas"}, lambda _, said: whole(NodeConfig, said)),
    ({"relay", "transport"}, lambda _, said: whole(NodeConfig, said)),
]
# Alertmanager's, Prometheus's, oauth2-proxy's and a host's: the first and the last have own tests.
FOREIGN: Final = ({"route"}, {"rule_files"}, {"extraArgs"}, {"spec"})
# Kueue's and KAI's: test_quota_objects.py.
OTHERS_OBJECTS: Final = ("kueue.x-k8s.io/", "scheduling.run.ai/")
BLOCKS: Final = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (info, text) in enumerate(code(page))
    if info in ("yaml", "json")
]


@pytest.mark.parametrize("text", BLOCKS)
def test_a_file_of_a_page_is_one_that_its_reader_takes(text: str, tmp_path: Path) -> None:
    text = text.replace("sha256:…", "sha256:" + "a" * 64)
    path = tmp_path / "file.yaml"
    path.write_text(re.sub(r", …(?=[]}])", "", text))
    (said, _), *more = documents(path)
    first = said[0] if isinstance(said, list) else said
    if first.get("apiVersion", "").startswith(OTHERS_OBJECTS):
        return
    assert not more
    for names, read in FILES:
        if names <= first.keys():
            read(path, said)
            return
    if not any(names <= first.keys() for names in FOREIGN):
        assert not list(chart_values(said))


# ---- run whole ----

# Beginnings of commands that need no cluster and no engine; what others need comes first. The
# first ones are run in a new folder, the others in one with logs, a store, a trace and checkpoints.
FIRST: Final = [
    *("mkdir", "echo", "rose certs init", "rose certs issue", "rose token key", "rose token issue"),
]
THEN: Final = [
    *("rose certs show", "rose audit verify", "rose audit tail", "rose usage", "rose store backup"),
    *("rose store show", "rose store restore", "rose advise --trace", "rose weights diff"),
    *("rose weights inspect", "rose weights verify"),
]


def prepare(folder: Path) -> None:
    """Write what the commands read: logs, a store, a trace, checkpoints."""
    for name in ("run/logs", "LOG_DIR", "s0", "s1"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for who in ("scheduler", "NODE"):
            log = AuditLog(audit_file(folder / name, who), who)
            log.write("started", {})
            log.close()
        lent = {"seconds": 1.0, "compute_s": 1.0, "byte_s": 1.0, "tokens": 9}
        record = {"t": time.time(), "owner": "chat", "job": "grpo", **lent}
        (folder / name / "usage.jsonl").write_text(json.dumps(record) + "\n")
    rows = "".join(f"2023-11-16 18:{n // 60:02}:{n % 60:02},200,9\n" for n in range(1200))
    (folder / "requests.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    for name, value in (("OLD", 0.0), ("NEW", 1.0)):
        (folder / name).mkdir()
        save_file({"w": np.full((64, 64), value, np.float32)}, folder / name / "model.safetensors")
    for name, file in (("FILE", "certs/ca.pem"), ("MODEL", "NEW"), ("MANIFEST", "DELTA")):
        (folder / name).symlink_to(file)

    async def store() -> None:
        made = SqliteStore(folder / "run" / "store")
        await made.txn((), (save_epoch_floor(7),))
        await made.close()

    asyncio.run(store())


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_commands_that_need_no_cluster_run(tmp_path: Path) -> None:
    lines: dict[str, None] = {}
    for line, parts in itertools.groupby(commands(), lambda command: command.line):
        known = all(
            each.whole
            and "…" not in each.words
            and " ".join(each.words).startswith((*FIRST, *THEN, "openssl rand"))
            for each in parts
        )
        if known:
            # The machine's folders are not a test's.
            lines[line.replace("/var/lib/rose", "run")] = None
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    failed, number = [], 0
    for begins in (FIRST, THEN):
        if begins is THEN:
            prepare(tmp_path)
        for line in (line for begin in begins for line in lines if line.startswith(begin)):
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            number += 1
            if done.returncode:
                failed.append(f"{line}: {done.stderr}")
    assert not failed, "\n".join(failed)
    assert number > 25
