"""Which code was measured."""

import hashlib
import subprocess
from pathlib import Path

MEASURED = ("executor", "slo", "weight_transfer", "rose", "tests/unit")
_DIGITS = 12


def revision_of(root: Path, told: str = "") -> str:
    """The commit; with `+` and a digest of the measured code where that was changed since.

    Without git: `told`, which nobody can check, with `~` and the digest. Results beside the code do
    not count as a change.
    """
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return f"{told or 'unknown'}~{_digest(root)}"
    if not _git(root, "status", "--porcelain", "--", *_present(root)):
        return commit
    return f"{commit}+{_digest(root)}"


def _present(root: Path) -> list[str]:
    return [name for name in MEASURED if (root / name).exists()] or ["."]


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(root), *words],  # noqa: S607 -- the user's own
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for name in MEASURED for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGITS]
