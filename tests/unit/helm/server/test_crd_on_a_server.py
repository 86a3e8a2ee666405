"""The definition on a real API server: its rules, its defaults, and what it keeps apart."""

import copy
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_scheduler.capacity import crd
from elastic_scheduler.capacity.crd import GROUP, KIND, VERSION
from rose.controller.kube_api import PATH
from tests.harness.programs.api_server import (
    APPLY,
    DEFINITIONS,
    KUBECONFIG,
    MARKS,
    MERGE,
    ApiClient,
    Object,
    definitions_server,
    refusal,
)
from tests.harness.waiting import until

pytestmark = MARKS
NAME = "rose-test-crd"
TRIED = f"{PATH}?dryRun=All&fieldValidation=Strict"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiClient]:
    found = ApiClient(Path(KUBECONFIG))
    found.have_definition()
    yield found
    found.delete(f"{PATH}/{NAME}")


def policy(name: str = NAME, **spec: Any) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": spec,
    }


WINDOW = {"from": "08:00", "to": "20:00", "timeZone": "Europe/Berlin"}
GOOD: list[Object] = [
    {},
    {"mode": "Active", "maxHarvest": {"compute": 0.5, "memory": "8Gi", "nodes": "25%"}},
    {"mode": "Active", "maxHarvest": {"memory": 8589934592, "nodes": 3}},
    {"mode": "Off", "maxHarvest": {"compute": 0, "nodes": 0}},
    {"maxHarvest": {"nodes": "0%"}},
    {"staleAfter": "2s", "reclaimDeadline": "10m", "cooldown": "500ms"},
    {"watermarks": {"high": 0.85}},
    {"blackoutWindows": [{**WINDOW, "days": ["Mon", "Fri"]}]},
    {"blackoutWindows": [{**WINDOW, "from": "22:00", "to": "24:00"}]},
    {"maxHostBusy": None, "sloBudget": None},
    {"maxHostBusy": {"share": 0.9, "resume": 0.5, "over": "30s"}},
    {"tenants": [{"job": "grpo", "priority": 2, "maxGuests": 3}]},
    {"nodeSelector": {"matchLabels": {"pool": "chat"}, "names": ["n0"]}},
]
BAD: list[tuple[Object, str]] = [
    ({"mode": "Active", "maxHarvest": {"compute": 0}}, "maxHarvest.compute 0 lends nothing"),
    ({"mode": "Active", "maxHarvest": {"nodes": 0}}, "maxHarvest.nodes 0 lends nothing"),
    ({"mode": "Active", "maxHarvest": {"nodes": "0%"}}, "maxHarvest.nodes 0 lends nothing"),
    (
        {"mode": "Active", "maxHarvest": {"deploymentShare": 0}},
        "maxHarvest.deploymentShare 0 lends nothing",
    ),
    ({"staleAfter": "1s"}, "staleAfter: write 2s to 5s"),
    ({"staleAfter": "6s"}, "staleAfter: write 2s to 5s"),
    ({"reclaimDeadline": "500ms"}, "reclaimDeadline: write 1s to 10m"),
    ({"cooldown": "25h"}, "cooldown: more than a day"),
    ({"maxHarvest": {"memory": "0Gi"}}, "write a positive number of bytes"),
    ({"maxHarvest": {"memory": 0}}, "write a positive number of bytes"),
    ({"watermarks": {"high": 0.5}}, "watermarks.low is above watermarks.high"),
    ({"watermarks": {"high": 0.5, "low": 0.6}}, "watermarks.low is above watermarks.high"),
    ({"maxHostBusy": {"share": 0.6}}, "maxHostBusy.resume is not below maxHostBusy.share"),
    ({"maxHostBusy": {"over": "11m"}}, "maxHostBusy.over: write 1s to 10m"),
    ({"blackoutWindows": [{**WINDOW, "to": "08:00"}]}, "begins when it ends is empty"),
    ({"blackoutWindows": [{**WINDOW, "from": "24:00"}]}, "begins when it ends is empty"),
    ({"blackoutWindows": [{**WINDOW, "days": []}]}, "days"),
    ({"blackoutWindows": [{"from": "08:00", "to": "20:00"}]}, "timeZone"),
    ({"mode": "Sometimes"}, "Unsupported value"),
    ({"maxHarvest": {"nodes": "101%"}}, "maxHarvest.nodes"),
    ({"maxHarvest": {"compute": 1.5}}, "maxHarvest.compute"),
    ({"slackshare": 0.5}, "slackshare"),
    ({"nodeSelector": {"matchlabels": {}}}, "matchlabels"),
    ({"tenants": [{"job": "a"}, {"job": "a"}]}, "Duplicate value"),
]


@pytest.mark.parametrize("spec", GOOD, ids=str)
def test_what_may_be_is_taken(server: ApiClient, spec: Object) -> None:
    server.call(TRIED, "POST", policy(**spec))


@pytest.mark.parametrize(("spec", "words"), BAD, ids=str)
def test_what_cannot_be_is_refused_in_words(server: ApiClient, spec: Object, words: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.call(TRIED, "POST", policy(**spec))
    assert caught.value.code in (400, 422)
    assert words in refusal(caught.value)


def test_the_command_lines_policy_has_its_name(server: ApiClient) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.call(TRIED, "POST", policy("cli"))
    assert "the command line's own policy" in refusal(caught.value)


def test_a_new_policy_has_no_mode_and_defaults_are_not_written(server: ApiClient) -> None:
    made = server.call(TRIED, "POST", policy())
    assert made["spec"].keys() <= {"stopPolicy"}


def test_spec_and_status_are_written_apart(server: ApiClient) -> None:
    server.delete(f"{PATH}/{NAME}")
    made = server.call(PATH, "POST", policy())
    status: Object = {"status": {"observedGeneration": 1}, "spec": {"mode": "Off"}}
    after = server.call(f"{PATH}/{NAME}/status", "PATCH", status, kind=MERGE)
    assert "mode" not in after["spec"]
    assert after["status"]["observedGeneration"] == 1
    assert after["metadata"]["generation"] == made["metadata"]["generation"]
    both = server.call(
        f"{PATH}/{NAME}", "PATCH", {"spec": {"mode": "Off"}, "status": {}}, kind=MERGE
    )
    assert both["metadata"]["generation"] == made["metadata"]["generation"] + 1
    assert both["status"]["observedGeneration"] == 1


def test_the_columns_are_those_that_a_person_looks_for(server: ApiClient) -> None:
    found = server.call(f"/apis/{GROUP}/{VERSION}")["resources"]
    names = {each["name"]: each for each in found}
    assert names["rosecapacitypolicies"]["shortNames"] == ["rcp"]
    assert "rosecapacitypolicies/status" in names


def test_an_upgrade_of_the_definition_keeps_its_objects_and_serves_what_is_new(
    server: ApiClient,
) -> None:
    holder, now = definitions_server(), crd()
    path = f"{DEFINITIONS}/{now['metadata']['name']}"
    held = holder.call(path)
    older: Object = copy.deepcopy(now)
    for each in older["spec"]["versions"]:
        del each["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["slackShare"]
    server.delete(f"{PATH}/{NAME}")
    try:
        holder.call(path, "PUT", {**held, "spec": older["spec"]})
        until(lambda: not _knows(server, slackShare=0.5), 30, "the older one is served")
        made = server.call(PATH, "POST", policy(mode="Off", cooldown="1m"))
    finally:
        # Helm and `kubectl apply --server-side` write it in this way.
        holder.call(f"{path}?fieldManager=helm&force=true", "PATCH", now, kind=APPLY)
    until(lambda: _knows(server, slackShare=0.5), 30, "the newer one is served")
    kept = server.call(f"{PATH}/{NAME}")
    assert kept["metadata"]["uid"] == made["metadata"]["uid"]
    assert kept["spec"] == made["spec"]
    after = server.call(f"{PATH}/{NAME}", "PATCH", {"spec": {"slackShare": 0.5}}, kind=MERGE)
    assert after["spec"] == {**made["spec"], "slackShare": 0.5}


def _knows(server: ApiClient, **spec: Any) -> bool:
    """Return True if a policy with these fields is accepted."""
    try:
        server.call(TRIED, "POST", policy("rose-test-known", **spec))
    except urllib.error.HTTPError as error:
        if "unknown field" not in refusal(error):
            raise
        return False
    return True
