"""House rules that no linter knows: file lengths, machine paths, registry hosts."""

import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 800
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.])/(work|farm|root|opt|home)/\w"),
    "a package registry's host": re.compile(
        r"(pypi|pythonhosted|registry\.npmjs|deb\.debian|download\.pytorch)\.(org|com)"
    ),
}
GENERATED = re.compile(r"rose/(rpc/rose|store/etcd)_pb2")


def tracked_files() -> list[str]:
    """Names of all files that are, or could be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True)
    return [name for name in listing.stdout.splitlines() if Path(name).is_file()]


def complaints(name: str) -> list[str]:
    """What is wrong with one file, a line each."""
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    found = []
    if name.endswith(".py") and not GENERATED.match(name) and len(lines) > MAX_LINES:
        found.append(
            f"{name}: {len(lines)} lines; a file holds one thought, in at most {MAX_LINES}"
        )
    for number, line in enumerate(lines, 1):
        found += [
            f"{name}:{number}: {what}" for what, rule in FORBIDDEN.items() if rule.search(line)
        ]
    return found


if __name__ == "__main__":
    problems = [problem for name in tracked_files() for problem in complaints(name)]
    sys.stdout.write("\n".join(problems or ["tree: clean"]) + "\n")
    sys.exit(bool(problems))
