"""Shared by tests of the demo."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.demo.report.report import write_report
from rose.compare import bootstrap
from tests.fakes.bench.demo_run import StandInRun


@pytest.fixture(scope="package", autouse=True)
def _few_resamples() -> Iterator[None]:
    """Intervals as wide as with ten times as many, near enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "RESAMPLES", 200)
        yield


@pytest.fixture(scope="package")
def _report(tmp_path_factory: pytest.TempPathFactory, _few_resamples: None) -> Path:
    folder = StandInRun().write(tmp_path_factory.mktemp("reported"))
    write_report(folder)
    return folder


@pytest.fixture
def reported(_report: Path, tmp_path: Path) -> Path:
    """A run's folder with its report, of which the pictures take a second to draw."""
    return shutil.copytree(_report, tmp_path / "reported")
