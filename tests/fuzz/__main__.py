"""`python -m tests.fuzz`: feed every decoder and every HTTP face what nobody would send.

Each `target_*.py` beside this file has functions `run_NAME(data: bytes)`, which may end in nothing
but a return: errors that a caller is promised are caught there. A module is fuzzed in a process of
its own by Atheris (libFuzzer: coverage-guided), which also ends on an input that takes too long or
too much memory. What was found lies under --out and is run again with --replay FILE.

Exit code: 0 when nothing was found, 1 when something was, 2 for bad input.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import find_modules, load

# Kernels compile at their first input, on machines that others use too.
SLOWEST_INPUT_S = 30
MOST_MEMORY_MIB = 2048
# Libraries load and corpora are read before the first input.
START_S = 120
TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class FuzzOutcome:
    """Result of fuzzing one module; `trouble` is empty if nothing was found."""

    module: str
    functions: int
    runs: int
    trouble: str


def fuzz(module: str, seconds: int, seed: int, out: Path) -> FuzzOutcome:
    """Fuzz one module for so long in a process of its own."""
    folder = out / module
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    options = (
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-timeout={SLOWEST_INPUT_S}",
        f"-rss_limit_mb={MOST_MEMORY_MIB}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        "-use_value_profile=1",
    )
    command = [sys.executable, "-m", "tests.fuzz.worker", module, str(folder / "corpus"), *options]
    log = folder / "log.txt"
    with log.open("wb") as sink:
        try:
            code = subprocess.run(
                command, stdout=sink, stderr=subprocess.STDOUT, check=False,
                timeout=seconds + START_S, env=_environment(),
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    text = log.read_text(errors="replace")
    trouble = "" if code == 0 else "\n".join(text.splitlines()[-TAIL_LINES:])
    return FuzzOutcome(module, len(load(module)), _runs(text), trouble)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _runs(text: str) -> int:
    for line in text.splitlines():
        if line.startswith("stat::number_of_executed_units:"):
            return int(line.split()[-1])
    return 0


def _lines(outcomes: Sequence[FuzzOutcome]) -> Iterator[str]:
    yield f"{'target':<24}{'functions':>10}{'inputs':>12}  found"
    for one in outcomes:
        found = "nothing" if not one.trouble else "see below"
        yield f"{one.module:<24}{one.functions:>10}{one.runs:>12,}  {found}"
    for one in outcomes:
        if one.trouble:
            yield f"\n{one.module}:\n{one.trouble}"


def _replay(module: str, path: Path) -> int:
    command = [sys.executable, "-m", "tests.fuzz.worker", module, str(path)]
    return subprocess.run(command, check=False, env=_environment()).returncode


def _parser() -> argparse.ArgumentParser:
    names = find_modules()
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("modules", nargs="*", metavar="TARGET", help=f"of {', '.join(names)} (default: all)")
    add("--seconds", type=int, default=60, metavar="N", help="for all of them together (60)")
    add("--seed", type=int, default=1, metavar="N", help="of the mutations (1)")
    add("--jobs", type=int, default=2, metavar="N", help="processes at once (2)")
    add("--out", type=Path, default=Path("out/fuzz"), metavar="DIR", help="corpora and findings")
    add("--replay", type=Path, metavar="FILE", help="run one input of the one TARGET again")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = _parser()
    args = parser.parse_args(argv)
    modules = args.modules or find_modules()
    unknown = sorted(set(modules) - set(find_modules()))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(find_modules())}")
    if args.replay:
        if len(modules) != 1 or not args.replay.is_file():
            parser.error("--replay takes a file that exists, and one TARGET")
        return _replay(modules[0], args.replay)
    if args.seconds < 1 or args.jobs < 1:
        parser.error("--seconds and --jobs take 1 or more")
    each = max(1, args.seconds * args.jobs // len(modules))
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(lambda name: fuzz(name, each, args.seed, args.out), modules))
    sys.stdout.write("\n".join(_lines(outcomes)) + "\n")
    found = sum(bool(one.trouble) for one in outcomes)
    where = f"; inputs and logs in {args.out}" if found else ""
    sys.stdout.write(f"fuzz: {len(outcomes) - found} targets clean, {found} with findings{where}\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
