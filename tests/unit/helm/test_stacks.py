"""Pods of serving stacks become hosts: by the files of helm/stacks, and by the webhook.

ROSE_STACKS names a folder with checkouts of the stacks' repositories, as docs/operators/stacks.md
has them; without it the tests that need them are skipped. Nothing of theirs is kept here.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from helm_python import Chart

from executor.engine_settings import EngineSettings
from rose.controller.host_webhook import PLUGIN, PLUGIN_FOLDER, SHARED, HostPods, with_rose
from tests.unit.helm.rendering import Object, pod_of

FILES: Final = Path(__file__).parents[3] / "helm" / "stacks"
STACKS: Final = os.environ.get("ROSE_STACKS", "")
needs_stacks: Final = pytest.mark.skipif(
    not STACKS, reason="ROSE_STACKS names no folder with repositories of serving stacks"
)
SETTINGS: Final = HostPods("registry.example.net/rose/rose")
PLAIN: Final = {"containers": [{"name": "vllm"}]}
CHARTS: Final = {
    "production-stack": ("production-stack/helm", "0.1.12"),
    "llm-d": ("llm-d-modelservice/charts/llm-d-modelservice", "v0.4.12"),
}
"""Charts that take the pod's parts as values, with the version that the page names."""
EXAMPLES: Final = {
    "aibrix": ("aibrix/samples", 74),
    "kserve": ("kserve/config/llmisvcconfig", 10),
    "kserve samples": ("kserve/docs/samples/llmisvc", 14),
    "rbg": ("rbg/examples", 40),
    "dynamo": ("dynamo/examples/backends/vllm/deploy/v1beta1", 2),
    "sglang": ("sglang/docker", 1),
}
"""Folders of manifests, and the least number of pods with an engine in each."""
ENGINES: Final = ("vllm", "sglang", "llm-d-cuda")


def same_host(pod: Object, name: str = "vllm") -> None:
    """Assert that a pod's spec has all that the webhook gives one, and no other image's limits."""
    wanted = with_rose({"metadata": {}, "spec": PLAIN}, SETTINGS)
    (engine,) = [each for each in pod["containers"] if each["name"] == name]
    env = {each["name"]: each for each in engine["env"]}
    assert len(env) == len(engine["env"]), "a variable is there twice"
    for each in wanted["containers"][0]["env"]:
        found = env[each["name"]]
        if "valueFrom" in each:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            assert found["valueFrom"]["fieldRef"]["fieldPath"] == path
        else:
            assert found == each
    said = {key: each.get("value", "") for key, each in env.items()}
    settings = EngineSettings.from_environ(said | {"ROSE_HOST_NAME": "serving.chat-0"})
    assert (settings.found, settings.ttft_s, settings.tpot_s) == (True, 0.5, 0.15)
    for each in wanted["containers"][0]["volumeMounts"]:
        assert each in engine["volumeMounts"]
    for each in wanted["volumes"]:
        assert each in pod["volumes"]
    (plugin,) = [each for each in pod["initContainers"] if each["name"] == PLUGIN]
    (like,) = wanted["initContainers"]
    for key in ("image", "command", "resources", "volumeMounts"):
        assert plugin[key] == like[key], key
    assert pod["securityContext"]["supplementalGroups"] == [SETTINGS.group]


def test_the_patch_of_a_deployment_says_what_the_webhook_does() -> None:
    patch = yaml.safe_load((FILES / "deployment" / "rose-host.yaml").read_text())
    same_host(patch["spec"]["template"]["spec"])


@needs_stacks
@pytest.mark.parametrize("stack", CHARTS)
def test_a_chart_makes_hosts_by_its_values(stack: str) -> None:
    folder, version = CHARTS[stack]
    chart = Chart.load(str(Path(STACKS) / folder))
    found = yaml.safe_load((Path(STACKS) / folder / "Chart.yaml").read_text())
    assert found["version"] == version, "the page names the version that was rendered"
    values = yaml.safe_load((FILES / stack / "values.yaml").read_text())
    texts = chart.render(values=values, name="s", namespace="serving").values()
    (pod,) = [pod for pod in _pods(texts) if PLUGIN in str(pod.get("initContainers"))]
    same_host(pod)
    assert with_rose({"metadata": {}, "spec": pod}, SETTINGS) == pod, "the webhook leaves it"


def _pods(texts: Any) -> Iterator[Object]:
    for text in texts:
        for each in yaml.load_all(text, yaml.CSafeLoader):
            if isinstance(each, dict) and each.get("kind") in ("Deployment", "LeaderWorkerSet"):
                pod = pod_of(each)
                if pod is not None:
                    yield pod


@needs_stacks
@pytest.mark.parametrize("stack", EXAMPLES)
def test_pods_of_their_own_examples_become_hosts_by_the_webhook(stack: str) -> None:
    folder, least = EXAMPLES[stack]
    seen = 0
    for file in sorted((Path(STACKS) / folder).rglob("*.yaml")):
        for spec in _engine_pods(_documents(file)):
            made = with_rose({"metadata": {}, "spec": spec}, SETTINGS)
            names = [each["name"] for each in made["volumes"]]
            assert names.count(PLUGIN) == names.count(SHARED) == 1, file
            env = {each["name"]: each.get("value") for each in made["containers"][0]["env"]}
            assert str(env["PYTHONPATH"]).startswith(PLUGIN_FOLDER), file
            seen += 1
    assert seen >= least, seen


def _documents(file: Path) -> list[Any]:
    try:
        return list(yaml.load_all(file.read_text(), yaml.CSafeLoader))
    except yaml.YAMLError:  # a template
        return []


def _engine_pods(part: Any) -> Iterator[Object]:
    """Pod specs within objects of any kind, whose first container is an engine's."""
    if isinstance(part, list):
        for each in part:
            yield from _engine_pods(each)
    elif isinstance(part, dict):
        first = next(iter(part.get("containers") or ()), None)
        if isinstance(first, dict) and any(each in first.get("image", "") for each in ENGINES):
            yield part
        for each in part.values():
            yield from _engine_pods(each)
