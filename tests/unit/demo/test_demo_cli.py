import argparse
import sys
import types
from pathlib import Path

import pytest

from bench.demo import cli
from bench.demo.cli import DemoSettings
from rose.errors import RoseError


def parse(*argv: str) -> argparse.Namespace:
    return cli.parser().parse_args(argv)


def test_without_options_it_is_the_quickstart_and_a_control_is_an_acceptance_run() -> None:
    assert cli.settings_of(parse()).quickstart
    assert not cli.settings_of(parse("--accept")).quickstart
    assert not cli.settings_of(parse("--control", "lr0")).quickstart
    assert not cli.settings_of(parse("--compare")).quickstart


def test_every_option_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []
    fake_run = types.ModuleType("bench.demo.run")

    def run_demo(settings: DemoSettings) -> int:
        seen.append(settings)
        return 7

    fake_run.run_demo = run_demo  # type: ignore[attr-defined] # a stand-in module
    monkeypatch.setitem(sys.modules, "bench.demo.run", fake_run)
    trace = tmp_path / "trace.csv"
    trace.write_text("")
    (tmp_path / "config.json").write_text("{}")
    options = f"--seed 3 --steps 20 --out {tmp_path} --trace {trace} --long-turns"
    options += f" --accept --control lr0 --port-base 20000 --host-model {tmp_path}"
    assert cli.main(options.split()) == 7
    assert seen == [
        DemoSettings(
            tmp_path, 3, 20, True, trace, True, "lr0", port_base=20000, host_model=tmp_path
        )
    ]


@pytest.mark.parametrize(
    "options",
    [
        "--steps 2",
        "--steps 100000",
        "--seed -1",
        "--seed 10000",
        "--seed 9999 --compare",
        "--port-base 80",
        "--trace no",
        "--host-model no",
        "--compare --control lr0",
        "--compare --accept",
        "--jobs 0",
        "--jobs 3",
        "--jobs 2 --accept",
        "--jobs 2 --control lr0",
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_starts(options: str) -> None:
    with pytest.raises(RoseError) as caught:
        cli.main(options.split())
    assert options.split()[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_verify_answers_with_its_exit_code(
    reported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(reported)]) == 0
    page = reported / "report.json"
    page.write_text(page.read_text().replace('"versions": ', '"versions": 9'))
    assert cli.main(["verify", str(reported)]) == 1
    assert "weights.versions: reported 9" in capsys.readouterr().out
