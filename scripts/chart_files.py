"""Files that come from the model of the values: values.yaml, its JSON schema, tables in the docs.

`scripts/chart` writes them; a test compares them.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from elastic_scheduler.capacity import crd
from scripts.chart_values import ControlWorkload, Images, Resources, Values, Workload
from scripts.generated import ROOT, main, with_parts

_COMMON: Final = ControlWorkload.model_fields

# Their fields have pages of their own: a table here would be a second one.
_ELSEWHERE: Final = {
    "policy": "../capacity-policy.md#the-fields",
    "node.config": "../node.md#the-file",
    "gateway.options": "../gateway.md",
}


def schema() -> dict[str, Any]:
    """Return the JSON schema of values.schema.json."""
    made: dict[str, Any] = _helmed(Values.model_json_schema(by_alias=True))
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # A chart that has this one as a dependency sets it as its condition.
    made["properties"]["enabled"] = {"type": "boolean"}
    return made


_DROPPED: Final = frozenset({"title", "default", "format", "x-kubernetes-int-or-string"})


def _helmed(part: Any, named: bool = False) -> Any:  # noqa: ANN401 - a JSON schema
    """Leave out what Helm needs not; `named`: the keys are fields of values."""
    if isinstance(part, list):
        return [_helmed(each) for each in part]
    if not isinstance(part, dict):
        return part
    said = {
        key: _helmed(value, key in ("properties", "$defs") and not named)
        for key, value in part.items()
        if named or key not in _DROPPED
    }
    if not named and "x-kubernetes-int-or-string" in part:
        said["type"] = ["integer", "string"]
    return said


def defaults() -> dict[str, Any]:
    """Return the values that values.yaml has."""
    # Values of these three models are written only where they are set.
    whole: dict[str, Any] = json.loads(Values().model_dump_json(by_alias=True))
    whole["policy"] = {}
    whole["gateway"]["options"] = {}
    whole["node"]["config"] = {"discover": {"folder": "/run/rose"}}
    return whole


def values_yaml() -> str:
    """Return values.yaml, with a comment for each value."""
    lines = ["# Written by `scripts/chart` from scripts/chart_values.py; a test compares them."]
    lines += _written(Values, defaults(), 0, "")
    return "\n".join(lines) + "\n"


def _written(
    model: type[BaseModel], values: dict[str, Any], depth: int, path: str
) -> Iterator[str]:
    indent = "  " * depth
    for name, field in sorted(model.model_fields.items(), key=lambda each: each[0] in _COMMON):
        key = field.alias or name
        here = f"{path}.{key}" if path else key
        if key not in values:
            continue
        said = textwrap.wrap(_sentence(field.description or ""), 98 - len(indent))
        yield from (f"{indent}# {line}" for line in said)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and here not in _ELSEWHERE:
            yield f"{indent}{key}:"
            yield from _written(inner, values[key], depth + 1, here)
        else:
            text = yaml.safe_dump({key: values[key]}, sort_keys=False, width=98).rstrip()
            yield from (f"{indent}{line}" for line in text.splitlines())


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def docs_table(pages: str = "../") -> str:
    """Return a Markdown table of all values. pages: path to docs/ from the page with the table."""
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    found = [*_rows(Values, defaults()), *_common_rows()]
    rows += [f"| `{path}` | {default} | {what} |" for path, default, what in found]
    if pages != "../":
        rows = [row.replace("](../", f"]({pages}") for row in rows]
    return "\n".join(rows)


def _rows(
    model: type[BaseModel], values: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        key = field.alias or name
        here = f"{path}.{key}" if path else key
        inner, value = field.annotation, values.get(key)
        common = _COMMON.get(name)
        if common and common.default == field.default:
            continue
        if here in _ELSEWHERE:
            what = f"{field.description} ([fields]({_ELSEWHERE[here]}))"
            yield here, f"`{json.dumps(value)}`" if value else "–", what
        elif isinstance(inner, type) and issubclass(inner, BaseModel) and inner is not Resources:
            yield from _rows(inner, value or {}, here)
        else:
            yield here, _shown(key, values), (field.description or "").replace("|", "\\|")


def images_table() -> str:
    """Return a Markdown table of the chart's images, for mirrors."""
    rows = ["| value | repository | what runs it |", "| --- | --- | --- |"]
    for name, field in Images.model_fields.items():
        rows.append(f"| `images.{name}` | `{field.default.repository}` | {field.description} |")
    return "\n".join(rows)


def _common_rows() -> Iterator[tuple[str, str, str]]:
    for name, field in _COMMON.items():
        what = field.description or ""
        if name not in Workload.model_fields:
            what += "; not of `node`"
        path = f"WORKLOAD.{field.alias or name}"
        yield f"{path}.annotations" if name == "service_account" else path, "–", what


def _shown(key: str, values: dict[str, Any]) -> str:
    if key not in values:
        return "required"
    value = values[key]
    if value is None or value in ("", [], {}):
        return "–"
    return f"`{value.value if isinstance(value, Enum) else json.dumps(value)}`"


def as_json(schema: dict[str, Any]) -> str:
    """Write a schema as the file has it: short lists on a line."""
    text = json.dumps(schema, indent=1)
    return re.sub(r"\[\s+((?:[^\[\]{}\n]+\n?\s*)+?)\]", _on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + " ".join(found[1].split()) + "]"


# ---- RoseCapacityPolicy ----


def rules_table() -> str:
    """Return a Markdown table of what the API server refuses beside wrong types."""
    rows = ["| where | it holds that | else |", "| --- | --- | --- |"]
    for path, part in _parts(_object_schema()):
        for rule in part.get("x-kubernetes-validations", ()):
            text = rule["rule"].replace("|", "\\|")
            rows.append(f"| `{path or 'object'}` | `{text}` | {rule['message']} |")
    return "\n".join(rows)


def status_table() -> str:
    """Return a Markdown table of the status of an object."""
    rows = ["| field | meaning |", "| --- | --- |"]
    for path, part in _parts(_object_schema()["properties"]["status"], "status"):
        if part.get("description") and path != "status" and not path.endswith("[]"):
            rows.append(f"| `{path}` | {part['description']} |")
    return "\n".join(rows)


def _object_schema() -> dict[str, Any]:
    found: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def _parts(part: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, part
    for name, inner in part.get("properties", {}).items():
        yield from _parts(inner, f"{path}.{name}" if path else name)
    if "properties" in part.get("items", {}):
        yield from _parts(part["items"], f"{path}[]")


CHART: Final = ROOT / "helm" / "rose"
OPERATORS: Final = ROOT / "docs" / "operators"


def files() -> dict[Path, str]:
    """Return the text that each generated file should have, by path."""
    rules = {"rules": rules_table(), "status": status_table()}
    return {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": as_json(schema()),
        **with_parts(
            CHART / "README.md", {"values": docs_table("../../docs/"), "images": images_table()}
        ),
        **with_parts(OPERATORS / "install.md", {"values": docs_table()}),
        **with_parts(OPERATORS / "policy-objects.md", rules),
    }


if __name__ == "__main__":
    sys.exit(main(files, "scripts/chart"))
