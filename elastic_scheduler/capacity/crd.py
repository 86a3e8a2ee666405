"""CustomResourceDefinition of RoseCapacityPolicy, made from the model that checks policies.

A CRD takes structural schemas only: no `$ref`, no type inside `anyOf`, no `null` type. A field may
be null only if that differs from leaving it out. Defaults are those of the enums alone: the API
server writes defaults into each object, which would keep those of the release that stored it. The
others are in the description, and in the table of the docs.

CEL rules express what a schema of fields cannot, so that the API server refuses an object that a
scheduler would refuse. The scheduler's own check stays the last word: it knows time zones.
"""

from collections.abc import Iterator
from enum import Enum, StrEnum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from elastic_scheduler.capacity.gate import CLI
from elastic_scheduler.capacity.policy import PARTS, CapacityPolicy, DailyWindow, duration_text

_DROPPED: Final = frozenset({"title", "additionalProperties"})
GROUP: Final = "rose.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "RoseCapacityPolicy"
PLURAL: Final = "rosecapacitypolicies"
_MAX_CONDITIONS: Final = 16
_MAX_LIMITS: Final = 32
_WINDOWS: Final = tuple(path for path, part in PARTS.items() if part is DailyWindow)
# Place in the schema of the spec, the rule, and what to do if it does not hold.
_RULES: Final = (
    *(
        (
            "",
            f"!has(self.mode) || self.mode != 'Active' || !has(self.maxHarvest)"
            f" || !has(self.maxHarvest.{cap}) || {lends}",
            f"maxHarvest.{cap} 0 lends nothing, though mode is Active; raise it, or write mode Off",
        )
        for cap, lends in (
            ("compute", "self.maxHarvest.compute > 0.0"),
            ("deploymentShare", "self.maxHarvest.deploymentShare > 0.0"),
            (
                "nodes",
                "(type(self.maxHarvest.nodes) == string ? self.maxHarvest.nodes != '0%'"
                " : self.maxHarvest.nodes != 0)",
            ),
            ("guests", "self.maxHarvest.guests > 0"),
        )
    ),
    (
        "",
        "!has(self.from) || !has(self.until) || self.from < self.until",
        "until: not after from, so the policy never counts; swap them",
    ),
    (
        "nodeSelector.matchExpressions[]",
        "(self.operator == 'In' || self.operator == 'NotIn')"
        " == (has(self.values) && size(self.values) > 0)",
        "operators In and NotIn need values; Exists and DoesNotExist take none",
    ),
    (
        "",
        "!has(self.staleAfter) || (duration(self.staleAfter) >= duration('2s')"
        " && duration(self.staleAfter) <= duration('5s'))",
        "staleAfter: write 2s to 5s, since leases are renewed each second and live no longer",
    ),
    (
        "",
        "!has(self.reclaimDeadline) || (duration(self.reclaimDeadline) >= duration('1s')"
        " && duration(self.reclaimDeadline) <= duration('10m'))",
        "reclaimDeadline: write 1s to 10m",
    ),
    (
        "",
        "!has(self.cooldown) || duration(self.cooldown) <= duration('24h')",
        "cooldown: more than a day; write a blackout window, or mode Off",
    ),
    (
        "maxHarvest.memory",
        "type(self) == string ? !self.matches('^0+(Ki|Mi|Gi|Ti)?$') : self > 0",
        "maxHarvest.memory: write a positive number of bytes, as 8Gi",
    ),
    (
        "watermarks",
        "(has(self.low) ? self.low : 0.8) <= (has(self.high) ? self.high : 0.9)",
        "watermarks.low is above watermarks.high; swap them",
    ),
    (
        "maxHostBusy",
        "(has(self.resume) ? self.resume : 0.7) < (has(self.share) ? self.share : 0.85)",
        "maxHostBusy.resume is not below maxHostBusy.share; lower it, so that a host does not"
        " change each second",
    ),
    (
        "maxHostBusy",
        "!has(self.over) || (duration(self.over) >= duration('1s')"
        " && duration(self.over) <= duration('10m'))",
        "maxHostBusy.over: write 1s to 10m",
    ),
    *(
        (
            path,
            "self.from != self.to && self.from != '24:00'",
            "a window that begins when it ends is empty; write 00:00 to 24:00 for whole days",
        )
        for path in _WINDOWS
    ),
)
# Lists that the API server merges by key or by value; all other lists are replaced whole.
_LISTS: Final[dict[str, dict[str, Any]]] = {
    "tenants": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["job"]},
    **{path.removesuffix("[]"): {"x-kubernetes-list-type": "atomic"} for path in _WINDOWS},
    **{
        f"{path}.days": {"x-kubernetes-list-type": "set", "minItems": 1, "maxItems": 7}
        for path in _WINDOWS
    },
    "nodeSelector.matchExpressions": {"x-kubernetes-list-type": "atomic", "maxItems": 64},
    "nodeSelector.matchExpressions[].values": {"x-kubernetes-list-type": "set", "maxItems": 64},
    "nodeSelector.names": {"x-kubernetes-list-type": "set", "maxItems": 1_024},
    "nodeSelector.matchLabels": {"maxProperties": 64},
}
_BOUNDS: Final[dict[str, dict[str, Any]]] = {
    **{
        f"{path}.timeZone": {"maxLength": 64, "pattern": "^[A-Za-z_]+(/[A-Za-z0-9_+-]+)*$"}
        for path in _WINDOWS
    },
    "nodeSelector.matchExpressions[].values[]": {"maxLength": 253},
    "nodeSelector.names[]": {"maxLength": 253},
}
_COLUMNS: Final = (
    ("Mode", "string", ".spec.mode", "what it allows", 0),
    ("Stop", "string", ".spec.stopPolicy", "the stop in it", 0),
    ("Nodes", "string", ".status.summary.nodes", "lending of selected", 0),
    ("Limited-By", "string", ".status.limitedBy[0].limit", "what holds most nodes back", 0),
    ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", "", 0),
    ("Enforced", "string", ".status.conditions[?(@.type=='Enforced')].status", "", 0),
    ("Fresh", "string", ".status.conditions[?(@.type=='TelemetryFresh')].status", "", 1),
    ("Conflicted", "string", ".status.conditions[?(@.type=='Conflicted')].status", "", 1),
    ("Would-Lend", "integer", ".status.summary.wouldLendBytes", "bytes of KV memory", 1),
    ("Age", "date", ".metadata.creationTimestamp", "", 0),
)


def crd_schema() -> dict[str, Any]:
    """Return the structural schema (OpenAPI v3) of a policy's spec: all fields but the name."""
    spec = structural(CapacityPolicy)
    del spec["properties"]["name"]
    spec["required"] = [name for name in spec.get("required", []) if name != "name"]
    if not spec["required"]:
        del spec["required"]
    return spec


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema (OpenAPI v3), as a CRD needs it, of a pydantic model."""
    schema = model.model_json_schema(by_alias=True)
    made: dict[str, Any] = _structural(schema, schema.get("$defs", {}))
    return made


def _structural(part: Any, defs: dict[str, Any]) -> Any:  # noqa: ANN401 - a JSON schema
    if isinstance(part, list):
        return [_structural(each, defs) for each in part]
    if not isinstance(part, dict):
        return part
    said = {k: v for k, v in part.items() if k not in _DROPPED and k not in ("$defs", "$ref")}
    if "$ref" in part:
        said = {**_structural(defs[part["$ref"].rsplit("/", 1)[-1]], defs), **said}
    if "anyOf" in said:
        kinds = [each for each in said.pop("anyOf") if each.get("type") != "null"]
        absent = {} if said.get("default", 0) is None else {"nullable": True}
        said = {**_structural(kinds[0], defs), **said, **absent}
    _say_default(said)
    if "uniqueItems" in said:
        said["x-kubernetes-list-type"] = "set" if said.pop("uniqueItems") else "atomic"
    for bound in ("Minimum", "Maximum"):
        value = said.get(f"exclusive{bound}")
        # OpenAPI v3.0 has a boolean beside `minimum`; a reference's target has it already.
        if value is not None and value is not True:
            said |= {bound.lower(): value, f"exclusive{bound}": True}
    # A map of labels is the one object with arbitrary keys.
    if said.get("type") == "object" and "properties" not in said:
        said["additionalProperties"] = {"type": "string"}
    return {
        key: {name: _structural(each, defs) for name, each in value.items()}
        if key == "properties"
        else _structural(value, defs)
        for key, value in said.items()
    }


def _say_default(said: dict[str, Any]) -> None:
    if "default" not in said or ("enum" in said and said["default"] is not None):
        return
    default = said.pop("default")
    if default in (None, "") or isinstance(default, list | dict):
        return
    if said.get("type") == "string" and isinstance(default, float):
        default = duration_text(default)
    said["description"] = f"{said.get('description', '')} (default {default})".strip()


def docs_table() -> str:
    """Return a Markdown table of all policy fields with their defaults and meanings."""
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    rows += [f"| `{path}` | {default} | {meaning} |" for path, default, meaning in _rows()]
    return "\n".join(rows)


def _rows(
    model: type[BaseModel] = CapacityPolicy, path: str = "", note: str = ""
) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}".removeprefix(".")
        nested = next((each for each in (here, f"{here}[]") if each in PARTS), None)
        meaning = field.description or ""
        if nested is None:
            yield here, _default(name, field), meaning + note
        elif (first := next(p for p in PARTS if PARTS[p] is PARTS[nested])) != nested:
            yield nested, _default(name, field), f"{meaning}, as `{first}`"
        else:
            absent = " (only where the object is there)" if field.default is None else ""
            yield from _rows(PARTS[nested], nested, absent)


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value in ((), {}):
        return "–"
    if name.endswith("_s"):
        return f"`{duration_text(value)}`"
    if isinstance(value, tuple):
        return "all"
    return f"`{value.value if isinstance(value, Enum) else value}`"


class ConditionType(StrEnum):
    """Conditions of a policy, as its status has them."""

    READY = "Ready"
    """Condition: a scheduler has put the policy in force."""
    TELEMETRY_FRESH = "TelemetryFresh"
    """Condition: all nodes of the policy have reported within `staleAfter`."""
    CONFLICTED = "Conflicted"
    """Condition: another policy is stricter in a field that this one sets."""
    ENFORCED = "Enforced"
    """Condition: all nodes of the policy keep within it."""


class _Status(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


class PolicyLimit(_Status):
    """A reason for which nodes lend less than the policy allows."""

    limit: str = Field(
        min_length=1, max_length=64, description="what holds them back, as busy or watermarks.high"
    )
    nodes: int = Field(ge=0, description="how many nodes it holds back")
    detail: str = Field(default="", max_length=256, description="one of them, with its figures")


class PolicySummary(_Status):
    """Figures of a policy's nodes."""

    nodes: str = Field(default="", max_length=32, description="lending of selected, as 3/12")
    silent: int = Field(default=0, ge=0, description="nodes not heard within staleAfter")
    lent_bytes: int = Field(default=0, ge=0, description="KV memory that is lent now")
    would_lend_bytes: int = Field(
        default=0, ge=0, description="KV memory that an Active policy would lend now"
    )
    would_lend_compute: float = Field(
        default=0.0,
        ge=0.0,
        description="compute that an Active policy would lend now, in whole hosts",
    )


class Condition(_Status):
    """A condition, as Kubernetes writes them."""

    type: str = Field(max_length=64, description=", ".join(ConditionType))
    status: str = Field(
        description="whether it holds", json_schema_extra={"enum": ["True", "False", "Unknown"]}
    )
    observed_generation: int = Field(default=0, ge=0, description="of the spec that was judged")
    last_transition_time: str = Field(
        description="since when", json_schema_extra={"format": "date-time"}
    )
    reason: str = Field(
        min_length=1,
        max_length=64,
        pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="one word, for programs",
    )
    message: str = Field(max_length=1_024, description="one line, for people")


class PolicyStatus(_Status):
    """Status of a policy, by its controller."""

    observed_generation: int = Field(default=0, ge=0, description="of the spec it speaks of")
    summary: PolicySummary | None = Field(default=None, description="figures of its nodes")
    limited_by: tuple[PolicyLimit, ...] = Field(
        default=(),
        max_length=_MAX_LIMITS,
        description="why its nodes lend less than it allows, most nodes first",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=_MAX_CONDITIONS, description=", ".join(ConditionType)
    )


def crd() -> dict[str, Any]:
    """Return the whole CustomResourceDefinition of RoseCapacityPolicy, as a dict."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            # Nodes belong to the cluster, and so does their lendable capacity.
            "scope": "Cluster",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["rcp"],
                "categories": ["rose"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [*map(_column, _COLUMNS)],
                    "schema": {"openAPIV3Schema": _object()},
                }
            ],
        },
    }


def _object() -> dict[str, Any]:
    status = structural(PolicyStatus)
    status["properties"]["conditions"] |= {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    status["properties"]["limitedBy"] |= {"x-kubernetes-list-type": "atomic"}
    return {
        "type": "object",
        "description": "What may be lent of the GPUs of some nodes, and under which conditions.",
        "required": ["spec"],
        "x-kubernetes-validations": [
            _rule(
                f"self.metadata.name != '{CLI}'",
                f"the name {CLI} is the command line's own policy; choose another",
            )
        ],
        "properties": {"spec": _spec(), "status": status},
    }


def _spec() -> dict[str, Any]:
    spec = crd_schema()
    for path, bounds in (_LISTS | _BOUNDS).items():
        _at(spec, path).update(bounds)
    for path, rule, message in _RULES:
        _at(spec, path).setdefault("x-kubernetes-validations", []).append(_rule(rule, message))
    return spec


def _rule(rule: str, message: str) -> dict[str, str]:
    return {"rule": rule, "message": message}


def _at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for step in _steps(path):
        schema = schema["items"] if step == "[]" else schema["properties"][step]
    return schema


def _steps(path: str) -> Iterator[str]:
    for part in filter(None, path.split(".")):
        yield part.removesuffix("[]")
        if part.endswith("[]"):
            yield "[]"


def _column(column: tuple[str, str, str, str, int]) -> dict[str, Any]:
    name, kind, path, what, priority = column
    said: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return said | {k: v for k, v in (("description", what), ("priority", priority)) if v}
