"""A trainer of a version that nobody tried is refused in one line, unless it is let in by name."""

import importlib.metadata

import pytest

from rose.errors import ConfigError
from rose.integrations import tested
from rose.integrations.tested import check_tested


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "version", {"trl": "1.17.0"}.__getitem__)
    monkeypatch.delenv("ROSE_UNTESTED", raising=False)


def test_a_version_that_was_tried_is_taken() -> None:
    assert check_tested("trl", ("1.16.0", "1.17.0")) == "1.17.0"


def test_another_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"trl 1\.17\.0 .* 1\.16\.0 was; .*ROSE_UNTESTED=trl"
    ) as no:
        check_tested("trl", ("1.16.0",))
    assert "\n" not in str(no.value)


def test_it_may_be_let_in_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_UNTESTED", "verl, trl")
    assert check_tested("trl", ("1.16.0",)) == "1.17.0"
    monkeypatch.setenv("ROSE_UNTESTED", "verl")
    with pytest.raises(ConfigError):
        check_tested("trl", ("1.16.0",))


def test_one_that_is_not_there_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "version", importlib.metadata.version)
    with pytest.raises(ConfigError, match=r"rose-rollout\[no-such-trainer\]"):
        check_tested("no-such-trainer", ())
