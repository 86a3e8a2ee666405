"""The plugin in a folder is all that an engine of another image needs to be a host."""

from pathlib import Path

import pytest

from rose.cli.main import main
from tests.harness.engine_image import engine_image, ran

# A plugin's module, as an engine loads it, without an engine.
LOADS = """
import importlib.metadata
found = importlib.metadata.entry_points(group="vllm.general_plugins")
print(sorted(each.name for each in found))
for each in found:
    each.load()()
import executor
print(executor.__file__)
"""


@pytest.fixture(scope="module")
def numpy_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with what every engine's image has, of all that ROSE depends on."""
    return engine_image(tmp_path_factory.mktemp("image"), "numpy*")


def test_an_engine_finds_and_loads_it_by_its_path_alone(
    tmp_path: Path, numpy_alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "plugin"
    before = ran(numpy_alone, LOADS, PYTHONPATH=str(plugin), PYTHONDONTWRITEBYTECODE="1")
    assert before.stdout == "[]\n"
    for _ in range(2):  # Once more after its machine has restarted.
        assert main(["plugin", "copy", str(plugin)]) == 0
        assert str(plugin) in capsys.readouterr().out
        done = ran(numpy_alone, LOADS, PYTHONPATH=str(plugin), PYTHONDONTWRITEBYTECODE="1")
        assert done.stdout == f"['rose_host']\n{plugin}/executor/__init__.py\n", done.stderr
    assert not list(plugin.rglob("__pycache__"))
    (info,) = plugin.glob("*.dist-info")
    entries = (info / "entry_points.txt").read_text()
    assert entries.count("rose_host = ") == 3, "of both engines"
    assert "weight_transfer" not in entries


def test_another_releases_files_give_way(tmp_path: Path) -> None:
    (tmp_path / "rose_rollout-0.1.dist-info").mkdir()
    assert main(["plugin", "copy", str(tmp_path)]) == 0
    (info,) = tmp_path.glob("*.dist-info")
    assert info.name != "rose_rollout-0.1.dist-info"


def test_an_older_python_says_so_in_a_line(tmp_path: Path, numpy_alone: Path) -> None:
    assert main(["plugin", "copy", str(tmp_path / "plugin")]) == 0
    older = "import sys; sys.version_info = (3, 10, 4); sys.version = '3.10.4 (main)'; "
    code = f"{older}import executor.vllm.host.plugin"
    done = ran(numpy_alone, code, PYTHONPATH=str(tmp_path / "plugin"))
    assert done.stderr.splitlines()[-1] == (
        "ImportError: ROSE's plugin needs Python 3.11 or newer; the engine serves on without ROSE"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["copy", "FILE"], "the plugin cannot be copied to"),
        (["webhook", "--image", "rose"], "give --ca, --certificate and --key"),
        (["webhook", "--image", "rose", "--ca", "x"], "give all three or none"),
    ],
)
def test_bad_input_is_a_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").touch()
    words = [str(tmp_path / word) if word == "FILE" else word for word in words]
    assert main(["plugin", *words]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
