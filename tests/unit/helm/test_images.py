"""Images run as users other than root, and are built from the wheel alone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.unit.helm.rendering import ACTIVE, node_pod, pods

ROOT = Path(__file__).parents[3]
EVERY = sorted((ROOT / "helm" / "images").glob("*.Containerfile"))
HOSTS = [file for file in EVERY if file.stem.startswith("host-")]
FILES = [file for file in EVERY if file not in HOSTS]


def lines(file: Path, word: str) -> list[str]:
    return re.findall(rf"^{word} (.+)$", file.read_text(), re.M)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_runs_rose_as_nobody(file: Path) -> None:
    assert lines(file, "ENTRYPOINT") == ['["rose"]']
    (user,) = lines(file, "USER")
    assert int(user.split(":")[0]) > 0
    assert lines(file, "COPY")[0].startswith("*.whl "), "nothing but the wheel comes in"
    # A base may say `all`, which hands out every GPU to whoever asks for none.
    assert "NVIDIA_VISIBLE_DEVICES=void" in lines(file, "ENV")[0]


@pytest.mark.parametrize("file", HOSTS, ids=lambda file: file.stem)
def test_a_hosts_image_stays_what_the_engine_made_it(file: Path) -> None:
    for word in ("ENTRYPOINT", "CMD", "USER", "ENV", "WORKDIR"):
        assert not lines(file, word)
    assert lines(file, "COPY") == ["*.whl /tmp/wheels/"]
    (run,) = lines(file, "RUN")
    assert "pip install --no-cache-dir --no-deps /tmp/wheels/" in run
    assert lines(file, "FROM")[0].endswith(":${VERSION}")
    assert lines(file, "ARG")[0].startswith("VERSION=v")


def test_a_process_of_the_control_plane_needs_no_compiler_of_weights() -> None:
    """Its image leaves numba out; whatever asks a kernel all the same is told so."""
    modules = "main.scheduler gateway.app weight_distribution.relay node.daemon cli.machine.doctor"
    said = f"""
import sys
sys.modules.update(numba=None, llvmlite=None)
import {", ".join(f"rose.{name}" for name in modules.split())}
from weight_transfer import WeightError
from weight_transfer.kernels.simd import all_equal
try:
    all_equal(b"", 0)
except WeightError as error:
    assert "pip install numba" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", said], check=True, cwd=ROOT, timeout=60)


def test_pods_run_as_their_images_do() -> None:
    users = {file.stem: int(lines(file, "USER")[0].split(":")[0]) for file in FILES}
    assert pods()["Deployment/r-scheduler"]["securityContext"]["runAsUser"] == users["rose"]
    assert node_pod(ACTIVE)["securityContext"]["runAsUser"] == users["node"]


def test_extras_of_the_images_are_the_projects() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in FILES:
        (extras,) = re.findall(r"\$\{wheel\}\[([\w,]+)\]", file.read_text())
        assert set(extras.split(",")) <= known.keys()


def test_where_nothing_builds_one_line_says_so(tmp_path: Path) -> None:
    for name in ("podman", "docker"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [ROOT / "scripts" / "images"], env=env, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert "neither podman nor docker" in done.stderr
