"""The controller's shell over an API server that is not one."""

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy, policy_of
from rose.controller import controller as shell
from rose.controller.controller import PolicyController
from rose.controller.kube_api import ApiError
from rose.errors import RefusedError
from rose.scheduler.core.messages import PolicyApplied, PolicyDeleted
from rose.scheduler.core.policy_views import PolicyView
from tests.harness.waiting import PATIENCE_S

Object = dict[str, Any]


class Server:
    """Objects, a watch, and what was written; `down`: nothing is answered."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 1
        self.log: list[tuple[int, bytes]] = []
        self.down: ApiError | None = None
        self.conflicts = 0
        self.watches: list[Stream] = []
        self.statuses: list[tuple[str, Object]] = []
        self.events: list[Object] = []

    def put(self, name: str, **spec: object) -> None:
        before = self.objects.get(name)
        generation = before["metadata"]["generation"] + 1 if before else 1
        self._write(name, generation, spec, before and before.get("status"))

    def delete(self, name: str) -> None:
        self.version += 1
        self._tell("DELETED", self.objects.pop(name))

    def _write(self, name: str, generation: int, spec: object, status: object) -> None:
        self.version += 1
        metadata = {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(self.version),
            "generation": generation,
        }
        each: Object = {"metadata": metadata, "spec": spec}
        if status:
            each["status"] = status
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = each
        self._tell(kind, each)

    def _tell(self, kind: str, each: Object) -> None:
        line = json.dumps({"type": kind, "object": each}).encode() + b"\n"
        self.log.append((self.version, line))
        for stream in self.watches:
            stream.say(line)

    # ---- as KubeApi ----

    def list(self) -> bytes:
        self._answer()
        said = {
            "metadata": {"resourceVersion": str(self.version)},
            "items": list(self.objects.values()),
        }
        return json.dumps(said).encode()

    probe = list

    def watch(self, resource_version: str) -> "Stream":
        self._answer()
        stream = Stream()
        for version, line in self.log:
            if version > int(resource_version):
                stream.say(line)
        self.watches.append(stream)
        return stream

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
        for stream in self.watches:
            stream.stop()
        self.watches.clear()


class Stream:
    def __init__(self) -> None:
        self._said: queue.Queue[bytes | None] = queue.Queue()

    def say(self, data: bytes) -> None:
        self._said.put(data)

    def chunks(self) -> Iterator[bytes]:
        while (data := self._said.get()) is not None:
            yield data

    def stop(self) -> None:
        self._said.put(None)


class Scheduler:
    """Puts policies in force; `refuses`: names that it does not."""

    def __init__(self) -> None:
        self.in_force: dict[str, CapacityPolicy] = {}
        self.own: set[str] = set()
        self.refuses: set[str] = set()
        self.stalled = False
        self.asked: list[str] = []
        self.heard: list[float] = []
        self.refused: frozenset[str] = frozenset()

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

    def objects_heard(self, heard_s: float, refused: frozenset[str]) -> None:
        self.heard.append(heard_s)
        self.refused = refused

    def policies_in_force(self) -> tuple[dict[str, CapacityPolicy], frozenset[str]]:
        return dict(self.in_force), frozenset(self.own)

    def policy_views(self) -> dict[str, PolicyView]:
        return {
            name: PolicyView(each, name in self.own, HarvestMode.ACTIVE, nodes=1, seen=1)
            for name, each in self.in_force.items()
        }


class Bench:
    def __init__(self) -> None:
        self.server, self.scheduler = Server(), Scheduler()
        self.said: list[str] = []
        self.controller = PolicyController(
            self.server,  # type: ignore[arg-type]
            self.scheduler,
            lambda event, **_: self.said.append(event),
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
async def running(bench: Bench) -> AsyncIterator[Bench]:
    task = asyncio.create_task(bench.controller.run())
    try:
        yield bench
        assert not task.done(), "it is nothing that ends it"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROBE_S", "RECONCILE_S", "STATUS_S"):
        monkeypatch.setattr(shell, name, 0.01)


async def test_objects_become_policies_and_say_so() -> None:
    bench = Bench()
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
    bench = Bench()
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: len(bench.scheduler.heard) > 20)
        await bench.until(lambda: bench.server.statuses)
        before = len(bench.scheduler.heard)
        await bench.until(lambda: len(bench.scheduler.heard) > before + 20)
    assert len(bench.server.statuses) == 1


async def test_a_server_that_is_gone_says_nothing_fresh_and_what_went_meanwhile_is_found() -> None:
    bench = Bench()
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


async def test_a_server_that_permits_nothing_is_named() -> None:
    bench = Bench()
    bench.server.kill(ApiError(403, "forbidden: cannot list rosecapacitypolicies"))
    async with running(bench):
        await bench.until(lambda: bench.controller.troubles())
        assert "cannot list" in bench.controller.troubles()[0]
        assert bench.scheduler.heard == []


async def test_what_cannot_be_taken_is_said_on_the_object_alone() -> None:
    bench = Bench()
    bench.scheduler.in_force["own"] = policy_of({"name": "own"})
    bench.scheduler.refuses.add("own")
    bench.server.put("own")
    bench.server.put("typo", slackshare=1)
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: bench.ready("chat") == ("True", "Advisory"))
        await bench.until(lambda: bench.ready("own") == ("False", "Refused"))
        await bench.until(lambda: bench.ready("typo") == ("False", "Invalid"))
        assert bench.scheduler.refused == {"own", "typo"}
    assert bench.said.count("object_refused") == 2


async def test_nothing_is_fresh_before_it_is_durable() -> None:
    bench = Bench()
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
    bench = Bench()
    bench.server.conflicts = 3
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: bench.ready("chat") == ("True", "Advisory"))
        await bench.until(lambda: not bench.controller.troubles())


async def test_a_watch_that_lost_an_event_is_found_out_by_the_probes() -> None:
    bench = Bench()
    bench.server.put("chat")
    async with running(bench):
        await bench.until(lambda: set(bench.scheduler.in_force) == {"chat"})
        deaf, bench.server.watches = bench.server.watches, []
        bench.server.put("new")
        await bench.until(lambda: set(bench.scheduler.in_force) == {"chat", "new"})
        for stream in deaf:
            stream.stop()
