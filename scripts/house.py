"""Print a table of the tree's size and of its departures from the house style, a row a package."""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.check_tree import GENERATED, MAX_LINES, openings, strings, tracked_files

# "docs" are lines of docstrings.
LINES: Final = ("code", "docs", "comment", "blank", "import")
FAULTS: Final = {
    "circle": "files that are in a circle of imports, made when modules load",
    "upward": "imports of a package that is not on a lower floor",
    "opening": "docstrings that begin with a word that the style refuses",
    "homonym": "classes whose name another file defines too",
    "wide": "constructors of more than 8 parameters",
    "crowd": "folders of more than 14 files",
    "long": f"files of more than {MAX_LINES} lines",
}
# Each package imports from lower floors alone; what is not here (tests, scripts) imports from all.
# The contracts in pyproject.toml forbid more: executor and elastic_scheduler use slo only.
FLOORS: Final = (
    "slo weight_transfer rose/clock rose/core_yaml rose/direct_http rose/errors rose/release"
    " rose/tracing",
    "executor elastic_scheduler rose/addresses rose/azure_trace rose/compare rose/logs rose/nvml"
    " rose/tokenizer_pool",
    "rose/command_line rose/contract rose/process rose/security",
    "rose/client rose/engines rose/metrics_server rose/proxy rose/replica rose/rpc",
    "rose/operate rose/store rose/weight_distribution",
    "rose/gateway rose/node rose/scheduler",
    "rose/controller rose/integrations rose/profile rose/simulation",
    "rose/advise",
    "rose/dashboard",
    "rose/cli",
    "rose/command rose/main",
    "bench",
)
FLOOR_OF: Final = {name: floor for floor, line in enumerate(FLOORS) for name in line.split()}
MOST_PARAMETERS, MOST_FILES = 8, 14
Fault = tuple[str, str, str]
"""Kind, file or folder, and what a person reads after it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed file; `loads` are the files that it imports when it loads, `imports` all of them."""

    path: str
    text: str
    statements: tuple[ast.stmt, ...]
    loads: frozenset[str]
    imports: tuple[str, ...]


def package_of(path: str) -> str:
    """Return `rose/FOLDER` or `rose/MODULE` for a file of rose, the top-level folder for others."""
    parts = path.removesuffix(".py").split("/")
    return "/".join(parts[:2]) if parts[0] == "rose" else parts[0]


def row_of(path: str) -> str:
    """Return the package, where all modules that lie in rose itself are one."""
    return "rose/*.py" if re.fullmatch(r"rose/\w+\.py", path) else package_of(path)


def statements(nodes: Iterable[ast.AST], *, loads: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield all statements, and True for those that run as soon as the module loads."""
    for node in nodes:
        if isinstance(node, ast.stmt):
            yield node, loads
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        later |= isinstance(node, ast.If) and "'TYPE_CHECKING'" in ast.dump(node.test)
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            yield from statements(getattr(node, part, ()), loads=loads and not later)


def imported(node: ast.stmt, package: str) -> list[str]:
    """Return the full names that an import statement names."""
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: -node.level + 1 or None] if node.level else []
        return [".".join((*parents, *filter(None, (node.module,)), a.name)) for a in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def source(path: str, modules: Mapping[str, str]) -> Source:
    """Parse a file, and find the files that it imports; `modules` maps names to paths."""
    text = Path(path).read_text(encoding="utf-8")
    package = path.rpartition("/")[0].replace("/", ".")
    every = list(statements(ast.parse(text).body, loads=True))
    imports: dict[str, bool] = {}
    for name, loads in ((name, loads) for node, loads in every for name in imported(node, package)):
        # Tests import helpers beside them by their bare names.
        beside = f"{package}.{name.partition('.')[0]}"
        known = beside if path.startswith("tests/") and beside in modules else name
        while known and known not in modules:
            known = known.rpartition(".")[0]
        if known and modules[known] != path and not GENERATED.match(modules[known]):
            imports[modules[known]] = loads or imports.get(modules[known], False)
    loaded = frozenset(file for file, loads in imports.items() if loads)
    return Source(path, text, tuple(node for node, _ in every), loaded, tuple(imports))


def line_kinds(file: Source) -> Counter[str]:
    """Count the lines of each kind in LINES; blank lines of a docstring are part of it."""
    spans: list[tuple[ast.stmt | ast.expr, str]] = [(n, "docs") for n in strings(file.statements)]
    spans += [(n, "import") for n in file.statements if isinstance(n, ast.Import | ast.ImportFrom)]
    known = {
        line: kind for n, kind in spans for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)
    }
    kinds: Counter[str] = Counter()
    for number, line in enumerate(file.text.splitlines(), 1):
        bare = line.strip()
        other = "comment" if bare.startswith("#") else "code" if bare else "blank"
        kinds[known.get(number, other)] += 1
    return kinds


def circles(files: Mapping[str, Source]) -> list[str]:
    """Return the files that import themselves by way of others."""
    graph = {path: set(file.loads) for path, file in files.items()}
    while leaves := {path for path, loads in graph.items() if not loads}:
        graph = {path: loads - leaves for path, loads in graph.items() if path not in leaves}

    def reached(path: str) -> set[str]:
        seen: set[str] = set()
        todo = [path]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    # Files that remain are in a circle, or import one that is.
    return [path for path in graph if path in reached(path)]


def faults_within(file: Source) -> Iterator[Fault]:
    """Yield the faults that a file shows by itself."""
    lines = file.text.count("\n")
    if lines > MAX_LINES:
        yield "long", file.path, f"{lines} lines"
    floor = FLOOR_OF.get(package_of(file.path))
    for target in file.imports:
        same = package_of(target) == package_of(file.path)
        if floor is not None and not same and FLOOR_OF.get(package_of(target), 99) >= floor:
            yield "upward", file.path, f"imports {target}"
    for line, words in openings(file.text):
        yield "opening", file.path, f"{line}: {words}"
    for node in file.statements:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            if count > MOST_PARAMETERS:
                yield "wide", file.path, f"{node.lineno}: {count} parameters"


def faults_between(files: Mapping[str, Source]) -> Iterator[Fault]:
    """Yield the faults that show in several files together; tests are compared with tests."""
    for path in circles(files):
        yield "circle", path, "imports itself by way of others"
    classes = [
        (path, node.name)
        for path, file in files.items()
        for node in file.statements
        if isinstance(node, ast.ClassDef)
    ]
    places = Counter((path.startswith("tests/"), name) for path, name in set(classes))
    for path, name in classes:
        if places[path.startswith("tests/"), name] > 1:
            yield "homonym", path, name
    for folder, count in Counter(path.rpartition("/")[0] for path in files).items():
        if count > MOST_FILES:
            yield "crowd", folder + "/", f"{count} files"


def table(files: Mapping[str, Source], faults: Iterable[Fault]) -> Iterator[str]:
    """Yield the table's lines, the totals last."""
    counts: dict[str, Counter[str]] = {}
    for file in files.values():
        row = counts.setdefault(row_of(file.path), Counter())
        row.update(line_kinds(file), files=1)
    for kind, path, _ in faults:
        counts[row_of(path)][kind] += 1
    heads = ("files", *LINES, *FAULTS)
    rows = dict(sorted(counts.items()))
    rows["total"] = sum(counts.values(), Counter())
    yield "package".ljust(24) + "".join(f"{head:>8}" for head in heads)
    for name, row in rows.items():
        yield name.ljust(24) + "".join(f"{row[head]:>8}" for head in heads)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or with --list the faults of one column."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in FAULTS.items())
    parser.add_argument("--list", choices=FAULTS, metavar="COLUMN", help=kinds)
    args = parser.parse_args(argv)
    paths = [name for name in tracked_files() if name.endswith(".py")]
    modules = {name[:-3].replace("/", ".").removesuffix(".__init__"): name for name in paths}
    files = {path: source(path, modules) for path in paths if not GENERATED.match(path)}
    faults = [fault for file in files.values() for fault in faults_within(file)]
    faults += faults_between(files)
    listed = [f"{path}: {text}" for kind, path, text in faults if kind == args.list]
    sys.stdout.write("\n".join(listed if args.list else table(files, faults)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
