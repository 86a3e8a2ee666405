import pytest

from rose.replica.token_versions import REMEMBERED, KvStaleness


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
