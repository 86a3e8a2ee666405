"""The CRD is what the code says, and takes what the code takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator, ValidationError

from elastic_scheduler.capacity import CapacityPolicy, PolicyStatus, crd

ROOT = Path(__file__).parents[3]
FILE = ROOT / "helm" / "rose" / "files" / "crds" / "rosecapacitypolicies.yaml"


def version() -> dict[str, Any]:
    found: dict[str, Any] = crd()["spec"]["versions"][0]
    return found


def schema() -> dict[str, Any]:
    found: dict[str, Any] = version()["schema"]["openAPIV3Schema"]
    return found


def parts(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, inner in schema.get("properties", {}).items():
        found += parts(inner, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        found += parts(schema["items"], f"{path}[]")
    return found


def test_the_committed_crd_is_what_the_code_says() -> None:
    assert yaml.safe_load(FILE.read_text()) == crd(), "run scripts/crd"


def test_the_crd_is_structural() -> None:
    for path, part in parts(schema()):
        said = "type" in part or "x-kubernetes-int-or-string" in part
        assert said, f"{path}: a structural schema gives each field a type"
        assert not part.keys() & {"$ref", "anyOf", "oneOf", "uniqueItems", "title"}, path


def test_bounds_are_numbers() -> None:
    Draft4Validator.check_schema(schema())
    found = [part for _, part in parts(schema()) if "exclusiveMinimum" in part]
    assert found
    assert all(isinstance(part["minimum"], float) for part in found)


def test_defaults_are_of_their_own_type() -> None:
    kinds = {"string": str, "number": float, "integer": int, "object": dict, "array": list}
    for path, part in parts(schema()):
        if "default" in part:
            assert isinstance(part["default"], kinds[part["type"]]), path


def test_a_new_policy_has_no_mode_and_only_bounds() -> None:
    assert "default" not in schema()["properties"]["spec"]["properties"]["mode"]


def test_conditions_are_a_map_by_their_type() -> None:
    conditions = schema()["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_columns_show_fields_that_are_there() -> None:
    known = {path for path, _ in parts(schema())}
    for column in version()["additionalPrinterColumns"]:
        path = column["jsonPath"].split("[")[0]
        assert path.startswith(".metadata.") or path in known, column["name"]


def test_the_status_has_the_models_fields() -> None:
    fields = {field.alias or name for name, field in PolicyStatus.model_fields.items()}
    assert set(schema()["properties"]["status"]["properties"]) == fields


def test_what_rules_look_at_is_bounded() -> None:
    """The API server refuses rules whose cost has no bound."""
    for path, part in parts(schema()):
        if part.get("type") == "array":
            assert "maxItems" in part, path


EXAMPLES = json.loads((ROOT / "examples" / "capacity-policy.json").read_text())


@pytest.mark.parametrize("policy", EXAMPLES, ids=lambda each: str(each["name"]))
def test_the_example_is_an_object_of_the_crd(policy: dict[str, Any]) -> None:
    spec = {key: value for key, value in policy.items() if key != "name"}
    Draft4Validator(schema()).validate({"spec": spec})


@pytest.mark.parametrize(
    "spec",
    [
        {"mode": "Sometimes"},
        {"mode": None},
        {"maxHarvest": {"memory": "much"}},
        {"maxHarvest": {"nodes": "101%"}},
        {"maxHarvest": {"compute": 1.5}},
        {"staleAfter": "soon"},
        {"canary": {"percent": 101}},
        {"tenants": [{"priority": 2}]},
        {"blackoutWindows": [{"from": "25:00", "to": "10:00", "timeZone": "UTC"}]},
        {"blackoutWindows": [{"days": [], "from": "8:30", "to": "10:00", "timeZone": "UTC"}]},
    ],
    ids=json.dumps,
)
def test_the_crd_refuses_what_the_model_refuses(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        CapacityPolicy.model_validate({"name": "p", **spec})
    with pytest.raises(ValidationError):
        Draft4Validator(schema()).validate({"spec": spec})
