"""One way of saying what was found: whole and plain in a pipe, cut and coloured on a terminal."""

import argparse
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from rich.console import Console

from rose.command_line import output
from rose.command_line.output import (
    Table,
    Tone,
    TonedText,
    View,
    add_output_options,
    ago,
    bytes_of,
    fitted,
    milliseconds,
    rendered,
    share_of,
    show,
)
from rose.errors import UnavailableError

LONG = "a" * 300
VIEW = View(
    {"node": "n0", "share": 0.5},
    (TonedText("harvest ACTIVE", Tone.HEAD),),
    (
        Table(("NODE", "WHY"), ((TonedText("n0", Tone.GOOD), LONG), ("n1[x]", "-")), "nodes"),
        Table(("EMPTY",), ()),
    ),
)


def args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output_options(parser, watch=True)
    return parser.parse_args(words)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    show(args(*words), lambda: VIEW)
    return capsys.readouterr().out


def test_in_a_pipe_nothing_is_cut_coloured_or_padded(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys).splitlines() == [
        "harvest ACTIVE",
        "",
        "nodes",
        "NODE   WHY",
        f"n0     {LONG}",
        "n1[x]  -",
    ]


def test_json_and_yaml_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(shown(capsys, "-o", "json")) == VIEW.data
    assert yaml.safe_load(shown(capsys, "-o", "yaml")) == VIEW.data


def drawn(**terminal: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, **terminal)
    console.print(rendered(VIEW))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_cuts_what_is_wider_and_colours_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mn0" in drawn(color_system="standard")
    plain = drawn(color_system=None).splitlines()
    assert max(map(len, plain)) <= 40
    assert plain[4].startswith("n0     aaa")
    assert plain[4].rstrip().endswith("a…"), "the widest column is cut, and no other"


def test_a_terminal_that_is_too_narrow_does_without_spare_columns() -> None:
    columns = ("NAME", "SPARE", "WHY")
    rows = (("n0", "s" * 30, "w" * 40),)
    widths, kept = fitted(Table(columns, rows, spare=("SPARE",)), 60)
    assert (widths, kept) == ([4, 30, 22], [0, 1, 2]), "the text at the end gives way first"
    widths, kept = fitted(Table(columns, rows), 40)
    assert (widths, kept) == ([4, 16, 16], [0, 1, 2])
    widths, kept = fitted(Table(columns, rows, spare=("SPARE",)), 30)
    assert (widths, kept) == ([4, 24], [0, 2])
    assert fitted(Table(columns, rows), 500) == ([4, 30, 40], [0, 1, 2])


def test_colours_are_left_out_where_somebody_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in drawn()


class Pauses:
    """Lets so many pauses pass, then interrupts as Ctrl-C does."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, seconds: float) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def watched(read: Callable[[], View], *words: str, pauses: int = 2) -> None:
    with pytest.raises(KeyboardInterrupt):
        show(args("--watch", "0.5", *words), read, Pauses(pauses))


def test_a_watch_in_a_pipe_is_a_document_after_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched(lambda: VIEW, "-o", "json")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [VIEW.data] * 3
    watched(lambda: VIEW, "-o", "yaml")
    assert [*yaml.safe_load_all(capsys.readouterr().out)] == [VIEW.data] * 3


def test_a_watch_outlives_a_scheduler_that_does_not_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = [VIEW, UnavailableError("no scheduler answers"), VIEW]

    def read() -> View:
        answer = answers.pop(0)
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    watched(read, "-o", "json", pauses=2)
    out, err = capsys.readouterr()
    assert out.count("\n") == 2, "what is old is not said again"
    assert err == "rose: no scheduler answers\n"


def test_a_watch_on_a_terminal_leaves_the_last_frame(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    frames = iter(["first", "second"])
    monkeypatch.setattr(
        output,
        "console_of",
        lambda: Console(
            file=screen, force_terminal=True, width=60, height=9, highlight=False, color_system=None
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        output.live(lambda height: f"{next(frames)} of {height}", 1.0, Pauses(1))
    assert "first of 9" in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("second of 9")


def test_a_pause_has_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        args("--watch", "0")
    assert "no pause" in capsys.readouterr().err


def test_figures_are_written_alike_everywhere() -> None:
    assert [bytes_of(n) for n in (None, 0, 1_023, 38 << 30)] == ["-", "0 B", "1023 B", "38.0 GiB"]
    assert [share_of(s) for s in (None, 0.0, 0.614)] == ["-", "0%", "61%"]
    assert [ago(s) for s in (None, 4.21, 42.0, 420.0, 7_300.0, 200_000.0)] == [
        "-",
        "4.2 s",
        "42 s",
        "7 min",
        "2 h",
        "2 d",
    ]
    assert [milliseconds(s) for s in (0.041, 1.24)] == ["41 ms", "1.2 s"]
