"""Conditions under which a guest ends itself."""

import time
from pathlib import Path

import pytest

from executor import ControlPage, Grant, GrantMode
from executor.guest.gate_client import (
    EXIT_BROKEN,
    EXIT_KILLED,
    EXIT_ORPHANED,
    GrantLiveness,
    Watchdog,
)

SECOND = 10**9


def test_a_guest_lives_while_its_grant_is_renewed() -> None:
    core = GrantLiveness(0, 2 * SECOND)
    for second in range(10):
        assert core.step(second * SECOND, Grant(heartbeat_ns=second * SECOND)) is None


@pytest.mark.parametrize("grant", [None, Grant(), Grant(heartbeat_ns=10**18)])
def test_no_sign_of_the_daemon_orphans_it(grant: Grant | None) -> None:
    core = GrantLiveness(0, 2 * SECOND)
    assert core.step(2 * SECOND, grant) is None
    assert core.step(2 * SECOND + 1, grant) == "orphaned"


def test_a_kill_grant_ends_it_at_once() -> None:
    assert GrantLiveness(0, 2 * SECOND).step(1, Grant(GrantMode.KILL)) == "killed"


def test_the_watchdog_beats_and_leaves_with_a_code_that_says_why(tmp_path: Path) -> None:
    codes: list[int] = []
    beats: list[int] = []
    with ControlPage.create(tmp_path / "page") as page:
        now_ns = time.monotonic_ns()
        Watchdog(page, GrantLiveness(now_ns, SECOND // 50), beats.append, codes.append, 0.001).run()
        page.grant.write(Grant(GrantMode.KILL))
        Watchdog(page, GrantLiveness(now_ns, SECOND), beats.append, codes.append).run()
    assert beats
    assert codes == [EXIT_ORPHANED, EXIT_KILLED]


def test_a_broken_watchdog_takes_the_guest_along(tmp_path: Path) -> None:
    codes: list[int] = []

    def fail(_: int) -> None:
        raise OSError("no page")

    with ControlPage.create(tmp_path / "page") as page:
        dog = Watchdog(page, GrantLiveness(time.monotonic_ns(), SECOND), fail, codes.append)
        with pytest.raises(OSError, match="no page"):
            dog.run()
    assert codes == [EXIT_BROKEN]
