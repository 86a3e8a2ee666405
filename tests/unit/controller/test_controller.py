"""The controller's shell over an API server that is not one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy, PolicyMode, policy_of
from rose.controller import controller as shell
from rose.controller.controller import ObjectReader, PolicyController, plan
from rose.controller.kube_api import ApiError
from rose.errors import RefusedError
from rose.scheduler.core.messages import PolicyApplied, PolicyDeleted
from rose.scheduler.core.observed import PolicyView
from tests.harness.waiting import PATIENCE_S

Object = dict[str, Any]


class Server:
    """Objects, and what was written; `down`: nothing is answered, or `torn`: no list."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 1
        self.down: ApiError | None = None
        self.conflicts = 0
        self.torn: bytes = b""
        self.lists = self.asked_nodes = 0
        self.node_labels: dict[str, Object] = {}
        self.statuses: list[tuple[str, Object]] = []
        self.events: list[Object] = []

    def put(self, name: str, **spec: object) -> None:
        before = self.objects.get(name)
        generation = before["metadata"]["generation"] + 1 if before else 1
        self._write(name, generation, spec, before and before.get("status"))

    def delete(self, name: str) -> None:
        self.version += 1
        del self.objects[name]

    def _write(self, name: str, generation: int, spec: object, status: object) -> None:
        self.version += 1
        before = self.objects.get(name)
        metadata = {
            "name": name,
            "uid": before["metadata"]["uid"] if before else f"uid-{self.version}",
            "resourceVersion": str(self.version),
            "generation": generation,
        }
        each: Object = {"metadata": metadata, "spec": spec}
        if status:
            each["status"] = status
        self.objects[name] = each

    # ---- as KubeApi ----

    def list(self) -> bytes:
        self.lists += 1
        return self.probe()

    def probe(self) -> bytes:
        self._answer()
        return self.torn or json.dumps({"items": list(self.objects.values()) or None}).encode()

    def nodes(self) -> bytes:
        self._answer()
        self.asked_nodes += 1
        return (
            self.torn
            or json.dumps(
                {"items": [{"metadata": {"name": n, **m}} for n, m in self.node_labels.items()]}
            ).encode()
        )

    def write_status(self, name: str, resource_version: str, status: Object) -> None:
        self._answer()
        if name not in self.objects:
            raise ApiError(404, f"{name} not found")
        each = self.objects[name]
        if self.conflicts or each["metadata"]["resourceVersion"] != resource_version:
            self.conflicts -= 1
            raise ApiError(409, "the object has been modified")
        self.statuses.append((name, status))
        self._write(name, each["metadata"]["generation"], each["spec"], status)

    def create_event(self, event: Object) -> None:
        self._answer()
        self.events.append(event)

    def _answer(self) -> None:
        if self.down is not None:
            raise self.down

    def kill(self, why: ApiError | None = None) -> None:
        self.down = why or ApiError(0, "the API server does not answer (refused)")


class PolicyScheduler:
    """Puts policies in force; `refuses`: names that it does not."""

    def __init__(self) -> None:
        self.in_force: dict[str, CapacityPolicy] = {}
        self.own: set[str] = set()
        self.refuses: set[str] = set()
        self.stalled = False
        self.asked: list[str] = []
        self.heard: list[float] = []
        self.refused: frozenset[str] = frozenset()
        self.labels: Mapping[str, Mapping[str, str]] = {}

    async def ask(self, event: PolicyApplied | PolicyDeleted, by: str) -> int:
        assert by == "kubernetes"
        assert event.of_object
        if self.stalled:
            raise TimeoutError
        if isinstance(event, PolicyDeleted):
            self.asked.append(f"delete {event.name}")
            del self.in_force[event.name]
            self.own.discard(event.name)
            return 1
        if event.policy.name in self.refuses:
            raise RefusedError("a policy of that name was put in force by `rose policy`")
        self.asked.append(f"apply {event.policy.name}")
        self.in_force[event.policy.name] = event.policy
        self.own.add(event.policy.name)
        return 1

    def objects_heard(
        self, heard_s: float, refused: frozenset[str], labels: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.heard.append(heard_s)
        self.refused, self.labels = refused, labels

    def policies_in_force(self) -> tuple[dict[str, CapacityPolicy], frozenset[str]]:
        return dict(self.in_force), frozenset(self.own)

    def policy_views(self) -> dict[str, PolicyView]:
        return {
            name: PolicyView(each, name in self.own, HarvestMode.ACTIVE, nodes=1, seen=1)
            for name, each in self.in_force.items()
        }


class ControllerBench:
    def __init__(self, *label_keys: str) -> None:
        self.server, self.scheduler = Server(), PolicyScheduler()
        self.said: list[str] = []
        self.controller = PolicyController(
            self.server,  # type: ignore[arg-type]
            self.scheduler,
            lambda event, **_: self.said.append(event),
            label_keys=label_keys,
        )

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - of threads
                await asyncio.sleep(0.005)

    def ready(self, name: str) -> tuple[str, str]:
        status = self.server.objects[name].get("status") or {"conditions": [{}]}
        first = status["conditions"][0]
        return first.get("status", ""), first.get("reason", "")


@asynccontextmanager
async def running(bench: ControllerBench) -> AsyncIterator[ControllerBench]:
    task = asyncio.create_task(bench.controller.run())
    try:
        yield bench
        assert not task.done(), "it is nothing that ends it"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "STATUS_S", "LABELS_S"):
        monkeypatch.setattr(shell, name, 0.01)


async def test_objects_become_policies_and_say_so() -> None:
    bench = ControllerBench()
    bench.server.put("chat", mode="Active")
    async with running(bench):
        await bench.until(lambda: bench.ready("chat") == ("True", "Active"))
        bench.server.put("chat", mode="Active", slackShare=0.1)
        await bench.until(lambda: bench.scheduler.in_force["chat"].slack_share == 0.1)
        bench.server.delete("chat")
        await bench.until(lambda: not bench.scheduler.in_force)
    assert bench.scheduler.asked == ["apply chat", "apply chat", "delete chat"]
    assert [each["reason"] for each in bench.server.events] == ["Active"], "once for each change"


async def test_a_status_is_written_once_while_nothing_differs() -> None:
    bench = ControllerBench()
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: len(bench.scheduler.heard) > 20)
        await bench.until(lambda: bench.server.statuses)
        before = len(bench.scheduler.heard)
        await bench.until(lambda: len(bench.scheduler.heard) > before + 20)
    assert len(bench.server.statuses) == 1


async def test_a_server_that_is_gone_says_nothing_fresh_and_what_went_meanwhile_is_found() -> None:
    bench = ControllerBench()
    bench.server.put("chat")
    bench.server.put("code")
    async with running(bench):
        await bench.until(lambda: set(bench.scheduler.in_force) == {"chat", "code"})
        bench.server.kill()
        await bench.until(lambda: bench.controller.troubles())
        heard_s = bench.scheduler.heard[-1]
        bench.server.delete("code")
        bench.server.put("new")
        count = len(bench.scheduler.heard)
        await bench.until(lambda: len(bench.scheduler.heard) > count + 3)
        assert bench.scheduler.heard[-1] == heard_s, "it is not heard, so nothing is fresher"
        assert set(bench.scheduler.in_force) == {"chat", "code"}, "the last policies hold"
        bench.server.down = None
        await bench.until(lambda: set(bench.scheduler.in_force) == {"chat", "new"})
        await bench.until(lambda: bench.scheduler.heard[-1] > heard_s)
        await bench.until(lambda: not bench.controller.troubles())
    assert bench.said == ["objects_unheard", "objects_heard"]


async def test_labels_of_kubernetes_nodes_are_read_by_the_keys_that_were_asked_for() -> None:
    bench = ControllerBench("pool", "example.com/*")
    said = {"pool": "a", "example.com/zone": "z", "kubernetes.io/hostname": "n0", "pools": "b"}
    bench.server.node_labels = {"n0": {"labels": said}, "n1": {}}
    async with running(bench):
        wanted = {"n0": {"pool": "a", "example.com/zone": "z"}, "n1": {}}
        await bench.until(lambda: bench.scheduler.labels == wanted)
        bench.server.node_labels["n1"] = {"labels": {"pool": "b"}}
        await bench.until(lambda: bench.scheduler.labels["n1"] == {"pool": "b"})
        # A torn list, or no answer, makes nothing fresher, and takes no label away.
        for trouble in ({"torn": b'{"items": [{"metadata": 1}]}'}, {"down": ApiError(403, "no")}):
            for name, value in trouble.items():
                setattr(bench.server, name, value)
            await bench.until(lambda: bench.controller.troubles())
            heard_s, count = bench.scheduler.heard[-1], len(bench.scheduler.heard)
            await bench.until(lambda: len(bench.scheduler.heard) > count + 3)  # noqa: B023
            assert bench.scheduler.heard[-1] == heard_s
            assert bench.scheduler.labels["n1"] == {"pool": "b"}
            bench.server.torn, bench.server.down = b"", None
            await bench.until(lambda: not bench.controller.troubles())


async def test_without_keys_no_node_is_asked_for() -> None:
    bench = ControllerBench()
    async with running(bench):
        await bench.until(lambda: len(bench.scheduler.heard) > 5)
    assert bench.server.asked_nodes == 0
    assert bench.scheduler.labels == {}


async def test_a_server_that_permits_nothing_is_named() -> None:
    bench = ControllerBench()
    bench.server.kill(ApiError(403, "forbidden: cannot list rosecapacitypolicies"))
    async with running(bench):
        await bench.until(lambda: bench.controller.troubles())
        assert "cannot list" in bench.controller.troubles()[0]
        assert bench.scheduler.heard == []


async def test_what_cannot_be_taken_is_said_on_the_object_alone() -> None:
    bench = ControllerBench()
    bench.scheduler.in_force["own"] = policy_of({"name": "own"})
    bench.scheduler.refuses.add("own")
    bench.server.put("own")
    bench.server.put("typo", slackshare=1)
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: bench.ready("chat") == ("True", "Bounds"))
        await bench.until(lambda: bench.ready("own") == ("False", "Refused"))
        await bench.until(lambda: bench.ready("typo") == ("False", "Invalid"))
        assert bench.scheduler.refused == {"own", "typo"}
    assert bench.said.count("object_refused") == 2


async def test_nothing_is_fresh_before_it_is_durable() -> None:
    bench = ControllerBench()
    bench.scheduler.stalled = True
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: bench.controller.troubles())
        assert bench.scheduler.heard == []
        bench.scheduler.stalled = False
        await bench.until(lambda: bench.scheduler.heard)
        assert set(bench.scheduler.in_force) == {"chat"}
        await bench.until(lambda: not bench.controller.troubles())


async def test_a_conflict_is_written_again_from_what_is_there_then() -> None:
    bench = ControllerBench()
    bench.server.conflicts = 3
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: bench.ready("chat") == ("True", "Bounds"))
        await bench.until(lambda: not bench.controller.troubles())


async def test_objects_are_read_anew_only_where_a_version_differs() -> None:
    bench = ControllerBench()
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: bench.server.statuses)
        await bench.until(lambda: bench.server.lists == 2)  # at first, and after its own status
        before = len(bench.scheduler.heard)
        await bench.until(lambda: len(bench.scheduler.heard) > before + 20)
        assert bench.server.lists == 2
        bench.server.delete("chat")
        bench.server.put("chat", mode="Off")  # another object of that name
        await bench.until(lambda: bench.scheduler.in_force["chat"].mode is PolicyMode.OFF)


@pytest.mark.parametrize(
    "torn",
    [b"no json", b"[1]", b"{}", b'{"items": [{}]}', b'{"items": 7}', b"[" * 5_000, b"\xff"],
    ids=repr,
)
async def test_a_list_that_is_none_proves_nothing_and_deletes_nothing(torn: bytes) -> None:
    bench = ControllerBench()
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: bench.scheduler.heard)
        bench.server.torn = torn
        await bench.until(lambda: bench.controller.troubles())
        heard_s, count = bench.scheduler.heard[-1], len(bench.scheduler.heard)
        await bench.until(lambda: len(bench.scheduler.heard) > count + 3)
        assert bench.scheduler.heard[-1] == heard_s
        assert set(bench.scheduler.in_force) == {"chat"}
        bench.server.torn = b""
        await bench.until(lambda: not bench.controller.troubles())


# ---- plans ----


def obj(name: str, generation: int = 1, /, **spec: object) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "generation": generation}, "spec": spec}


def policy(name: str, **said: object) -> CapacityPolicy:
    return policy_of({"name": name, **said})


def test_new_and_other_objects_are_applied_and_what_is_gone_is_deleted() -> None:
    read = ObjectReader().read({"a": obj("a"), "b": obj("b", mode="Active"), "c": obj("c")})
    in_force = {
        each.name: each for each in (policy("a"), policy("b"), policy("old"), policy("own"))
    }
    todo = plan(read, in_force, {"a", "b", "old"})
    assert [each.name for each in todo.apply] == ["b", "c"]
    assert todo.delete == ("old",), "and not what an operator applied"


def test_an_object_with_the_name_of_an_operators_policy_is_offered_to_the_scheduler() -> None:
    todo = plan(ObjectReader().read({"own": obj("own")}), {"own": policy("own")}, set())
    assert [each.name for each in todo.apply] == ["own"], "which refuses it, in words"


def test_an_object_that_cannot_be_read_is_refused_in_one_line_and_nothing_is_deleted() -> None:
    objects = {
        "zone": obj("zone", blackoutWindows=[{"from": "1:00", "to": "2:00", "timeZone": "Mars"}]),
        "typo": obj("typo", slackshare=0.5),
        "name": obj("name", name="other"),
        "none": {"metadata": {"name": "none"}},
        "B@D": obj("B@D"),
    }
    todo = plan(ObjectReader().read(objects), {"zone": policy("zone")}, {"zone"})
    assert todo.apply == ()
    assert todo.delete == ()
    assert set(todo.refused) == set(objects)
    assert "did you mean slackShare?" in todo.refused["typo"]
    assert all("\n" not in line and len(line) < 300 for line in todo.refused.values())


def test_an_object_is_read_once_for_each_spec() -> None:
    reader = ObjectReader()
    first = reader.read({"a": obj("a")})["a"]
    assert reader.read({"a": {**obj("a"), "status": {}}})["a"] is first
    assert reader.read({"a": obj("a", 2, mode="Active")})["a"] == policy("a", mode="Active")
    assert reader.read({}) == {}
