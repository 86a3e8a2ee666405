"""Exit codes say to scripts what a line says to people."""

from rose.cli.exit_codes import ExitCode, code_of
from rose.errors import ConfigError, NotAnnouncedError, RefusedError, UnavailableError


def test_codes_stay_what_scripts_know() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FOUND": 1,
        "BAD_INPUT": 2,
        "UNPROVED": 3,
        "NOBODY_ANSWERS": 4,
        "INTERRUPTED": 130,
    }
    assert all(code.meaning for code in ExitCode)


def test_asking_again_may_help_only_where_nobody_answered() -> None:
    assert code_of(UnavailableError("x")) is ExitCode.NOBODY_ANSWERS
    assert code_of(NotAnnouncedError("x")) is ExitCode.NOBODY_ANSWERS
    assert code_of(RefusedError("x")) is code_of(ConfigError("x")) is ExitCode.BAD_INPUT
