"""The wheel holds the product alone, and works where only its own dependencies are installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = ("replica", "control", "cuda", "trainer", "nccl")
# Modules that an environment without extras lacks: importing one of them there ends the process.
HEAVY = "{'torch', 'triton', 'vllm', 'transformers', 'fastapi', 'httptools', 'tokenizers'}"
WITHOUT = f"""
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name in {HEAVY}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    kept = ("rose/", "executor/", "weight_transfer/", "elastic_scheduler/", "slo/")
    for name in listed:
        if (name.startswith(kept) or name in ("pyproject.toml", "README.md")) and (
            ROOT / name
        ).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder, "."], cwd=source, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def run(wheel: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the wheel's own files: neither this folder's nor the editable install's."""
    folder = wheel.parent / "unpacked"
    if not folder.exists():
        zipfile.ZipFile(wheel).extractall(folder)
    own = "\n".join(
        (
            "import sys",
            f"sys.path[:] = [{str(folder)!r}, *(p for p in sys.path if p != {str(ROOT)!r})]",
            "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]",
        )
    )
    command = [sys.executable, "-P", "-c", f"{own}\n{code}"]
    return subprocess.run(command, cwd=wheel.parent, capture_output=True, text=True)


def test_the_demo_and_the_benchmarks_stay_at_home(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("bench", "tests"))]
    for needed in (
        "rose/py.typed",
        "rose/cli/main.py",
        "rose/dashboard/static/uPlot.LICENSE",
        "rose/dashboard/templates/base.html",
        "executor/vllm/host/scheduler.py",
    ):
        assert needed in names


@pytest.mark.parametrize("module", ["rose.cli.main", "rose.client", "rose.main.node"])
def test_base_dependencies_are_enough_for_client_and_node(wheel: Path, module: str) -> None:
    done = run(wheel, f"{WITHOUT}\nimport {module}; print({module}.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(wheel.parent / "unpacked"))


def test_a_command_that_needs_an_extra_names_it(wheel: Path) -> None:
    done = run(wheel, f"{WITHOUT}\nfrom rose.cli.main import main; sys.exit(main(['gateway']))")
    assert done.returncode == 2
    assert "is not installed; install rose-rollout with the extra" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_of_a_wheel_says_where_it_is(wheel: Path) -> None:
    done = run(wheel, "from rose.cli.main import main; sys.exit(main(['demo']))")
    assert done.returncode == 2
    assert "clone the repository" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_installs_alone_and_with_each_extra(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    bin_ = tmp_path / "venv" / "bin"
    subprocess.run([bin_ / "pip", "install", "-q", wheel], check=True, capture_output=True)
    for command in (["--help"], ["node", "--help"], ["status", "--help"]):
        done = subprocess.run([bin_ / "rose", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage:")
    done = subprocess.run([bin_ / "python", "-c", "import rose.client"], capture_output=True)
    assert done.returncode == 0, done.stderr
    for extra in EXTRAS:
        # Resolved, not downloaded: torch and CUDA are gigabytes.
        command = [bin_ / "pip", "install", "-q", "--dry-run", f"{wheel}[{extra}]"]
        resolved = subprocess.run(command, capture_output=True, text=True)
        assert resolved.returncode == 0, f"{extra}: {resolved.stderr}"
