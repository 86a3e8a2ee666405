"""Prose names only what exists: links, files, modules, classes, fields, metrics, flags, targets."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
PACKAGES = ("rose", "executor", "slo", "weight_transfer", "elastic_scheduler", "bench")
LONGEST_LINE = 140

# Flags of vLLM, slime, Docker and pip, which these pages tell readers to give.
OTHERS_FLAGS = {
    "--update-weight-transfer-mode",
    # Options of helm, kubectl, curl and systemd-tmpfiles.
    "--api-versions",
    "--cacert",
    "--create",
    "--create-namespace",
    "--for",
    "--from",
    "--from-file",
    "--namespace",
    "--patch-file",
    "--reuse-values",
    "--subresource",
    "--timeout",
    "--type",
    "--values",
    # Options of engines and pip.
    "--enable-elastic-ep",
    "--image-processor-backend",
    "--mm-preprocess-cache-size-mb",
    "--offload-rollout",
    "--only-binary",
    "--pid",
    "--platform",
    "--python-version",
    "--tokenizer-mode",
    "--trust-remote-code",
    "--weight-transfer-config",
}

# Files of vLLM, slime and AReaL, which these pages cite.
OTHERS_FILES = {
    "disk_delta.py",
    "update_weight_from_disk_delta.py",
    "external.py",
    "gpu_worker.py",
    "gpu_model_runner.py",
    "http.py",
    "http_utils.py",
    "server_control.py",
    "sglang_engine.py",
    "sglang_remote.py",
    "vllm_remote.py",
}
OTHERS_CLASSES = {"BlockPool", "SchedulingGated"}
OTHERS_NAMES = {
    "blocking_client",  # a reader's own
    "causal_conv1d_fn",  # what SGLang and transformers say
    "full_attention_interval",
    "defer_block_free",
    "determine_available_memory",
    "execute_model",
    "fp8_per_block",  # vLLM's quantisation at load
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "global_step_20",  # folders of checkpoints
    "weight_v000003",
    "process_mrelease",  # Linux's
    "profile_cudagraph_memory",
    "request_memory",
    "reshape_and_cache_flash",
    "step_with_batch_queue",
    "sum_abs",  # a place in a list
    "vllm_server_timeout",  # TRL's
}


class Code(NamedTuple):
    """Code of a page: between backticks, or in a block."""

    page: Path
    text: str
    block: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: `{self.text}`"


@cache
def tokens(page: Path) -> tuple[Token, ...]:
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return tuple(inner for token in parsed for inner in (token, *(token.children or ())))


def codes(*, blocks: bool) -> Iterator[Code]:
    for page in PAGES:
        for token in tokens(page):
            if token.type == "code_inline" or (blocks and token.type == "fence"):
                yield Code(page, token.content, token.type == "fence")


@cache
def sources(*patterns: str) -> str:
    found = (path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())
    return "\n".join(path.read_text(encoding="utf-8") for path in found)


def product() -> str:
    everywhere = tuple(f"{package}/**/*.py" for package in PACKAGES)
    return sources(*everywhere, "examples/*", "scripts/*", "pyproject.toml")


@cache
def names_of_tests() -> frozenset[str]:
    """Return the tests, and the variables that only they read."""
    text = sources(
        "tests/engine/**/*.py", "tests/fuzz/*.py", "tests/trainers/*.py", "tests/unit/**/test_*.py"
    )
    files = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    return frozenset(files.union(re.findall(r"(?<=def )test_\w+|ROSE_\w+", text)))


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    headings = (
        following
        for token, following in zip(tokens(page), tokens(page)[1:], strict=False)
        if token.type == "heading_open"
    )
    return {slug("".join(t.content for t in h.children or ())) for h in headings}


def untrue(found: Iterator[str]) -> None:
    complaints = sorted(set(found))
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    def broken() -> Iterator[str]:
        for token in tokens(page):
            href = str(token.attrs.get("href") or token.attrs.get("src") or "")
            if not href or re.match(r"https?:|mailto:", href):
                continue
            path, _, anchor = href.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or ROOT not in (target, *target.parents):
                yield f"{href}: there is no such file"
            elif anchor and anchor not in anchors(target):
                yield f"{href}: the page has no such heading"

    untrue(broken())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short_enough_to_review(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    # A row of a table is one line, however long.
    long = [n for n, line in enumerate(lines, 1) if len(line) > LONGEST_LINE and line[:1] != "|"]
    assert not long, f"lines {long}: break them after a sentence or a clause"


# Files of a checkout, written from its root; what a run makes is no file of a checkout.
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]*")
MADE_BY_RUNS = re.compile(r"(out|run|wheels|models|RUN_DIR|run_dir|bench/results)/|/")
TOP = {path.name for path in ROOT.iterdir()}


def test_files_exist() -> None:
    def missing() -> Iterator[str]:
        for code in codes(blocks=False):
            path = code.text
            if not FILE.fullmatch(path) or MADE_BY_RUNS.match(path) or path[:1] in "./":
                continue
            if path.split("/")[0] in TOP and not (ROOT / path).exists():
                yield str(code)

    untrue(missing())


@cache
def names_of(module: Path) -> frozenset[str]:
    """Return what a module defines or imports, and `Class.member`."""
    names: set[str] = set()

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.ImportFrom | ast.Import):
                names.update(prefix + (alias.asname or alias.name) for alias in node.names)
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
            targets += node.targets if isinstance(node, ast.Assign) else []
            names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    look(ast.parse(module.read_text(encoding="utf-8")).body, "")
    return frozenset(names)


def exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        rest = ".".join(parts[count:])
        for module in (path.with_suffix(".py"), path / "__init__.py"):
            if module.exists():
                return not rest or rest in names_of(module)
        if path.is_dir() and not rest:
            return True
    return False


NO_MODULE = re.compile(r"rose\.(?:proto|dev|internal|rules\.yaml|fish|sqlite)")
# Types of CloudEvents, `dev.rose.NAME`, are no modules.
DOTTED = re.compile(rf"\b(?<!dev\.)(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+")


def test_modules_and_their_names_exist() -> None:
    def unknown() -> Iterator[str]:
        for code in codes(blocks=True):
            for dotted in DOTTED.findall(code.text):
                if not exists(dotted) and not NO_MODULE.fullmatch(dotted):
                    yield f"{code.page.relative_to(ROOT)}: {dotted}"

    untrue(unknown())


def _known(
    pattern: str, is_known: Callable[[str], object], *, blocks: bool = True
) -> Iterator[str]:
    for code in codes(blocks=blocks):
        for word in re.findall(pattern, code.text):
            if not is_known(word):
                yield f"{code.page.relative_to(ROOT)}: {word}"


def test_modules_named_by_their_file_exist() -> None:
    def unknown() -> Iterator[str]:
        for code in codes(blocks=False):
            if re.fullmatch(r"\w+\.py", code.text) and code.text not in OTHERS_FILES | files():
                yield str(code)

    untrue(unknown())


@cache
def files() -> frozenset[str]:
    return frozenset(path.name for p in (*PACKAGES, "tests") for path in (ROOT / p).rglob("*.py"))


def test_classes_and_tests_exist() -> None:
    words = frozenset(re.findall(r"\w+", product() + sources("rose/rpc/*.proto", "helm/**/*.yaml")))
    known = words | OTHERS_CLASSES | names_of_tests()
    names = r"\b(?:[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+|test_\w+)\b"
    untrue(_known(names, lambda word: word in known, blocks=False))


def test_environment_variables_are_read_by_something() -> None:
    known = names_of_tests() | set(re.findall(r"ROSE_[A-Z0-9_]*[A-Z0-9]", product()))
    untrue(_known(r"\bROSE_[A-Z0-9_]*[A-Z0-9]", known.__contains__))


def test_flags_are_taken_by_something() -> None:
    # The gateway's options are its settings.
    options = re.findall(r"^    (\w+): ", sources("rose/gateway/settings.py"), re.M)
    known = {f"--{name.replace('_', '-')}" for name in options} | OTHERS_FLAGS
    known |= set(re.findall(r"--[a-z][a-z0-9-]+", product()))
    # Benchmarks make an option of each number that their parser is given.
    numbers = re.findall(r"""(\w+)(?:": |=)\d""", sources("bench/**/*.py"))
    known |= {f"--{name.replace('_', '-')}" for name in numbers}
    known |= {f"--no-{flag[2:]}" for flag in known}
    untrue(_known(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", known.__contains__))


def test_fields_events_and_metrics_exist() -> None:
    others = sources("rose/rpc/*.proto", "pyproject.toml", "helm/**/*.yaml", "tests/rules/*.yaml")
    # The page of metrics is made from the registries, and a test compares them.
    others += sources("docs/operators/metrics.md")
    known = set(re.findall(r"\w+", product() + others))
    names = r"(?<![\w/.-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w/*…]|\.\w)"
    known |= OTHERS_NAMES | names_of_tests()
    # Prometheus adds that to a counter's name.
    untrue(_known(names, lambda word: known & {word, word.removesuffix("_total")}, blocks=False))


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    records = [path.name for path in (ROOT / "docs/adr").glob("0*.md")]
    assert [name for name in records if f"]({name})" not in index] == []
