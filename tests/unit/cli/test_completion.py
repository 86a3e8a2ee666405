"""Completion scripts know every command, its options, and what they may say."""

import subprocess
from pathlib import Path

import pytest

from rose.cli import main as cli
from rose.cli.completion import SHELLS, script
from rose.cli.main import commands_of, main, make_parser, parser_of

LIGHT = ("status", "hold", "stop-all", "policy", "completion")


@pytest.fixture(autouse=True)
def light_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands take seconds to import; `scripts/cli-reference` makes the whole tree."""
    light = make_parser()
    commands_of(light).update({name: parser_of(name) for name in LIGHT})
    monkeypatch.setattr(cli, "whole_parser", lambda: light)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_of_all_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for word in ("stop-all", "policy", "explain", "dry-run", "scheduler", "hold"):
        assert word in text


def test_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    (tmp_path / "rose.bash").write_text(script(cli.whole_parser(), "bash"))

    def completed(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in ("rose", *words))
        ask = (
            f"source {tmp_path}/rose.bash; COMP_WORDS=({typed}); COMP_CWORD={len(words)};"
            " $(complete -p rose | sed 's/.*-F \\([^ ]*\\).*/\\1/') rose; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", ask], capture_output=True, text=True, timeout=20
        )
        return set(done.stdout.split())

    assert completed("stop") == {"stop-all"}
    assert {"get", "set", "apply", "diff", "explain", "delete"} <= completed("policy", "")
    assert {"--within", "--dry-run", "--scheduler"} <= completed("stop-all", "--")
    assert completed("status", "-o", "") == {"table", "json", "yaml"}


def test_a_processes_parser_is_had_without_running_it() -> None:
    assert set(commands_of(parser_of("token"))) == {"key", "issue"}
