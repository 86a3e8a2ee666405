"""Versions of tokens, the age of their KV, and the leases under which turns are taken."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.replica.admission import Admission, QuarantinedError, StaleEpochError
from rose.replica.token_versions import (
    REMEMBERED,
    KvStaleness,
    UnknownVersionError,
    split_spans,
    version_number,
)


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 20), st.integers(1, 20), st.data())
def test_spans_tile_the_tokens_and_name_each_ones_version(
    gaps: list[int], first: int, count: int, data: st.DataObject
) -> None:
    bounds = [0]
    for gap in gaps:
        bounds.append(bounds[-1] + gap)
    starts = [("default" if i == 0 else str(10 + i), at) for i, at in enumerate(bounds)]
    spans = split_spans(starts, first, count)
    assert [token for _, a, b in spans for token in range(a, b)] == list(range(count))
    assert all(left[0] != right[0] for left, right in itertools.pairwise(spans))
    token = data.draw(st.integers(0, count - 1))
    expected = version_number([name for name, at in starts if at <= first + token][-1])
    assert [version for version, a, b in spans if a <= token < b] == [expected]


@pytest.mark.parametrize("starts", [[], [("3", 5)]])
def test_a_token_without_a_version_is_an_error_never_version_zero(
    starts: list[tuple[str, int]],
) -> None:
    with pytest.raises(UnknownVersionError):
        split_spans(starts, 4, 1)


def test_a_version_that_is_no_integer_is_an_error() -> None:
    assert version_number("default") == 0
    assert version_number("17") == 17
    with pytest.raises(UnknownVersionError, match="main-2"):
        version_number("main-2")


# ---- the age of KV ----


def history(*activations: tuple[int, bool]) -> KvStaleness:
    ages = KvStaleness()
    for version, kept in activations:
        ages.activated(version, kept_kv=kept)
    return ages


@pytest.mark.parametrize(
    ("began", "version", "oldest"),
    [
        (0, 0, 0),
        (0, 1, 0),
        (0, 2, 0),
        (1, 2, 1),
        (2, 2, 2),
        (0, 3, 3),
        (2, 4, 3),
        (3, 4, 3),
        (4, 4, 4),
    ],
)
def test_kept_kv_is_as_old_as_its_turn_but_not_older_than_the_last_clearing(
    began: int, version: int, oldest: int
) -> None:
    assert history((1, True), (2, True), (3, False), (4, True)).oldest(began, version) == oldest


def test_a_token_from_before_a_clearing_is_judged_by_what_was_before_it() -> None:
    assert history((5, True), (9, False)).oldest(0, 5) == 0


def test_what_is_forgotten_is_taken_for_as_old_as_the_turn() -> None:
    ages = history(*((version, True) for version in range(1, 2 * REMEMBERED)))
    assert ages.oldest(3, 2 * REMEMBERED - 1) == 3
    assert ages.oldest(REMEMBERED + 9, 2 * REMEMBERED - 1) == REMEMBERED + 9


def test_only_kept_kv_needs_salt() -> None:
    assert history().salted(None) is None
    assert history((1, True)).salted("a") == "1/a"
    assert history((1, True)).salted(None) == "1/"
    assert history((1, True), (2, False)).salted("a") == "a"


# ---- admission ----


def test_a_replica_starts_closed() -> None:
    assert not Admission().open


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_only_the_newest_epoch_is_obeyed(commands: list[tuple[bool, int]]) -> None:
    admission, newest, expected = Admission(), 0, False
    for opens, epoch in commands:
        stale = epoch < newest
        try:
            if opens:
                admission.admit(epoch)
            else:
                admission.close(epoch, "")
        except StaleEpochError:
            assert stale
        else:
            assert not stale
            newest, expected = epoch, opens
        assert (admission.open, admission.first.epoch) == (expected, newest)


def test_a_quarantined_replica_never_opens_again() -> None:
    admission = Admission()
    admission.admit(1)
    admission.quarantine("unproven")
    with pytest.raises(QuarantinedError, match="unproven"):
        admission.admit(2)
    admission.close(3, "drained")
    assert not admission.open
    assert admission.reason == "unproven"


def test_turns_of_another_job_than_the_leases_are_not_taken() -> None:
    admission = Admission()
    admission.admit(1, "a")
    assert [admission.takes(job) for job in ("a", "b", "")] == [True, False, True]
    admission.admit(2, "b")
    assert not admission.takes("a")
    # A lease may name no job, as where nobody says which jobs there are.
    admission.admit(3)
    assert admission.takes("a")
