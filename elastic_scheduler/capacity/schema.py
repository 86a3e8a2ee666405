"""Schema of a capacity policy for a CRD, and its table for the docs: both come from the model.

A CRD takes structural schemas only: no `$ref`, no type inside `anyOf`, no `null` type. A field may
be null only where that says something else than leaving it out. Defaults are those of the enums
alone: the API server writes defaults into each object, which would keep those of the release that
stored it. The others are said in the description.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from elastic_scheduler.capacity.blackout import BlackoutWindow
from elastic_scheduler.capacity.policy import (
    Canary,
    CapacityPolicy,
    MaxHarvest,
    MaxHostBusy,
    NodeSelector,
    Reserve,
    SloBudget,
    TenantLimit,
    Watermarks,
)
from elastic_scheduler.capacity.values import duration_text

_DROPPED: Final = frozenset({"title", "additionalProperties"})


def crd_schema() -> dict[str, Any]:
    """Return the structural schema (OpenAPI v3) of a policy's spec: all but its name."""
    spec = structural(CapacityPolicy)
    del spec["properties"]["name"]
    spec["required"] = [name for name in spec.get("required", []) if name != "name"]
    if not spec["required"]:
        del spec["required"]
    return spec


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of any model."""
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
        # In OpenAPI v3.0 it is a word about `minimum`; what a reference named has it already.
        if value is not None and value is not True:
            said |= {bound.lower(): value, f"exclusive{bound}": True}
    # A map of labels is the one object whose keys are anybody's.
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


_NESTED: Final[dict[str, type[BaseModel]]] = {
    "nodeSelector": NodeSelector,
    "maxHarvest": MaxHarvest,
    "reserve": Reserve,
    "watermarks": Watermarks,
    "blackoutWindows[]": BlackoutWindow,
    "tenants[]": TenantLimit,
    "canary": Canary,
    "maxHostBusy": MaxHostBusy,
    "sloBudget": SloBudget,
}


def docs_table() -> str:
    """Return a Markdown table of all fields, as docs/capacity-policy.md has it."""
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    rows += [f"| `{path}` | {default} | {meaning} |" for path, default, meaning in _rows()]
    return "\n".join(rows)


def _rows() -> Iterator[tuple[str, str, str]]:
    for path, field in _fields(CapacityPolicy):
        nested = next((m for p, m in _NESTED.items() if p.removesuffix("[]") == path), None)
        if nested is None:
            yield path, _default(CapacityPolicy, path, field), field.description or ""
            continue
        whole = path + ("[]" if f"{path}[]" in _NESTED else "")
        absent = " (only where the object is there)" if field.default is None else ""
        for name, inner in _fields(nested):
            meaning = (inner.description or "") + absent
            yield f"{whole}.{name}", _default(nested, name, inner), meaning


def _fields(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(field.alias or name, field) for name, field in model.model_fields.items()]


def _default(model: type[BaseModel], alias: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    name = next(n for n, f in model.model_fields.items() if (f.alias or n) == alias)
    value = field.default
    if value is None or value in ((), {}):
        return "–"
    if name.endswith("_s"):
        return f"`{duration_text(value)}`"
    if isinstance(value, tuple):
        return "all"
    return f"`{value.value if isinstance(value, Enum) else value}`"
