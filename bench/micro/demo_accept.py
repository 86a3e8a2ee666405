"""The demo's acceptance, seed after seed.

    python -m bench.micro.demo_accept --seeds 12 --controls 3

Each run is `rose demo --accept` in processes of its own; runs share nothing but the two models.
Afterwards each control of the demo runs on a few seeds. A run whose report is there already is not
run again, so what was interrupted goes on where it stopped.

It writes `accept.json` and `accept.md` to --out after each run, and ends with 0 only when
  * no claim of any seed fails, and every exact claim holds in every seed;
  * of all verdicts on measured claims at least nine in ten are HOLDS;
  * every run of a control fails in a claim that must notice.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common.report import parser_of
from bench.demo.cli import CONTROLS
from bench.demo.report.claims import BROKEN_BY_CONTROL
from bench.demo.report.report import number

FIRST_SEED = 101
LEAST_HOLDING = 0.9
# Many times what a run takes: for one that hangs.
RUN_TIMEOUT_S = 1_800.0
VERDICTS = ("HOLDS", "INCONCLUSIVE", "FAILS")


@dataclass(frozen=True, slots=True)
class AcceptRun:
    """One run. `control` empty: an acceptance run. `rc`: what it ended with."""

    seed: int
    control: str
    rc: int
    elapsed_s: float
    claims: list[dict[str, Any]]

    @property
    def noticed(self) -> list[str]:
        """Claims that failed and must, when the run is a control."""
        wanted = BROKEN_BY_CONTROL.get(self.control, ())
        return [c["name"] for c in self.claims if c["verdict"] == "FAILS" and c["name"] in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all seeds; 0 when the acceptance holds."""
    out = Path("out/demo-accept")
    parser = parser_of(__doc__, "bench.micro.demo_accept", out, seeds=12, controls=3)
    parser.add_argument("--only", choices=CONTROLS, action="append", help="only these controls")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    wanted = [(seed, "") for seed in seeds]
    for control in args.only or CONTROLS:
        wanted += [(seed, control) for seed in range(FIRST_SEED, FIRST_SEED + args.controls)]
    done: list[AcceptRun] = []
    for seed, control in wanted:
        done.append(ran(args.out, seed, control))
        write(args.out, done)
        sys.stdout.write(line(done[-1]) + "\n")
        sys.stdout.flush()
    sys.stdout.write((args.out / "accept.md").read_text())
    return int(bool(shortfalls(done)))


def ran(out: Path, seed: int, control: str) -> AcceptRun:
    """Return the run of a seed: what its folder says when it is there, else run now."""
    folder = out / f"{control or 'accept'}-{seed}"
    note = folder / "ran.json"
    if note.is_file():
        return AcceptRun(**json.loads(note.read_text()))
    command = [sys.executable, "-m", "rose.cli", "demo", "--accept", f"--seed={seed}"]
    command += [f"--out={folder}", *([f"--control={control}"] if control else [])]
    # A run that was cut off may have left it; its claims are not this one's.
    (folder / "report.json").unlink(missing_ok=True)
    started_s = time.monotonic()
    with (out / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own program
        try:
            rc = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Not killed: it ends the engines that it started.
            process.terminate()
            rc = process.wait()
    claims: list[dict[str, Any]] = []
    if (folder / "report.json").is_file():
        claims = json.loads((folder / "report.json").read_text())["verdicts"]
    result = AcceptRun(seed, control, rc, round(time.monotonic() - started_s, 1), claims)
    if claims:
        note.write_text(json.dumps(asdict(result)) + "\n")
    return result


def line(run: AcceptRun) -> str:
    """Return a run that ended, in one line."""
    counts = Counter(claim["verdict"] for claim in run.claims)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    verdicts = verdicts if run.claims else "no report; see its log"
    noticed = f" noticed: {', '.join(run.noticed) or 'nothing'};" if run.control else ""
    return f"{run.control or 'accept'} seed {run.seed}:{noticed} {verdicts} ({run.elapsed_s:.0f} s)"


def rows(runs: Sequence[AcceptRun]) -> list[dict[str, Any]]:
    """Return a row for each claim over all seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for claim in run.claims if not run.control else ():
            found.setdefault(claim["name"], []).append(claim)
    return [
        {
            "claim": name,
            "exact": claims[0]["exact"],
            "verdicts": {v: sum(c["verdict"] == v for c in claims) for v in VERDICTS},
            "values": [claim["value"] for claim in claims],
        }
        for name, claims in found.items()
    ]


def shortfalls(runs: Sequence[AcceptRun]) -> list[str]:
    """Return the misses of the bar in words; empty when the runs meet it."""
    missed = [line(run) for run in runs if not run.claims]
    counted: Counter[str] = Counter()
    for row in rows(runs):
        if row["verdicts"]["FAILS"]:
            missed.append(f"{row['claim']}: FAILS {row['verdicts']['FAILS']} times")
        if row["exact"] and row["verdicts"]["INCONCLUSIVE"]:
            missed.append(f"{row['claim']}: exact, and INCONCLUSIVE")
        if not row["exact"]:
            counted.update(row["verdicts"])
    if counted and counted["HOLDS"] < LEAST_HOLDING * counted.total():
        share = counted["HOLDS"] / counted.total()
        missed.append(f"measured claims: {share:.0%} HOLDS, at least {LEAST_HOLDING:.0%}")
    for run in runs:
        if run.control and run.claims and (run.rc or not run.noticed):
            missed.append(f"{run.control} seed {run.seed}: not noticed")
    return missed


def page(runs: Sequence[AcceptRun]) -> Iterator[str]:
    accepted = [run for run in runs if not run.control]
    yield f"# Acceptance of the demo: {len(accepted)} seeds\n"
    yield "| claim | HOLDS | INCONCLUSIVE | FAILS | measured |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for row in rows(runs):
        values = ", ".join(number(value) for value in row["values"])
        counts = " | ".join(str(row["verdicts"][verdict]) for verdict in VERDICTS)
        yield f"| {row['claim']}{' (exact)' if row['exact'] else ''} | {counts} | {values} |"
    controls = [run for run in runs if run.control]
    if controls:
        yield "\n| control | seed | FAILS, as it must | s |"
        yield "| --- | ---: | --- | ---: |"
    for run in controls:
        yield f"| {run.control} | {run.seed} | {', '.join(run.noticed)} | {run.elapsed_s:.0f} |"
    missed = shortfalls(runs)
    yield "\nThe bar is met." if not missed else "\nThe bar is missed:\n"
    yield from (f"- {one}" for one in missed)
    seconds = sorted(run.elapsed_s for run in accepted)
    if seconds:
        yield f"\nAn acceptance run took {seconds[0]:.0f} to {seconds[-1]:.0f} s."


def write(out: Path, runs: Sequence[AcceptRun]) -> None:
    record = {
        "claims": rows(runs),
        "shortfalls": shortfalls(runs),
        "runs": [asdict(run) for run in runs],
    }
    (out / "accept.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "accept.md").write_text("\n".join(page(runs)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
