"""Write the tables of docs/engines.md: which engine keeps which promise, and what each cannot do.

    promises, capabilities ──┐
                             ├──► tables, between the page's markers
    results of a run ────────┘

A cell says what was run last: `kept`, `broken`, `not run`; or that the engine cannot, with the
reason below the table. Results are committed, so that the page says the same everywhere.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from contract_engines import ENGINES, SGLANG, VLLM, ContractEngine
from contract_promises import PROMISES, Promise, Side

from rose.engines.spec import LACKS, Capability, EngineKind, lacking
from scripts.generated import ROOT, main, with_parts

PAGE: Final = ROOT / "docs" / "engines.md"
TAKEN: Final = ROOT / "bench" / "results" / "contract" / "engines.json"
VERSIONS: Final = ROOT / "bench" / "results" / "contract" / "versions.json"
PARTS: Final = ("host", "lending", "guest", "replica")
RUN: Final = ROOT / "out" / "contract.json"
WORDS: Final = {"passed": "kept", "failed": "**broken**"}
TITLES: Final = {Side.HOST: "Host", Side.GUEST: "Guest", Side.WEIGHTS: "Weights"}
NAMES: Final = {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}
COLUMNS: Final = (*ENGINES, replace(SGLANG, name=f"{SGLANG.name}, 2 ranks"))
Results = dict[str, dict[str, str]]


def results() -> Results:
    """Return the last outcome of each engine, by promise."""
    found: Results = json.loads(TAKEN.read_text(encoding="utf-8")) if TAKEN.exists() else {}
    return found


def take() -> None:
    """Add what the last run found."""
    known, run = results(), json.loads(RUN.read_text(encoding="utf-8"))
    ids = {promise.id for promise in PROMISES}
    for engine, cells in run.items():
        whole = known.get(engine, {}) | cells
        known[engine] = {id_: cell for id_, cell in whole.items() if id_ in ids}
    TAKEN.parent.mkdir(parents=True, exist_ok=True)
    TAKEN.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def cell(engine: ContractEngine, promise: Promise, found: Results) -> str:
    """Return the table's cell of an engine and a promise."""
    if promise.needs is not None and lacking(engine.kind, promise.needs) is not None:
        return "cannot"
    return WORDS.get(found.get(engine.name, {}).get(promise.id, ""), "not run")


def promise_table(side: Side, found: Results) -> Iterator[str]:
    """A table of one side's promises."""
    yield f"### {TITLES[side]}\n\n"
    yield f"| a {side.value if side is not Side.WEIGHTS else 'replica'} … | "
    yield " | ".join(engine.name for engine in COLUMNS) + " |\n"
    yield "| --- |" + " --- |" * len(COLUMNS) + "\n"
    for promise in PROMISES:
        if promise.side is side:
            cells = " | ".join(cell(engine, promise, found) for engine in COLUMNS)
            yield f"| {promise.says} (`{promise.id}`) | {cells} |\n"
    yield "\n"


def capability_table() -> Iterator[str]:
    """A table of what engines differ in."""
    yield "### Capabilities\n\n"
    yield "| | " + " | ".join(NAMES[kind] for kind in EngineKind) + " |\n"
    yield "| --- |" + " --- |" * len(EngineKind) + "\n"
    for capability in Capability:
        reasons = [LACKS[kind].get(capability) for kind in EngineKind]
        cells = ("yes" if why is None else f"no: {why}" for why in reasons)
        yield f"| {capability.value} | {' | '.join(cells)} |\n"


def version_table() -> Iterator[str]:
    """A table of the versions that `scripts/engine-matrix` looked at."""
    yield "| version | " + " | ".join(PARTS) + " | tests of schedulers and pools | contract |\n"
    yield "| --- |" + " --- |" * (len(PARTS) + 2) + "\n"
    versions = json.loads(VERSIONS.read_text(encoding="utf-8"))
    tables = {engine.name.partition(" ")[2] for engine in ENGINES}
    for version, found in versions.items():
        lacks = found["lacks"]
        cells = [f"lacks {len(lacks[part])} names" if part in lacks else "yes" for part in PARTS]
        cells = [cell.replace(" 1 names", " 1 name") for cell in cells]
        tests = found.get("tests")
        ran = f"{tests['passed']} passed, {tests['failed']} failed" if tests else "not on this CPU"
        below = version.partition("==")[2].removesuffix(".0") in tables
        kept = "below" if below else _kept(found.get("contract"))
        yield f"| `{version}` | {' | '.join(cells)} | {ran} | {kept} |\n"
    yield "\n"
    for version, found in versions.items():
        for part, names in found["lacks"].items():
            others = f" and {len(names) - 1} more" if names[1:] else ""
            yield f"- `{version}`, {part}: no {names[0]}{others}\n"


def _kept(contract: dict[str, str] | None) -> str:
    if not contract:
        return "not run"
    broken = ", ".join(f"`{id_}`" for id_, outcome in contract.items() if outcome == "failed")
    asked = sum(each.needs is None or not lacking(VLLM.kind, each.needs) for each in PROMISES)
    kept = sum(outcome == "passed" for outcome in contract.values())
    return f"{kept} of {asked} kept" + f", **broken:** {broken}" * bool(broken)


def page() -> dict[Path, str]:
    """Return the page with its tables as they are now."""
    found = results()
    sides = [side for side in Side if any(promise.side is side for promise in PROMISES)]
    made = "".join(line for side in sides for line in promise_table(side, found))
    return with_parts(
        PAGE,
        {
            "contract": "\n" + made + "".join(capability_table()) + "\n",
            "versions": "".join(version_table()),
        },
    )


if __name__ == "__main__":
    if "--take" in sys.argv:
        take()
    sys.exit(main(page, "scripts/contract-table", [w for w in sys.argv[1:] if w != "--take"]))
