"""The contract suite: each test names its promise, and each engine keeps it or lacks what it needs.

`pytest.mark.promise("host.idle")` says what a test proves; `contract_engine` is the engine. What
came out is added to out/contract.json; `scripts/contract-table --take` puts it in docs/engines.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from contract_engines import ENGINES, ROOT, ContractEngine
from contract_promises import PROMISES

from rose.engines import EngineKind
from rose.engines.spec import lacking

BY_ID = {promise.id: promise for promise in PROMISES}
RESULTS = ROOT / "out/contract.json"
_found: dict[str, dict[str, str]] = {}


def _marks(engine: ContractEngine) -> list[pytest.MarkDecorator]:
    # vLLM's promises have test suites of their own in CI.
    nightly = [pytest.mark.nightly] if engine.kind is EngineKind.VLLM else []
    return [pytest.mark.skipif(not engine.there, reason=engine.missing), *nightly]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contract_engine" in metafunc.fixturenames:
        params = [pytest.param(e, id=e.name, marks=_marks(e)) for e in ENGINES]
        metafunc.parametrize("contract_engine", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def contract_engine(request: pytest.FixtureRequest) -> ContractEngine:
    """The engine under test."""
    engine = request.param
    assert isinstance(engine, ContractEngine)
    return engine


def _of(item: pytest.Item) -> tuple[ContractEngine, str] | None:
    mark, params = item.get_closest_marker("promise"), getattr(item, "callspec", None)
    if mark is None or params is None or "contract_engine" not in params.params:
        return None
    return params.params["contract_engine"], mark.args[0]


@pytest.fixture(autouse=True)
def _kept(request: pytest.FixtureRequest) -> None:
    """Leave out what an engine lacks by name; a promise that nobody wrote down fails."""
    found = _of(request.node)
    if found is None:
        return
    engine, id_ = found
    needs = BY_ID[id_].needs
    if needs is not None and (why := lacking(engine.kind, needs)) is not None:
        pytest.skip(f"{engine.name} cannot: {why}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report, found = outcome.get_result(), _of(item)  # type: ignore[attr-defined]
    if found is None or (report.when != "call" and not report.failed):
        return
    engine, id_ = found
    cells = _found.setdefault(engine.name, {})
    if cells.get(id_) != "failed" and report.outcome != "skipped":
        cells[id_] = report.outcome


def pytest_sessionfinish() -> None:
    if not _found:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for engine, cells in _found.items():
        known[engine] = known.get(engine, {}) | cells
    RESULTS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
