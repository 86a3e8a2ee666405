"""A machine or card that cannot be measured: found first, told in one line, nothing touched."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench.gpu.__main__ import main
from bench.gpu.measure import PieceOrder
from rose.nvml import CardReader
from tests.fakes.bench.gpu import StandInReader, card, usage


def refuse_to_measure(order: PieceOrder) -> NoReturn:
    raise AssertionError("a card was touched that cannot be measured")


def refused(tmp_path: Path, capsys: Any, reader: Callable[[], CardReader], *options: str) -> str:
    out = tmp_path / "results"
    arguments = ["--out", str(out), "--logs", str(tmp_path / "logs"), *options]
    assert main(arguments, reader, refuse_to_measure) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gpu: ")
    assert said.err.count("\n") == 1
    assert not out.exists()
    assert not (tmp_path / "logs").exists()
    return str(said.err)


def test_a_package_that_its_python_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bench.gpu.__main__", "bench.gpu.pieces"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bench.coserve.plan", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bench.gpu", run_name="__main__")
    assert ended.value.code == 2
    assert "bench.coserve.plan is not installed for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reader", "options", "told"),
    [
        (StandInReader(), (), "the NVIDIA driver sees no GPU; run on a machine with one"),
        (StandInReader(card(cuda=(12, 4), driver="550.54")), (), "driver 550.54 serves CUDA 12.4"),
        (StandInReader(card(cuda=(0, 0))), (), "serves CUDA unknown, and 12.8 is needed"),
        (StandInReader(card(mig=True)), (), "MIG is on"),
        (StandInReader(card(compute_mode="prohibited")), (), "its owner must allow work"),
        (
            StandInReader(card(), looks=[usage(processes=(4711, 4712))]),
            (),
            "another process is on Stand-in GPU (pid 4711, 4712)",
        ),
        (
            StandInReader(card(), looks=[usage(used_bytes=9 << 30)]),
            (),
            "9.0 GiB of Stand-in GPU are in use by a process that cannot be seen",
        ),
        (
            StandInReader(card(memory_bytes=24 << 30), looks=[usage(free_bytes=22 << 30)]),
            ("--only", "copy", "kernels"),
            "22.0 of 24.0 GiB are free on Stand-in GPU, and kernels needs 38.0; lower --gib",
        ),
        (StandInReader(card(), card(index=1)), (), "there are 2 GPUs"),
        (StandInReader(card()), ("--gpu", "3"), "there is no GPU 3; give --gpu 0"),
        (StandInReader(card()), ("--only", "everything"), "no piece 'everything'"),
        (StandInReader(card()), ("--gib", "0"), "--gib is above 0"),
        (StandInReader(card()), ("--density", "1"), "--density is a share"),
        (StandInReader(card()), ("--rounds", "1"), "--rounds is at least 3"),
    ],
)
def test_what_stands_in_the_way_is_told_in_one_line(
    tmp_path: Path, capsys: Any, reader: StandInReader, options: tuple[str, ...], told: str
) -> None:
    assert told in refused(tmp_path, capsys, lambda: reader, *options)
