"""Engines are shared, counted, and looked at after each test: see `pool` and `engine_starts`.

`pytestmark = pytest.mark.engines(LEFT, RIGHT)` is what a module needs; the fixture `engines` has
them. `versions=VERSIONS` runs it once for each vLLM, `spends=True` says that it leaves an engine
that nobody else can use, so it comes after those that need the same. `starts_others` marks a module
beside which the next engines start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from engine_starts import EngineStarts

if TYPE_CHECKING:
    from pool import EnginePool, PoolSpec, Started

STARTS = pytest.StashKey[EngineStarts]()


def _needs(item: pytest.Item | pytest.Collector) -> tuple[PoolSpec, ...]:
    mark = item.get_closest_marker("engines")
    return mark.args if mark else ()


def _module(item: pytest.Item | pytest.Collector) -> str:
    return item.nodeid.partition("::")[0]


def _plan(items: list[pytest.Item]) -> dict[str, tuple[PoolSpec, ...]]:
    """All modules in their order, and what each needs."""
    return {_module(item): _needs(item) for item in items}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("engines")
    if mark and "versions" in mark.kwargs:
        metafunc.parametrize("engines", mark.kwargs["versions"], indirect=True, scope="module")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that begin with the same engine follow each other, who spends it last; before all
    are those beside which engines can start."""
    place: dict[object, int] = {}
    for number, item in enumerate(items):
        place.setdefault(_needs(item)[:1] or _module(item), number)

    def key(item: pytest.Item) -> tuple[bool, int, bool]:
        mark = item.get_closest_marker("engines")
        return (
            item.get_closest_marker("starts_others") is None,
            place[_needs(item)[:1] or _module(item)],
            bool(mark and mark.kwargs.get("spends")),
        )

    items.sort(key=key)


@pytest.fixture(scope="session", autouse=True)
def engine_starts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineStarts]:
    """All starts of the session, by whatever means."""
    starts = EngineStarts(tmp_path_factory.mktemp("starts") / "starts")
    request.config.stash[STARTS] = starts
    with pytest.MonkeyPatch.context() as patch:
        starts.counted(patch)
        yield starts


@pytest.fixture(scope="session")
def engine_pool(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    engine_starts: EngineStarts,
) -> Iterator[EnginePool]:
    # Imported here: an interpreter with another vLLM may lack what starts engines.
    from pool import EnginePool

    pool = EnginePool(tmp_path_factory.mktemp("pool"), _plan(request.session.items))
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module", autouse=True)
def others(request: pytest.FixtureRequest) -> None:
    """The next engines start beside a module that takes one core, and measures no times."""
    if request.node.get_closest_marker("starts_others") and any(
        _plan(request.session.items).values()
    ):
        request.getfixturevalue("engine_pool").start_early(_module(request.node))


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[list[Started]]:
    """Return the engines of the module's mark, in its order."""
    python = getattr(request, "param", None)
    specs = [replace(spec, python=python or spec.python) for spec in _needs(request.node)]
    with engine_pool.lease(_module(request.node), specs) as started:
        yield started
        faults = engine_pool.faults(started, at_the_end=True)
    assert not faults, f"the module leaves its engines otherwise: {faults}"


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test leaves the engines of its module as they were, or it has failed."""
    if "engines" not in request.fixturenames:
        yield
        return
    started = request.getfixturevalue("engines")
    yield
    faults = request.getfixturevalue("engine_pool").faults(started)
    assert not faults, f"the test leaves engines otherwise, they are replaced: {faults}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """More starts than are allowed end the session: each costs half a minute of every run."""
    try:
        yield
    finally:
        starts, most = (
            item.config.stash.get(STARTS, None),
            item.config.getoption("max_engine_starts"),
        )
        if starts is not None and most is not None and (n := starts.by_file().total()) > most:
            item.session.shouldfail = f"{n} engines were started, at most {most} are to be"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    starts = config.stash.get(STARTS, None)
    if starts is not None and (by_file := starts.by_file()):
        terminalreporter.section(f"{by_file.total()} engine starts")
        for name, number in by_file.most_common():
            terminalreporter.line(f"{number:3d} {name}")
