"""House rules that no linter knows: file lengths, machine paths and registry hosts in tracked files."""

import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 400
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.])/(work|farm|root|opt|home)/\w"),
    "a package registry's host": re.compile(
        r"pypi\.org|pythonhosted\.org|registry\.npm" + r"js|deb\.deb" + r"ian\.org|download\.pyt" + "orch"
    ),
}
EXEMPT = {"scripts/check_tree.py"}
GENERATED = re.compile(r"rose/rpc/rose_pb2")


def tracked_files() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True,
    )
    return [name for name in listing.stdout.splitlines() if Path(name).is_file()]


def complaints(name: str) -> list[str]:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    found = []
    lines = text.splitlines()
    if name.endswith(".py") and not GENERATED.match(name) and len(lines) > MAX_LINES:
        found.append(f"{name}: {len(lines)} lines; a file holds one noun in at most {MAX_LINES}")
    if name in EXEMPT:
        return found
    for number, line in enumerate(lines, 1):
        found += [f"{name}:{number}: {what}" for what, rule in FORBIDDEN.items() if rule.search(line)]
    return found


if __name__ == "__main__":
    problems = [problem for name in tracked_files() for problem in complaints(name)]
    print("\n".join(problems) or "tree: clean")
    sys.exit(bool(problems))
