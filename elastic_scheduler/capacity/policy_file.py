"""Policies as operators write them: JSON, values of YAML, objects of Kubernetes, and mistakes.

A mistake is one line: the field's path, what is wrong with the value, and what to write.
"""

import difflib
import json
import re
from typing import Any, Final

from pydantic import ValidationError

from elastic_scheduler.capacity.policy import PARTS, CapacityPolicy
from elastic_scheduler.errors import PolicyError

MAX_POLICY_BYTES: Final = 16 << 10


def parse_policy(text: str | bytes) -> CapacityPolicy:
    """Return the policy in a JSON text. Raises PolicyError with the field's path and what to do."""
    if len(text) > MAX_POLICY_BYTES:
        raise PolicyError(f"a policy of {len(text)} bytes; write one of at most {MAX_POLICY_BYTES}")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"the policy is no JSON ({error}); write one object") from None
    return policy_of(said)


def policy_of(said: object) -> CapacityPolicy:
    """Return the policy in parsed JSON: its fields, or a RoseCapacityPolicy object.

    Raises PolicyError.
    """
    within: tuple[str, ...] = ()
    if isinstance(said, dict) and "kind" in said:
        spec, metadata = said.get("spec"), said.get("metadata")
        if said["kind"] != "RoseCapacityPolicy":
            line = f"kind: {said['kind']!r} is no RoseCapacityPolicy; leave it out"
            raise PolicyError(line, ("kind",))
        if not (isinstance(spec, dict) and isinstance(metadata, dict) and metadata.get("name")):
            raise PolicyError("a RoseCapacityPolicy needs metadata.name and a spec; write both")
        if "name" in spec:
            line = "spec.name: the name is metadata.name; leave this one out"
            raise PolicyError(line, ("spec", "name"))
        said, within = spec | {"name": metadata["name"]}, ("spec",)
    try:
        return CapacityPolicy.model_validate(said)
    except ValidationError as error:
        raise PolicyError(_line(error), (*within, *error.errors()[0]["loc"])) from None


def policies_of(said: object, within: tuple[str | int, ...] = ()) -> tuple[CapacityPolicy, ...]:
    """Return the policies in parsed JSON or YAML: one, a list, or a List of objects.

    Raises PolicyError, whose path begins with `within`.
    """
    if isinstance(said, dict) and str(said.get("kind", "")).endswith("List"):
        return policies_of(said.get("items") or [], (*within, "items"))
    if isinstance(said, list):
        found: dict[str, CapacityPolicy] = {}
        for at, each in enumerate(said):
            for policy in policies_of(each, (*within, at)):
                if policy.name in found:
                    line = f"policy {policy.name} is there twice; write it once"
                    raise PolicyError(line, (*within, at))
                found[policy.name] = policy
        return tuple(found.values())
    try:
        return (policy_of(said),)
    except PolicyError as error:
        raise PolicyError(str(error), (*within, *error.path)) from None


# Kind of value that a field takes, by the beginning of pydantic's name of the error.
_SHOULD: Final = {
    "dict_": "an object, as {key: value}",
    "tuple_": "a list, as [a, b]",
    "string_type": "text; put it in quotes",
    "float_": "a number",
    "int_": "a whole number",
    "datetime_": "a moment, as 2026-12-27T08:00:00Z",
}
# Fields that other systems have, and what stands for them here.
_ELSEWHERE: Final = {
    "maxGuests": "maxHarvest.guests bounds all jobs, tenants[].maxGuests one",
    **dict.fromkeys(
        ("model", "models", "excludeModels"),
        "label nodes by model, and write nodeSelector.matchExpressions with NotIn",
    ),
    **dict.fromkeys(("expires", "ttl", "duration"), "write until"),
    **dict.fromkeys(("schedule", "cron", "hours"), "write allowedWindows, or during"),
    **dict.fromkeys(("enabled", "paused", "suspend"), "write stopPolicy: Hold, or mode: Off"),
    **dict.fromkeys(("alert", "alerts"), "rules of `rose scheduler --alerts` hold by alerts"),
}


def _line(error: ValidationError) -> str:
    first: Any = error.errors()[0]
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    ).removeprefix(".")
    kind, shown = first["type"], repr(first["input"])[:40]
    message = str(first["msg"]).removeprefix("Value error, ").replace("Input", shown, 1)
    should = next((text for begin, text in _SHOULD.items() if kind.startswith(begin)), None)
    if kind == "extra_forbidden":
        message = f"there is no such field; {_meant(path)}"
    elif kind == "missing":
        message = "is missing; write it"
    elif kind == "model_type":
        fields = ", ".join(_names(path)) if path else "a name; see docs/capacity-policy.md"
        message = f"{shown} should be an object with {fields}"
    elif should is not None:
        message = f"{shown} should be {should}"
    elif first.get("ctx", {}).keys() & {"le", "lt"} and max(first["ctx"].values()) == 1:
        message += "; write a share, as 0.2 or 20%"
    return f"{path}: {message}" if path else message


def _meant(path: str) -> str:
    """Return the field that was probably meant by one that does not exist."""
    parent, _, key = path.rpartition(".")
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    for place in (parent, "", *PARTS):
        names = _names(place)
        near = [name for name in names if name.lower().startswith(key.lower())]
        if near := near or difflib.get_close_matches(key, names, n=1):
            return f"did you mean {f'{place}.{near[0]}'.removeprefix('.')}?"
    return f"write {', '.join(_names(parent))}" if parent else "see docs/capacity-policy.md"


def _names(path: str) -> list[str]:
    """Return the names of the fields of the object at a path."""
    part = PARTS.get(re.sub(r"\[\d+\]", "[]", path), CapacityPolicy)
    return [field.alias or name for name, field in part.model_fields.items()]
