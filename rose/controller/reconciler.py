"""Reconcile: what objects say against what is in force, decided from their state and no event.

an object that says something new  ──> applied; its policy holds until the new one is durable
one that cannot be taken           ──> refused in one line; what it said before is held
a policy whose object is gone      ──> deleted, after all others are applied
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from elastic_scheduler.capacity import CapacityPolicy, policy_of
from elastic_scheduler.errors import PolicyError
from rose.controller.reflector import Object


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to happen. refused: why, by the name of the object."""

    apply: tuple[CapacityPolicy, ...] = ()
    delete: tuple[str, ...] = ()
    refused: Mapping[str, str] | None = None


class ObjectReader:
    """Reads objects as policies; one that did not change is not read again."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[object, CapacityPolicy | str]] = {}

    def read(self, objects: Mapping[str, Object]) -> dict[str, CapacityPolicy | str]:
        """The policy of each object, or one line that says why it is none."""
        for name in self._read.keys() - objects.keys():
            del self._read[name]
        for name, each in objects.items():
            metadata = each["metadata"]
            # A status that is written changes neither.
            key = metadata.get("uid"), metadata.get("generation")
            if name not in self._read or self._read[name][0] != key:
                self._read[name] = key, _policy(name, each.get("spec"))
        return {name: policy for name, (_, policy) in self._read.items()}


def plan(
    read: Mapping[str, CapacityPolicy | str],
    in_force: Mapping[str, CapacityPolicy],
    of_objects: Set[str],
) -> Plan:
    """Decide. in_force: all policies, by name; of_objects: names of those that objects said."""
    found = {name: each for name, each in read.items() if isinstance(each, CapacityPolicy)}
    return Plan(
        # In this order, so that no node is for a moment without what bounds it.
        apply=tuple(
            policy
            for name, policy in sorted(found.items())
            if name not in of_objects or in_force.get(name) != policy
        ),
        delete=tuple(sorted(of_objects - read.keys())),
        refused={name: each for name, each in read.items() if isinstance(each, str)},
    )


def _policy(name: str, spec: Any) -> CapacityPolicy | str:  # noqa: ANN401 - JSON
    if not isinstance(spec, dict):
        return "spec: is missing; write it"
    if "name" in spec:
        return "name: there is no such field; the object's name is the policy's"
    try:
        return policy_of({**spec, "name": name})
    except PolicyError as error:
        return str(error)
