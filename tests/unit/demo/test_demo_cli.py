import argparse
import sys
import types
from pathlib import Path

import pytest
from standin_run import StandInRun

from rose.demo import cli
from rose.demo.report import write_report
from rose.demo.settings import DemoSettings
from rose.errors import RoseError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rose")
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *argv])


def test_quick_and_full_runs_have_their_own_number_of_steps() -> None:
    assert cli.settings_of(parse()).steps == 64
    assert cli.settings_of(parse("--quick")).steps == 12
    assert cli.settings_of(parse("--quick", "--steps", "15")).steps == 15


def test_every_option_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []
    fake_run = types.ModuleType("rose.demo.run")
    fake_run.run_demo = lambda settings: seen.append(settings) or 7  # type: ignore[attr-defined] # a stand-in module
    monkeypatch.setitem(sys.modules, "rose.demo.run", fake_run)
    trace = tmp_path / "trace.csv"
    trace.write_text("")
    (tmp_path / "config.json").write_text("{}")
    options = f"--seed 3 --steps 20 --out {tmp_path} --trace {trace} --long-turns"
    options += f" --control lr0 --port-base 20000 --host-model {tmp_path}"
    args = parse(*options.split())
    assert args.run(args) == 7
    assert seen == [
        DemoSettings(
            tmp_path, 3, 20, False, trace, True, "lr0", port_base=20000, host_model=tmp_path
        )
    ]


@pytest.mark.parametrize(
    "options",
    [
        "--steps 2",
        "--steps 100000",
        "--seed -1",
        "--port-base 80",
        "--trace no",
        "--host-model no",
        "--compare --control lr0",
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_starts(options: str) -> None:
    args = parse(*options.split())
    with pytest.raises(RoseError) as caught:
        cli.run(args)
    assert options.split()[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_verify_answers_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(StandInRun(steps=12, quick=True).write(tmp_path))
    args = parse("verify", str(tmp_path))
    assert args.run(args) == 0
    page = tmp_path / "report.json"
    page.write_text(page.read_text().replace('"versions": 12', '"versions": 13'))
    assert args.run(args) == 1
    assert "weights.versions: reported 13, recomputed 12" in capsys.readouterr().out


def test_settings_become_json_values() -> None:
    record = DemoSettings(Path("out"), trace=None).as_record()
    assert record["out"] == "out"
    assert record["trace"] is None
