"""Reconcile: compare objects with the policies in force; decided from state, not from events.

a changed object             ──> applied; its old policy holds until the new one is durable
an invalid object            ──> refused in one line; its old policy is held
a policy without its object  ──> deleted, after all others are applied
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from elastic_scheduler.capacity import CapacityPolicy, policy_of
from elastic_scheduler.errors import PolicyError
from rose.controller.reflector import Object


@dataclass(frozen=True, slots=True)
class Plan:
    """Changes to make. refused: the reason by the name of the object."""

    apply: tuple[CapacityPolicy, ...] = ()
    delete: tuple[str, ...] = ()
    refused: Mapping[str, str] | None = None


class ObjectReader:
    """Reader of objects as policies; an unchanged object is not parsed again."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[object, CapacityPolicy | str]] = {}

    def read(self, objects: Mapping[str, Object]) -> dict[str, CapacityPolicy | str]:
        """Return the object's policy, or one line that says why it is invalid."""
        for name in self._read.keys() - objects.keys():
            del self._read[name]
        for name, each in objects.items():
            metadata = each["metadata"]
            # Writing a status changes neither.
            key = metadata.get("uid"), metadata.get("generation")
            if name not in self._read or self._read[name][0] != key:
                self._read[name] = key, _policy(name, each.get("spec"))
        return {name: policy for name, (_, policy) in self._read.items()}


def plan(
    read: Mapping[str, CapacityPolicy | str],
    in_force: Mapping[str, CapacityPolicy],
    of_objects: Set[str],
) -> Plan:
    """Return the changes. in_force: all policies by name. of_objects: names of the objects' own."""
    found = {name: each for name, each in read.items() if isinstance(each, CapacityPolicy)}
    return Plan(
        # Apply precedes delete, so that a node is never without the policy that bounds it.
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
