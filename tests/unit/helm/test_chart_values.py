"""Values have one source for file, schema and docs; what means nothing is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError
from jsonschema import Draft202012Validator

from elastic_scheduler.capacity import policy_of
from elastic_scheduler.errors import PolicyError
from scripts import chart_files, chart_values
from tests.unit.helm.rendering import (
    ACTIVE,
    CERT_MANAGER,
    CHART,
    DIGEST,
    KEY,
    LEAST,
    NODES_ONLY,
    QUOTAS,
    RELAY,
    SECRETS,
    SELF_MADE,
    TRIAL,
    Object,
    chart,
    joined,
)

ROOT = Path(__file__).parents[3]
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


def test_what_is_generated_is_current() -> None:
    for path, text in chart_files.files().items():
        assert (ROOT / path).read_text() == text, f"{path}: run scripts/chart"


def test_values_yaml_says_the_models_defaults() -> None:
    said = yaml.safe_load((CHART / "values.yaml").read_text())
    assert said == chart_files.defaults()
    assert chart_values.Values.model_validate(said) == chart_values.Values()


def test_the_schema_is_one_and_knows_every_object() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    for name, part in [("", schema), *schema["$defs"].items()]:
        if "properties" in part and name != "Global":
            assert part["additionalProperties"] is False, name


def test_only_global_and_enabled_may_be_anything() -> None:
    chart().validate_schema(joined(LEAST, {"global": {"any": {"thing": 1}}, "enabled": True}))
    with pytest.raises(HelmError, match="glabal"):
        chart().validate_schema(joined(LEAST, {"glabal": {}}))


@pytest.mark.parametrize(
    "values",
    [
        {},
        SECRETS,
        CERT_MANAGER,
        NODES_ONLY,
        ACTIVE,
        RELAY,
        TRIAL,
        {"policy": {"maxHostBusy": None}},
    ],
)
def test_schema_and_model_take_the_same(values: Object) -> None:
    merged = chart().merge_values(joined(LEAST, values))
    chart().validate_schema(merged)
    chart_values.Values.model_validate(merged)


# Values, and a word of the line that refuses them.
WRONG: list[tuple[Object, str]] = [
    ({"harvset": {}}, "harvset"),
    ({"global": {"imageRegistry": 5}}, "imageRegistry"),
    ({"nameOverride": "A name"}, "nameOverride"),
    ({"fullnameOverride": "1"}, "fullnameOverride"),
    ({"mode": "Sometimes"}, "mode"),
    ({"access": "sudo"}, "access"),
    ({"role": "both"}, "role"),
    ({"cluster": "Prod Cluster"}, "cluster"),
    ({"schedulers": ["nowhere"]}, "schedulers"),
    ({"images": {"control": {"digest": "sha256:abc"}}}, "digest"),
    ({"images": {"control": {"pullPolicy": "Sometimes"}}}, "pullPolicy"),
    ({"scheduler": {"replicas": 0}}, "replicas"),
    ({"scheduler": {"port": 70_000}}, "port"),
    ({"scheduler": {"policy": "random"}}, "policy"),
    ({"store": {"own": {"members": 2}}}, "members"),
    ({"store": {"own": {"size": "much"}}}, "size"),
    ({"gateway": {"options": {"stallSeconds": 1}}}, "stallSeconds"),
    ({"gateway": {"options": {"maxWaiting": 0}}}, "maxWaiting"),
    ({"relay": {"jobs": [{"name": "j"}]}}, "origin"),
    ({"node": {"config": {"node": "n0"}}}, "node"),
    ({"node": {"config": {"verify_key": "secret"}}}, "verify_key"),
    ({"node": {"config": {"replicas": [{"id": "g"}]}}}, "replicas"),
    ({"node": {"config": {"host": {"ttft_target": 1}}}}, "ttft_target"),
    ({"node": {"priorityClass": {"value": 10}}}, "value"),
    ({"node": {"sharedFolder": {"path": "run"}}}, "path"),
    ({"policy": {"mode": "Active"}}, "mode"),
    ({"policy": {"maxHarvest": {"compute": 2}}}, "compute"),
    ({"policy": {"staleAfter": "soon"}}, "staleAfter"),
    ({"monitoring": {"podMonitors": True}}, "podMonitors"),
    ({"tls": {"certManager": {"duration": "a year"}}}, "duration"),
    ({"rbac": {"operators": [{"kind": "Robot", "name": "r"}]}}, "kind"),
]


@pytest.mark.parametrize(("values", "word"), WRONG, ids=[json.dumps(v) for v, _ in WRONG])
def test_the_schema_refuses_it_by_name(values: Object, word: str) -> None:
    with pytest.raises(HelmError, match=word):
        chart().render(values=joined(LEAST, values))


# Values that the schema takes one by one, and the sentence that refuses them together.
TOGETHER: list[tuple[Object, str]] = [
    (
        joined(SELF_MADE, {"rbac": {"viewers": [{"kind": "User", "name": "v"}]}}),
        "self-made certificates are in no secret",
    ),
    ({"trial": True, "backup": {"enabled": True}}, "trial=true keeps nothing"),
    (joined(ACTIVE, SELF_MADE), r"tls\.secrets\.scheduler is missing.*or fence the network"),
    ({"tls": {"insecure": False, "secrets": {"scheduler": "s"}}}, r"tls\.secrets\.operator"),
    (joined(ACTIVE, {"trial": True}), "leave trial out for mode Active"),
    ({"trial": True, "role": "control"}, "leave role out"),
    ({"trial": True, "store": {"endpoints": ["e:2379"]}}, "leave store.endpoints out"),
    (joined(CERT_MANAGER, {"tls": {"insecure": True}}), "contradict each other"),
    (joined(CERT_MANAGER, {"tls": {"certManager": {"issuer": {"name": ""}}}}), "issuer.name"),
    (joined(CERT_MANAGER, {"tls": {"secrets": {"nodeCa": "ca"}}}), "leave it out beside"),
    (
        joined(
            SECRETS,
            {
                "rbac": {"viewers": [{"kind": "User", "name": "v"}]},
                "tls": {"secrets": {"viewer": ""}},
            },
        ),
        r"tls\.secrets\.viewer",
    ),
    (joined(SECRETS, RELAY, {"tls": {"secrets": {"relay": ""}}}), r"tls\.secrets\.relay"),
    ({"role": "nodes"}, "give schedulers"),
    ({"schedulers": ["s:7400"]}, "leave them out, or set role=nodes"),
    ({"store": {"endpoints": ["e:2379"]}}, "store.own.enabled=false"),
    ({"store": {"own": {"enabled": False}}}, "there is no store"),
    ({"store": {"user": "rose"}}, "store.passwordSecret"),
    ({"scheduler": {"advertise": "s:443"}}, "scheduler.replicas=1"),
    ({"controller": {"enabled": False, "nodeLabels": ["pool"]}}, "controller.enabled=true"),
    ({"controller": {"kubeconfigSecret": "k"}, **QUOTAS}, "or leave quotas out"),
    (
        {"quotas": [{"job": name, "queue": "q", "most": 1} for name in ("a.b", "a-b")]},
        "quotas names job a-b twice",
    ),
    ({"scheduler": {"policy": "paper", "holdS": 60}}, "scheduler.policy=rose"),
    ({"scheduler": {"alerts": {"tokenSecret": "t"}}}, "needs both rules and tokenSecret"),
    ({"scheduler": {"alerts": {"rules": [{"match": {}}]}}}, "needs both rules and tokenSecret"),
    ({"scheduler": {"webhook": {"url": "https://h/x"}}}, "needs both url and secret"),
    ({"scheduler": {"webhook": {"secret": "s"}}}, "needs both url and secret"),
    ({"relay": {"enabled": True}}, "relay.jobs is empty"),
    (joined(RELAY, {"relay": {"jobs": [{"name": "j", "origin": "http://t:1"}]}}), "verifyKey"),
    ({"mode": "Active"}, "node.config.replicas names none"),
    (joined(ACTIVE, {"node": {"config": {"verify_key": None}}}), "node.config.verify_key"),
    (joined(ACTIVE, {"images": {"node": {"digest": ""}}}), "images.node.digest is missing"),
    (joined(ACTIVE, {"images": {"etcd": {"digest": ""}}}), "images.etcd.digest is missing"),
    (joined(ACTIVE, {"images": {"control": {"digest": ""}}}), "images.control.digest is missing"),
    ({"node": {"models": {"hostPath": "/m", "claim": "c"}}}, "leave one of them out"),
]


@pytest.mark.parametrize(("values", "sentence"), TOGETHER, ids=[s for _, s in TOGETHER])
def test_what_contradicts_itself_is_refused_in_a_sentence(values: Object, sentence: str) -> None:
    with pytest.raises(HelmError, match=sentence) as caught:
        chart().render(values=joined(LEAST, values))
    said = str(caught.value).rpartition("error calling fail: ")[2]
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["a.b", "1rose", "-rose", "rose-"])
def test_a_release_whose_services_would_have_no_valid_names_is_refused(name: str) -> None:
    with pytest.raises(HelmError, match=r"begins the names of Services|release name"):
        chart().render(values=LEAST, name=name)


# Policies that the schema takes, and schedulers refuse.
REFUSED: list[Object] = [
    {"staleAfter": "10s"},
    {"staleAfter": "500ms"},
    {"reclaimDeadline": "1h"},
    {"cooldown": "48h"},
    {"watermarks": {"low": 0.95}},
    {"watermarks": {"low": 0.5, "high": 0.4}},
    {"maxHostBusy": {"share": 0.6}},
    {"maxHostBusy": {"over": "500ms"}},
    {"maxHarvest": {"compute": 0}},
    {"maxHarvest": {"nodes": "0%"}},
    {"maxHarvest": {"memory": "0Gi"}},
    *(
        {kind: [{"from": "08:00", "to": "18:00", "timeZone": "UTC", **wrong}]}
        for kind in ("blackoutWindows", "allowedWindows", "during")
        for wrong in (
            {"to": "08:00"},
            {"days": ["Mon", "Mon"]},
            {"timeZone": "Europe/Berln"},
            {"timeZone": "CEST"},
        )
    ),
    {"tenants": [{"job": "a"}, {"job": "a"}]},
]


@pytest.mark.parametrize("policy", REFUSED, ids=json.dumps)
def test_what_schedulers_would_refuse_is_refused_before_anything_is_installed(
    policy: Object,
) -> None:
    with pytest.raises(PolicyError):
        policy_of({"name": "r", "mode": "Active", **policy})
    with pytest.raises(HelmError, match=r"policy\."):
        chart().render(values=joined(LEAST, ACTIVE, {"policy": policy}))


TAKEN: Object = {
    "staleAfter": "2500ms",
    "reclaimDeadline": "1m",
    "cooldown": "24h",
    "watermarks": {"low": 0.3, "high": 0.5},
    "maxHostBusy": {"share": 0.9, "resume": 0.8, "over": "2m"},
    "maxHarvest": {"compute": 0.5, "memory": "8Gi", "nodes": 3},
    "tenants": [{"job": "a"}, {"job": "b"}],
    "blackoutWindows": [
        {"from": "08:00", "to": "18:00", "timeZone": zone, "days": ["Mon", "Tue"]}
        for zone in ("UTC", "Etc/UTC", "Zulu", "Europe/Berlin", "Europe/London", "Africa/Abidjan")
    ],
}


def test_what_schedulers_take_is_installed() -> None:
    policy_of({"name": "r", "mode": "Active", **TAKEN})
    assert chart().render(values=joined(LEAST, ACTIVE, {"policy": TAKEN}))


@pytest.mark.parametrize(
    ("given", "mode", "image", "note"),
    [
        ({"digest": DIGEST}, {}, f"rose@{DIGEST}", ""),
        ({"digest": ""}, {}, f"rose:{VERSION}", "images.control: by tag"),
        ({"digest": "", "tag": "dev"}, {}, "rose:dev", "images.control: by tag"),
        (
            {"digest": "", "tag": "dev", "unpinned": True},
            ACTIVE,
            "rose:dev",
            "WARNING: images.control: by tag",
        ),
    ],
)
def test_tags_are_taken_in_advisory_and_in_active_where_they_are_wanted(
    given: dict[str, Any], mode: Object, image: str, note: str
) -> None:
    text = chart().render(values=joined(LEAST, mode, {"images": {"control": given}}))
    assert f"image: {image}\n" in text["rose/templates/scheduler.yaml"]
    notes = text["rose/templates/NOTES.txt"]
    assert note in notes if note else "by tag" not in notes


def test_null_takes_a_default_away() -> None:
    """By Helm's rule a null removes a default: a node that looks for no hosts."""
    values = joined(LEAST, {"node": {"config": {"discover": None, "verify_key": KEY}}})
    text = chart().render(values=values)["rose/templates/node.yaml"]
    assert '\\"discover\\"' not in text
    assert DIGEST in text
