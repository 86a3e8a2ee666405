"""PolicyController: follows the objects of the API server and acts in the scheduler's name.

    follow  four times a second ──> objects as they are ──> policies in force, then `objects_heard`
    say     every other second  ──> statuses that differ, then their events

The API server is asked for the versions of all objects, and for the objects where one differs from
those that are known: an answer proves that the server is there and that no change was missed, which
a watch on which nothing happens does not. `objects_heard` keeps policies of objects from being
held. It names a moment only when all objects that the API server had then are in force and durable.

A plan is decided from state, not from events:

    a changed object             ──> applied; its old policy holds until the new one is durable
    an invalid object            ──> refused in one line; its old policy is held
    a policy without its object  ──> deleted, after all others are applied
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, Protocol

from elastic_scheduler.capacity import CapacityPolicy, policy_of
from elastic_scheduler.errors import PolicyError
from rose.controller.conditions import (
    INVALID,
    REFUSED,
    Object,
    ObjectRefusal,
    differs,
    dumped,
    events_of,
    is_news,
    judged,
)
from rose.controller.kube_api import ApiError, KubeApi
from rose.errors import ConfigError, RefusedError
from rose.scheduler.core.fleet import is_chosen
from rose.scheduler.core.messages import PolicyApplied, PolicyDeleted
from rose.scheduler.core.observed import PolicyView

LOOK_S: Final = 0.25
STATUS_S: Final = 2.0
LABELS_S: Final = 5.0
# Changed figures alone are written no more often than this.
FIGURES_S: Final = 15.0
BY: Final = "kubernetes"
# Errors of reading an answer that is not a list of objects.
NO_LIST: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


NodeLabels = Mapping[str, Mapping[str, str]]


class LeadingScheduler(Protocol):
    """Interface of the leading scheduler for the controller of policy objects."""

    async def ask(self, event: PolicyApplied | PolicyDeleted, by: str) -> int:
        """Carry a request out; return its answer once it is durable.

        by: the requester, for the audit log.
        """

    def objects_heard(self, heard_s: float, refused: frozenset[str], labels: NodeLabels) -> None:
        """Report that all objects' policies are in force as of `heard_s`, but for the refused
        names, and the labels of nodes.
        """

    def policies_in_force(self) -> tuple[Mapping[str, CapacityPolicy], frozenset[str]]:
        """Return all policies by name, and the names of those that are Kubernetes objects."""

    def policy_views(self) -> Mapping[str, PolicyView]:
        """Return the status of each policy on its nodes, by policy name."""


class PolicyController:
    """Controller of RoseCapacityPolicy objects during one term of a scheduler.

    It puts the objects' policies in force and writes the objects' statuses and events.
    events(event, **fields): takes `objects_unheard`, `objects_heard`, `object_refused`. clock: the
    scheduler's. label_keys: patterns of the labels of Kubernetes nodes that policies go by.
    """

    def __init__(
        self,
        api: KubeApi,
        scheduler: LeadingScheduler,
        events: Callable[..., object],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        label_keys: Sequence[str] = (),
    ) -> None:
        self._label_keys = label_keys
        self._labels: NodeLabels = {}
        self._labelled_s = -LABELS_S
        self._api, self._scheduler, self._events = api, scheduler, events
        self._clock, self._wall_clock = clock, wall_clock
        self._reader = ObjectReader()
        # None until all objects were read once.
        self._objects: Mapping[str, Object] | None = None
        self._heard_s = 0.0
        self._refused: dict[str, ObjectRefusal] = {}
        self._written_s: dict[str, float] = {}
        self._unheard = self._unstored = self._unsaid = ""

    def troubles(self) -> list[str]:
        """Return the faults that stop the controller's work now, a line each."""
        held = f"policies of objects are held: {self._unheard}" if self._unheard else ""
        return [each for each in (held, self._unstored, self._unsaid) if each]

    async def run(self) -> None:
        """Follow the objects until cancelled; a second call reads all of them again."""
        self._objects = None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._say())

    # ---- policies in force ----

    async def _follow(self) -> None:
        while True:
            await self._look()
            if self._objects is not None:
                await self._put_in_force(self._objects, self._heard_s)
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        # The time of the request: later objects may have changed since.
        asked_s, trouble = self._clock(), ""
        try:
            if self._label_keys and asked_s >= self._labelled_s + LABELS_S:
                self._labels = await asyncio.to_thread(labels_now, self._api, self._label_keys)
                self._labelled_s = asked_s
            self._objects = await asyncio.to_thread(objects_now, self._api, self._objects)
            self._heard_s = asked_s
        except ApiError as error:
            trouble = str(error)
        if trouble and not self._unheard:
            self._events("objects_unheard", message=trouble)
        elif self._unheard and not trouble:
            self._events("objects_heard", objects=len(self._objects or ()))
        self._unheard = trouble

    async def _put_in_force(self, objects: Mapping[str, Object], heard_s: float) -> None:
        todo = plan(self._reader.read(objects), *self._scheduler.policies_in_force())
        refused = {name: ObjectRefusal(INVALID, line) for name, line in todo.refused.items()}
        try:
            for policy in todo.apply:
                refusal = await self._apply(policy)
                if refusal is not None:
                    refused[policy.name] = refusal
            for name in todo.delete:
                await self._scheduler.ask(PolicyDeleted(name, of_object=True), BY)
        except TimeoutError:
            self._unstored = "the store takes no writes for now: policies of objects wait"
            return
        self._unstored = ""
        for name in refused.keys() - self._refused.keys():
            self._events("object_refused", policy=name, message=refused[name].line)
        self._refused = refused
        self._scheduler.objects_heard(heard_s, frozenset(refused), self._labels)

    async def _apply(self, policy: CapacityPolicy) -> ObjectRefusal | None:
        try:
            await self._scheduler.ask(PolicyApplied(policy, of_object=True), BY)
        except (RefusedError, ConfigError) as error:
            return ObjectRefusal(REFUSED, str(error))
        return None

    # ---- what objects say of themselves ----

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            if self._objects is None or self._unheard:
                continue
            views, objects = self._scheduler.policy_views(), self._objects
            why = ""
            for name, each in sorted(objects.items()):
                view = views.get(name)
                own = view if view is not None and view.of_object else None
                why = await self._say_one(name, each, own) or why
            for name in self._written_s.keys() - objects.keys():
                del self._written_s[name]
            self._unsaid = why

    async def _say_one(self, name: str, each: Object, view: PolicyView | None) -> str:
        """Write the status and events of one object if they differ; return a fault, or ""."""
        wall_s = self._wall_clock()
        status = judged(each, self._refused.get(name), view, wall_s)
        said = dumped(status)
        now_s = self._clock()
        due = now_s >= self._written_s.get(name, -FIGURES_S) + FIGURES_S
        if not differs(each, said) or not (due or is_news(each, said)):
            return ""
        version = each["metadata"]["resourceVersion"]
        try:
            await asyncio.to_thread(self._api.write_status, name, version, said)
            self._written_s[name] = now_s
            for event in events_of(each, status, wall_s):
                await asyncio.to_thread(self._api.create_event, event)
        except ApiError as error:
            # The next look finds an object that changed or was deleted meanwhile.
            return "" if error.code in (404, 409) else f"status of {name}: {error}"
        return ""


def objects_now(api: KubeApi, known: Mapping[str, Object] | None) -> Mapping[str, Object]:
    """Return all policy objects of the API server by name; `known` itself if none has changed.

    Raises ApiError if the server does not answer, or answers with something else than a list of
    objects.
    """
    try:
        if known is not None and _versions(items_of(api.probe())) == _versions(known.values()):
            return known
        found = {str(each["metadata"]["name"]): each for each in items_of(api.list())}
        _versions(found.values())
    except NO_LIST as error:
        raise ApiError(0, f"the API server's list is none ({error!r})") from error
    return found


def labels_now(api: KubeApi, keys: Sequence[str]) -> NodeLabels:
    """Return the labels of each Kubernetes node whose keys match, by its name. Raises ApiError."""
    try:
        found = ((each["metadata"]["name"], each["metadata"]) for each in items_of(api.nodes()))
        return {
            name: {k: v for k, v in said.get("labels", {}).items() if is_chosen(k, keys)}
            for name, said in found
        }
    except NO_LIST as error:
        raise ApiError(0, f"the API server's list of nodes is none ({error!r})") from error


def items_of(body: bytes) -> list[Object]:
    """Return the objects of an API server's list. Raises the errors of NO_LIST."""
    # Go writes an empty list as null where the server made none.
    items: list[Object] | None = json.loads(body)["items"]
    return items or []


def _versions(objects: Any) -> set[tuple[str, str, str]]:  # noqa: ANN401 - JSON
    """Return names, uids and resourceVersions, which are opaque and compared for equality alone."""
    return {
        (each["metadata"]["name"], each["metadata"]["uid"], each["metadata"]["resourceVersion"])
        for each in objects
    }


# ---- plans ----


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """Changes to the policies in force: to apply, to delete, and refused objects with reasons."""

    apply: tuple[CapacityPolicy, ...]
    delete: tuple[str, ...]
    refused: Mapping[str, str]


class ObjectReader:
    """Parser of objects into policies, with a cache: an unchanged object is not parsed again."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[object, CapacityPolicy | str]] = {}

    def read(self, objects: Mapping[str, Object]) -> dict[str, CapacityPolicy | str]:
        """Return each object's policy, or one line that says why it is invalid, by name."""
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
) -> PolicyPlan:
    """Return the policies to apply and delete so that those in force match the objects.

    read: each object's policy, or why it is invalid. in_force: all policies by name. of_objects:
    names of those that are Kubernetes objects.
    """
    found = {name: each for name, each in read.items() if isinstance(each, CapacityPolicy)}
    return PolicyPlan(
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
