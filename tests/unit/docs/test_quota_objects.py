"""Objects of Kueue and KAI on the page of quotas are what these take; its values are the chart's.

ROSE_QUEUE_CRDS names a folder with definitions of theirs, as `config/components/crd/bases` of Kueue
and `deployments/kai-scheduler/crds` of KAI have them: none is in this repository.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.unit.helm.rendering import objects

PAGE = Path(__file__).parents[3] / "docs" / "operators" / "quotas.md"
FOLDER = os.environ.get("ROSE_QUEUE_CRDS", "")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
SAID = [each for block in BLOCKS for each in yaml.safe_load_all(block)]
OBJECTS = [each for each in SAID if "kind" in each]


def closed(schema: Any) -> Any:
    """Return the schema that refuses unknown fields, as the API server does when it is strict."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(each) for key, each in schema.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    if "properties" in made and isinstance(made["properties"], dict) and made.get("type"):
        made.setdefault("additionalProperties", False)
    return made


def definitions() -> dict[tuple[str, str], Any]:
    found = {}
    for file in sorted(Path(FOLDER).rglob("*.yaml")):
        for each in yaml.safe_load_all(file.read_text()):
            if each and each.get("kind") == "CustomResourceDefinition":
                spec = each["spec"]
                for version in spec["versions"]:
                    key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[key] = version["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.skipif(not FOLDER, reason="ROSE_QUEUE_CRDS names no definitions of Kueue and KAI")
def test_the_pages_objects_are_as_kueue_and_kai_define_them() -> None:
    known = definitions()
    for each in OBJECTS:
        schema = closed(known[each["apiVersion"], each["kind"]])
        schema["properties"]["metadata"] = {"type": "object"}
        Draft202012Validator(schema).validate(each)


def test_the_pages_values_make_pods_in_the_queues_that_it_defines() -> None:
    values = [each for each in SAID if "quotas" in each]
    assert {each["kind"] for each in OBJECTS} == {
        "ResourceFlavor", "ClusterQueue", "LocalQueue", "Queue",
    }  # fmt: skip
    queues = {e["kind"]: e["metadata"] for e in OBJECTS}
    kueue, kai = (objects(each)["Deployment/r-quota-grpo"] for each in values)
    queue = kueue["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert queues["LocalQueue"] == {"name": queue, "namespace": kueue["metadata"]["namespace"]}
    labels = kai["spec"]["template"]["metadata"]["labels"]
    assert queues["Queue"] == {"name": labels["kai.scheduler/queue"]}
