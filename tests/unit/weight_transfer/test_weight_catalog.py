"""Catch-up takes the fewest bytes, and nothing that a reader may need is ever deleted."""

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_transfer.catalog import (
    MOST_DELTAS,
    MOST_LEASED,
    Catalog,
    FetchPlan,
    Published,
    ReaderPin,
)
from weight_transfer.errors import CatalogError


def chain(*sizes: int, bases: dict[int, int] | None = None) -> Catalog:
    """Versions 1.. with deltas of these sizes, on a base 0 of 1000 bytes."""
    deltas = tuple(Published(n, n - 1, size) for n, size in enumerate(sizes, 1))
    return Catalog({0: 1000} | (bases or {}), deltas)


HEAVY = chain(200, 200, 200, 10, bases={3: 1100})
LAGGED = chain(200, 600, 600, bases={3: 1100})
BRANCHED = Catalog({0: 1000}, (Published(1, 0, 10), Published(2, 1, 10), Published(3, 1, 10)))


@pytest.mark.parametrize(
    ("catalog", "held", "target", "plan"),
    [
        (chain(10, 10), 2, 2, FetchPlan(None, (), 0)),
        (HEAVY, None, 4, FetchPlan(3, (4,), 1110)),
        (HEAVY, None, 2, FetchPlan(0, (1, 2), 1400)),
        (LAGGED, 2, 3, FetchPlan(None, (3,), 600)),
        (LAGGED, 1, 3, FetchPlan(3, (), 1100)),
        (BRANCHED, 1, 3, FetchPlan(None, (3,), 10)),
        # The trainer resumed from 1, so 2 is no ancestor of 3.
        (BRANCHED, 2, 3, FetchPlan(0, (1, 3), 1020)),
    ],
)
def test_a_plan_takes_the_fewest_bytes(
    catalog: Catalog, held: int | None, target: int, plan: FetchPlan
) -> None:
    assert catalog.plan(held, target) == plan


def kept_of(catalog: Catalog, pins: list[ReaderPin], now_s: float) -> Catalog:
    needed = catalog.needed(pins, now_s)
    bases = {version: size for version, size in catalog.bases.items() if version in needed.bases}
    return Catalog(bases, tuple(d for d in catalog.deltas if d.version in needed.deltas))


def test_a_version_out_of_reach_is_said() -> None:
    with pytest.raises(CatalogError, match="publish a base"):
        Catalog({}, (Published(2, 1, 10),)).plan(0, 2)
    assert Catalog().newest is None
    assert Catalog({}, (Published(2, 1, 10),)).newest is None


@pytest.mark.parametrize(
    "deltas", [(Published(1, 0, 1), Published(1, 0, 2)), (Published(1, 1, 1),)]
)
def test_a_catalog_that_contradicts_itself_is_refused(deltas: tuple[Published, ...]) -> None:
    with pytest.raises(CatalogError):
        Catalog({0: 1}, deltas)


def test_a_new_base_is_due_after_a_long_or_a_heavy_chain() -> None:
    assert not chain(*[1] * MOST_DELTAS).base_due()
    assert chain(*[1] * (MOST_DELTAS + 1)).base_due()
    assert not chain(150, 150).base_due()
    assert chain(150, 151).base_due()
    assert not chain(150, 151, bases={2: 1000}).base_due()


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=12),
    st.dictionaries(st.integers(1, 12), st.integers(1, 1500), max_size=3),
    st.integers(0, 12),
    st.data(),
)
def test_no_other_way_is_cheaper_and_what_is_kept_is_enough(
    sizes: list[int], bases: dict[int, int], held: int, data: st.DataObject
) -> None:
    bases = {version: size for version, size in bases.items() if version <= len(sizes)}
    catalog, newest = chain(*sizes, bases=bases), len(sizes)
    held = min(held, newest)
    target = data.draw(st.integers(held, newest))
    costs = [sum(sizes[held:target])]
    costs += [size + sum(sizes[at:target]) for at, size in catalog.bases.items() if at <= target]
    assert catalog.plan(held, target).wire_bytes == min(costs)
    kept = kept_of(catalog, [ReaderPin("reader", held, 10.0)], 9.0)
    for start, end in itertools.combinations(range(held, newest + 1), 2):
        assert kept.plan(start, end) == catalog.plan(start, end)
    assert kept.plan(None, newest).wire_bytes == catalog.plan(None, newest).wire_bytes
    gone = catalog.needed([ReaderPin("reader", held, 10.0)], 11.0)
    assert gone.deltas == set(catalog.plan(None, newest).deltas)


def test_a_long_chain_is_planned_in_memory_and_time_of_its_length() -> None:
    """A catalog comes from outside: the way through it costs what it weighs, not its square."""
    length = 10_000
    catalog = chain(*[1] * length)
    tracemalloc.start()
    try:
        assert catalog.newest == length
        plan = catalog.plan(None, length)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert plan == FetchPlan(0, tuple(range(1, length + 1)), 1000 + length)
    assert peak < 1_000 * length


def test_leases_keep_no_more_than_the_newest_versions() -> None:
    """A reader that names version 0 again and again cannot fill the publisher's disk."""
    length = 10 * MOST_LEASED
    bases = dict.fromkeys(range(16, length, 16), 1000)
    catalog = chain(*[1] * length, bases=bases)
    kept = kept_of(catalog, [ReaderPin("reader", 0, 10.0)], 9.0)
    assert [d.version for d in kept.deltas] == [*range(length - MOST_LEASED + 1, length + 1)]
    assert min(kept.bases) >= length - MOST_LEASED
    assert kept.plan(0, length).base is not None, "whoever is that far behind takes a base"
