"""Examples of trainers name what exists: settings, modules, and what Kubernetes is to read."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rose.integrations import TrainerSettings
from rose.integrations.settings import PREFIX

yaml = pytest.importorskip("yaml")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SETTINGS = {PREFIX + field.name.upper() for field in fields(TrainerSettings)}


@pytest.fixture
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / "ray_job.yaml").read_text())
    return loaded


def test_the_ray_job_is_one_that_kueue_starts_and_kuberay_ends(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert job["spec"]["suspend"]
    assert job["spec"]["shutdownAfterJobFinishes"]
    for file in re.findall(r"examples/\S+", job["spec"]["entrypoint"]):
        assert (EXAMPLES.parent / file).is_file()


def test_the_ray_job_tells_the_trainer_settings_that_exist(job: dict[str, Any]) -> None:
    environ = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    names = {*environ, *(each["name"] for each in worker["env"])}
    assert {name for name in names if name.startswith(PREFIX)} <= SETTINGS
    TrainerSettings.from_env(
        environ, checkpoint=EXAMPLES, replicas=int(environ["ROSE_REPLICAS"]), host="10.0.0.1"
    )
    mounts = {mount["name"] for mount in worker["volumeMounts"]}
    assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_the_pool_and_the_trainer_fit_the_gpus_of_the_ray_job(job: dict[str, Any]) -> None:
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * int(worker["resources"]["limits"]["nvidia.com/gpu"])
    entrypoint = job["spec"]["entrypoint"]
    replicas = int(entrypoint.split()[2])
    of_trainer = [int(n) for n in re.findall(r"trainer\.n\w+=(\d+)", entrypoint)]
    assert replicas + of_trainer[0] * of_trainer[1] <= gpus
