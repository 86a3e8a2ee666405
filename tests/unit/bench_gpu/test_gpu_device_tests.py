"""The piece that runs tests: what fails or is skipped proves nothing, and is said."""

from pathlib import Path

import pytest

from bench.gpu.device_tests import GROUPS, run_files
from bench.gpu.pieces import PieceError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin that happens to be installed here, which takes a second each time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_tests_that_pass_are_counted_without_the_projects_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "device_cases_good.py"
    file.write_text(
        "import os\n"
        "def test_a():\n    assert 'TRITON_INTERPRET' not in os.environ\n"
        "def test_b(pytestconfig):\n    assert not pytestconfig.getini('addopts')\n"
    )
    assert run_files([file]) == {"files": ["device_cases_good.py"], "passed": 2}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "def test_a():\n    pass\ndef test_b():\n    assert 1 == 2, 'bits\\ndiffer'\n",
            "^1 of 2 tests fail: test_b: .*bits",
        ),
        (
            "import pytest\ndef test_a():\n    pytest.skip('no device')\n",
            "^1 of 1 tests were skipped, which proves nothing$",
        ),
        ("", "^0 of 0 tests were skipped"),
        ("import no_such_module\n", "^1 of 1 tests fail: "),
    ],
)
def test_what_proves_nothing_ends_the_piece_in_one_line(
    tmp_path: Path, body: str, told: str
) -> None:
    file = tmp_path / "device_cases_bad.py"
    file.write_text(body)
    with pytest.raises(PieceError, match=told) as caught:
        run_files([file])
    assert "\n" not in str(caught.value)


def test_there_are_tests_for_a_device() -> None:
    weights, _pages, memory = GROUPS
    assert [file.name for file in weights.files()] == ["device_cases.py"]
    assert [file.name for file in memory.files()] == ["test_nvml_device.py"]
