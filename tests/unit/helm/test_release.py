"""A tag publishes what is there: what the workflow names exists, and its chart names its images."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart

from executor.vllm.compat import TESTED
from tests.unit.helm.rendering import ACTIVE, CHART

ROOT = Path(__file__).parents[3]
FILE = ROOT / ".github" / "workflows" / "release.yml"
WORKFLOW: dict[Any, Any] = yaml.safe_load(FILE.read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]]
IMAGES: list[dict[str, str]] = JOBS["images"]["strategy"]["matrix"]["include"]
PACKAGE = ROOT / "scripts" / "package-chart"
OWNERS = ("actions", "docker", "azure", "anchore", "pypa")


def test_a_tag_alone_starts_it_with_the_least_rights() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert job["permissions"]["contents"] == ("write" if "environment" in job else "read")


def test_jobs_steps_and_files_that_it_names_are_there() -> None:
    for name, job in JOBS.items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= JOBS.keys() - {name}
        ids = {step["id"] for step in job["steps"] if "id" in step}
        assert set(re.findall(r"steps\.(\w+)\.", str(job))) <= ids, name
        for other, output in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", str(job)):
            assert output in JOBS[other]["outputs"]
    for _, step in STEPS:
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(
                rf"({'|'.join(OWNERS)})/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{{40}})", step["uses"]
            )
    for path in re.findall(r"(?<![\w/.-])(?:scripts|helm)/[\w./-]+", FILE.read_text()):
        assert (ROOT / path).exists(), path


def test_scripts_of_its_steps_are_ones(tmp_path: Path) -> None:
    for _, step in STEPS:
        if "run" in step:
            file = tmp_path / "step"
            file.write_text(re.sub(r"\$\{\{.*?\}\}", "value", step["run"]))
            subprocess.run(["bash", "-n", file], check=True)


def test_every_image_is_built_from_the_base_of_its_containerfile() -> None:
    files = {
        file.name.removesuffix(".Containerfile"): file
        for file in (ROOT / "helm" / "images").iterdir()
    }
    assert {image["file"] for image in IMAGES} == files.keys()
    for image in IMAGES:
        said = files[image["file"]].read_text()
        defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", said, re.M))
        if "arg" in image:
            assert re.search(rf"^ARG {image['arg']}\b", said, re.M)
            assert defaults.get(image["arg"], image["base"]) == image["base"]
        else:
            base = re.findall(r"^FROM (\S+)$", said, re.M)[0]
            assert base.replace("${VERSION}", defaults["VERSION"]) == image["base"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    named = {image["key"]: image["image"] for image in IMAGES if "key" in image}
    assert named == {key: each["repository"] for key, each in values.items() if key != "etcd"}


def test_engines_of_the_bases_are_those_that_are_tested() -> None:
    sglang = re.findall(r"^sglang==(\S+)", (ROOT / "requirements" / "sglang.txt").read_text(), re.M)
    for image in IMAGES:
        engine, _, version = image["base"].partition(":v")
        if version:
            assert version in (TESTED if "vllm" in engine else sglang), image["base"]


def test_the_published_chart_names_the_images_of_its_release(tmp_path: Path) -> None:
    digests = tmp_path / "digests"
    digests.mkdir()
    sums = {
        name: f"sha256:{digit * 64}"
        for name, digit in (("control", "1"), ("node", "2"), ("etcd", "3"))
    }
    for name, digest in sums.items():
        (digests / name).write_text(digest + "\n")
    command = [sys.executable, str(PACKAGE), "registry.example.net/rose/", str(digests)]
    subprocess.run([*command, str(tmp_path / "rose")], check=True, timeout=20)
    made = Chart.load(str(tmp_path / "rose"))
    texts = made.render(values={**ACTIVE, "tls": {"insecure": True}, "images": {}}, name="r")
    found = set(re.findall(r"image: (\S+)", "\n".join(texts.values())))
    own = "registry.example.net/rose/rose"
    assert found == {
        f"{own}@{sums['control']}",
        f"{own}-node@{sums['node']}",
        f"registry.k8s.io/etcd@{sums['etcd']}",
    }
    (digests / "node").write_text("none\n")
    done = subprocess.run([*command, str(tmp_path / "two")], capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("words", [[], ["a", "b"]])
def test_the_script_says_how_it_is_called(words: list[str]) -> None:
    done = subprocess.run([sys.executable, str(PACKAGE), *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert "PREFIX DIGESTS OUT" in done.stderr


def test_the_digest_of_etcd_is_asked_for_by_its_tag() -> None:
    done = subprocess.run([sys.executable, str(PACKAGE), "--etcd"], capture_output=True, text=True)
    assert re.fullmatch(r"registry\.k8s\.io/etcd:\d+\.\d+\.\d+-\d+\n", done.stdout)
