"""House rules that no linter knows: lengths, machine paths, registry hosts, plain English."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

MAX_LINES = 800
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.])/(work|farm|root|opt|home)/\w"),
    "a package registry's host": re.compile(
        r"(pypi|pythonhosted|registry\.npmjs|deb\.debian|download\.pytorch)\.(org|com)"
    ),
}
# A docstring or comment that opens with one of these words leaves out what it speaks of.
REFUSED = re.compile(
    r"\s*(Of|That of|Those|What|Whose|Who|Whether|How|Where|When|Which|As|So|It|For|To)\b"
)
GENERATED = re.compile(r"rose/(rpc/rose|store/etcd)_pb2")


def tracked_files() -> list[str]:
    """Names of all files that are, or could be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True)
    return [name for name in listing.stdout.splitlines() if Path(name).is_file()]


def strings(nodes: Iterable[ast.AST]) -> list[ast.Constant]:
    """Return the docstrings among the nodes of a tree, those of attributes too."""
    lone = [node.value for node in nodes if isinstance(node, ast.Expr)]
    return [node for node in lone if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def openings(text: str) -> list[tuple[int, str]]:
    """Return the line and first words of each docstring or block of comments to be reworded."""
    texts = [(node.lineno, str(node.value)) for node in strings(ast.walk(ast.parse(text)))]
    above = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("# ") and not above.startswith("#"):
            texts.append((number, stripped[2:]))
        above = stripped
    return [(at, words.strip().splitlines()[0]) for at, words in texts if REFUSED.match(words)]


def complaints(name: str) -> list[str]:
    """Return the faults of one file, a line each."""
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    found = []
    if name.endswith(".py") and not GENERATED.match(name) and len(lines) > MAX_LINES:
        found.append(
            f"{name}: {len(lines)} lines; a file holds one thought, in at most {MAX_LINES}"
        )
    if name.endswith(".py") and not GENERATED.match(name):
        found += [f"{name}:{at}: reword: {words}" for at, words in openings("\n".join(lines))]
    for number, line in enumerate(lines, 1):
        found += [
            f"{name}:{number}: {what}" for what, rule in FORBIDDEN.items() if rule.search(line)
        ]
    return found


if __name__ == "__main__":
    problems = [problem for name in tracked_files() for problem in complaints(name)]
    sys.stdout.write("\n".join(problems or ["tree: clean"]) + "\n")
    sys.exit(bool(problems))
