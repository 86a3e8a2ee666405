"""Change decisions that must never go wrong, one at a time, and see that a test notices.

tree ──copy──► folder, unchanged          every test that is named passes
               folder, with one mutant    one of the mutant's tests fails: it is noticed
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from scripts.check_tree import tracked_files

ROOT: Final = Path(__file__).resolve().parents[1]
DATA: Final = ROOT / "scripts" / "mutants.toml"
UNIT: Final = "not engine and not nightly and not chaos"
# A mutant whose tests hang beyond this counts as noticed.
LIMIT_S: Final = 1_800
PASSED, FAILED = 0, 1


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decision gone wrong, and the tests of which at least one has to fail."""

    fault: str
    file: str
    line: str
    changed: str
    tests: tuple[str, ...]

    def stale(self) -> str:
        """Return in a line why the mutant does not fit the tree, "" where it does."""
        try:
            times = (ROOT / self.file).read_text(encoding="utf-8").count(self.line)
        except FileNotFoundError:
            times = 0
        gone = [test for test in self.tests if not (ROOT / test).exists()]
        if times == 1 and not gone:
            return ""
        why = f"{', '.join(gone)} is gone" if gone else f"its line is in {self.file} {times} times"
        return f"{self.fault!r}: {why}; correct {DATA.name}"


def copy_tree(folder: Path) -> None:
    """Copy all files that are, or could be, committed; the environment is shared."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests until one fails; return pytest's exit code and what failed."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", UNIT, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False,
            timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return FAILED, f"no end after {LIMIT_S} s"
    last = done.stdout.strip().splitlines()[-1:]
    return done.returncode, " ".join(
        re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M) or last
    )


def verdicts(folder: Path, mutants: Sequence[Mutant]) -> Iterator[tuple[bool, str]]:
    """Apply each mutant alone; yield True where a test noticed, and a line that says so."""
    for mutant in mutants:
        path, began_s = folder / mutant.file, time.monotonic()
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutant.line, mutant.changed), encoding="utf-8")
        code, why = run_tests(folder, mutant.tests)
        path.write_text(text, encoding="utf-8")
        word = {PASSED: "NOT NOTICED", FAILED: "noticed"}.get(code, f"NOT RUN ({code})")
        took_s = time.monotonic() - began_s
        yield code == FAILED, f"{word}: {mutant.fault} [{mutant.file}, {took_s:.0f} s] {why}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print each mutant's verdict; 1 where one is not noticed or stale, 2 where a test fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="take mutants whose fault or file contains one")
    parser.add_argument("--check", action="store_true", help="only look for lines that are gone")
    args = parser.parse_args(argv)
    chosen = [
        mutant
        for mutant in msgspec.toml.decode(DATA.read_bytes(), type=dict[str, list[Mutant]])[
            "mutants"
        ]
        if not args.words or any(word in mutant.fault + mutant.file for word in args.words)
    ]
    stale = [line for mutant in chosen if (line := mutant.stale())]
    sys.stderr.writelines(f"mutants: {line}\n" for line in stale)
    fitting = [mutant for mutant in chosen if not mutant.stale()]
    if args.check or not fitting:
        return bool(stale or not chosen)
    with tempfile.TemporaryDirectory(prefix="rose-mutants-") as name:
        folder = Path(name)
        copy_tree(folder)
        code, why = run_tests(folder, sorted({test for each in fitting for test in each.tests}))
        if code != PASSED:
            sys.stderr.write(f"mutants: without any mutant a test fails: {why}\n")
            return 2
        noticed = 0
        for good, line in verdicts(folder, fitting):
            noticed += good
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"{noticed} of {len(chosen)} mutants noticed, {len(stale)} stale\n")
    return noticed != len(chosen)


if __name__ == "__main__":
    sys.exit(main())
