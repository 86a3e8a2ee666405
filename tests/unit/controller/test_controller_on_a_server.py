"""A whole scheduler that acts on objects of a real API server, which is cut off and killed."""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

pytest.importorskip("kubernetes", reason="needs the Kubernetes client")

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity.crd import GROUP, KIND, VERSION
from rose.addresses import free_port
from rose.controller.kube_api import EVENTS, PATH
from rose.main.scheduler import SchedulerSettings, serve
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.store import StoreName
from tests.harness.programs.api_server import (
    KUBECONFIG,
    MARKS,
    MERGE,
    RUN,
    ApiClient,
    ApiServerProcess,
    Cut,
    Object,
    compact,
    kubeconfig,
    needs_processes,
)

pytestmark = MARKS
PREFIX = "rose-test-"
SERVERS = ("kube-apiserver", "crd-server")
WITHIN_S = 60.0


def policy(name: str, **spec: Any) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": PREFIX + name},
        "spec": spec,
    }


class Objects:
    """The operator's side: objects as they are written."""

    def __init__(self, server: ApiClient) -> None:
        self._server = server

    def put(self, name: str, **spec: Any) -> None:
        path = f"{PATH}/{PREFIX}{name}"
        if self._server.has(path):
            self._server.call(path, "PATCH", {"spec": spec}, kind=MERGE)
        else:
            self._server.call(PATH, "POST", policy(name, **spec))

    def get(self, name: str) -> Object:
        return self._server.call(f"{PATH}/{PREFIX}{name}")

    def delete(self, name: str) -> None:
        self._server.delete(f"{PATH}/{PREFIX}{name}")

    def names(self) -> set[str]:
        found = {each["metadata"]["name"] for each in self._server.call(PATH)["items"]}
        return {name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX)}

    def modes(self) -> dict[str, str]:
        found = self._server.call(PATH)["items"]
        return {each["metadata"]["name"]: each["spec"]["mode"] for each in found}

    def condition(self, name: str, kind: str = "Ready") -> tuple[str, str]:
        conditions = self.get(name).get("status", {}).get("conditions", [])
        [found] = [each for each in conditions if each["type"] == kind] or [{}]
        return found.get("status", ""), found.get("reason", "")

    def events(self, name: str) -> list[str]:
        found = self._server.call(EVENTS)["items"]
        uid = self.get(name)["metadata"]["uid"]
        return [e["reason"] for e in found if e["involvedObject"].get("uid") == uid]


@pytest.fixture(scope="module")
def server() -> ApiClient:
    found = ApiClient(Path(KUBECONFIG))
    found.have_definition()
    return found


@pytest.fixture
def objects(server: ApiClient) -> Iterator[Objects]:
    made = Objects(server)
    for name in made.names():
        made.delete(name)
    yield made
    for name in made.names():
        made.delete(name)


@pytest.fixture
def cut(server: ApiClient) -> Iterator[Cut]:
    made = Cut(server)
    yield made
    made.close()


class ServingScheduler:
    """A scheduler in this loop, with one node that tells it is there."""

    def __init__(self, folder: Path, config: Path) -> None:
        logs = folder / "log"
        logs.mkdir(exist_ok=True)
        port = free_port()
        settings = SchedulerSettings(
            "127.0.0.1",
            port,
            StoreName(str(folder / "s.sqlite")),
            logs,
            HarvestMode.OFF,
            0.05,
            kubernetes=True,
            kubeconfig=config,
        )
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(serve(settings, self.stop))
        self.channel = make_channel(f"127.0.0.1:{port}")
        self.stub = SchedulerStub(self.channel)
        self._node = asyncio.create_task(self._attach())

    async def _attach(self) -> None:
        async def reports() -> AsyncIterator[pb.NodeReport]:
            yield pb.NodeReport(node="n0", hello=pb.Hello(protocol=2, takes_caps=True))
            while True:
                yield pb.NodeReport(node="n0", telemetry=pb.Telemetry())
                await asyncio.sleep(0.5)

        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in self.stub.Attach(reports()):
                    pass
            await asyncio.sleep(0.1)

    async def in_force(self) -> dict[str, str]:
        """Modes of the policies that objects said, by name."""
        reply = await self.stub.ListPolicies(pb.ListPoliciesRequest(), timeout=5)
        found = {view.name: json.loads(view.policy) for view in reply.policies}
        return {name: each.get("mode", "Advisory") for name, each in found.items()}

    async def mode(self) -> int:
        reply = await self.stub.ExplainPolicy(pb.ExplainPolicyRequest(), timeout=5)
        return reply.nodes[0].mode if reply.nodes else -1

    async def troubles(self) -> list[str]:
        reply = await self.stub.Snapshot(pb.SnapshotRequest(), timeout=5)
        return list(reply.troubles)

    async def until(self, ask: Callable[[], Any], wanted: object, what: str) -> None:
        """Until what it answers, or what is asked in a thread, is that."""
        found: object = None
        try:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    if self.task.done():
                        self.task.result()
                    with contextlib.suppress(grpc.aio.AioRpcError, OSError):
                        if asyncio.iscoroutinefunction(ask):
                            found = await ask()
                        else:
                            found = await asyncio.to_thread(ask)
                        if found == wanted:
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"{what}: {found!r} and not {wanted!r}")

    async def close(self) -> None:
        self._node.cancel()
        self.stop.set()
        await asyncio.gather(self.task, self._node, return_exceptions=True)
        await self.channel.close()


@contextlib.asynccontextmanager
async def serving(folder: Path, config: Path) -> AsyncIterator[ServingScheduler]:
    made = ServingScheduler(folder, config)
    try:
        yield made
    finally:
        await made.close()


async def test_an_object_becomes_a_policy_and_says_what_became_of_it(
    objects: Objects, tmp_path: Path
) -> None:
    objects.put("chat", mode="Active")
    async with serving(tmp_path, Path(KUBECONFIG)) as run:
        await run.until(run.mode, pb.HARVEST_MODE_ACTIVE, "its node lends")
        calm = {
            "Ready": ("True", "Active"),
            "TelemetryFresh": ("True", "Fresh"),
            "Conflicted": ("False", "None"),
            "Enforced": ("True", "Observed"),
        }
        for kind, said in calm.items():
            await run.until(lambda k=kind: objects.condition("chat", k), said, kind)
        objects.put("everywhere", mode="Advisory")
        await run.until(run.mode, pb.HARVEST_MODE_OFF, "the other one only advises")
        conflict = ("True", "LimitedByOther")
        await run.until(lambda: objects.condition("chat", "Conflicted"), conflict, "a conflict")
        objects.delete("everywhere")
        await run.until(run.mode, pb.HARVEST_MODE_ACTIVE, "it is gone")
        await run.until(
            lambda: objects.events("chat").count("LimitedByOther"), 1, "one event for each change"
        )
        for kind, said in calm.items():
            await run.until(lambda k=kind: objects.condition("chat", k), said, f"{kind} again")
        version = objects.get("chat")["metadata"]["resourceVersion"]
        await asyncio.sleep(5.0)
        again = objects.get("chat")["metadata"]["resourceVersion"]
        assert again == version, "nothing differs, so nothing is written"


async def test_what_cannot_be_is_said_on_the_object(objects: Objects, tmp_path: Path) -> None:
    """A time zone is what the API server cannot know."""
    window = {"from": "08:00", "to": "20:00", "timeZone": "Mars/Olympus"}
    objects.put("mars", blackoutWindows=[window])
    objects.put("chat", mode="Active")
    async with serving(tmp_path, Path(KUBECONFIG)) as run:
        await run.until(lambda: objects.condition("mars"), ("False", "Invalid"), "it is refused")
        await run.until(run.mode, pb.HARVEST_MODE_ACTIVE, "the other one is in force")
        objects.put("chat", blackoutWindows=[window])
        await run.until(run.mode, pb.HARVEST_MODE_HOLD, "what it said before is held")
        objects.put("chat", blackoutWindows=[])
        await run.until(run.mode, pb.HARVEST_MODE_ACTIVE, "it is right again")


async def test_without_the_api_server_the_last_policy_holds_and_then_its_nodes_are_held(
    server: ApiClient, objects: Objects, cut: Cut, tmp_path: Path
) -> None:
    objects.put("chat", mode="Active")
    objects.put("other")
    config = kubeconfig(server, tmp_path, f"https://127.0.0.1:{cut.port}")
    async with serving(tmp_path, config) as run:
        objects.delete("other")
        await run.until(run.mode, pb.HARVEST_MODE_ACTIVE, "it lends")
        cut.cut()
        await run.until(run.mode, pb.HARVEST_MODE_HOLD, "held after staleAfter")
        assert "API server" in (await run.troubles())[0]
        assert PREFIX + "chat" in await run.in_force(), "and not forgotten"
        objects.put("meanwhile", mode="Off")
        cut.open = True
        await run.until(run.mode, pb.HARVEST_MODE_OFF, "what was written meanwhile counts")
        objects.delete("meanwhile")
        await run.until(run.mode, pb.HARVEST_MODE_ACTIVE, "and all is well")
        await run.until(run.troubles, [], "nothing is wrong any more")


async def _write_on(objects: Objects, draw: random.Random, times: int) -> None:
    """Put, change and delete at random, whatever is down meanwhile."""
    for _ in range(times):
        name = f"p{draw.randrange(6)}"
        with contextlib.suppress(OSError):
            if draw.random() < 0.3:
                await asyncio.to_thread(objects.delete, name)
            else:
                mode = draw.choice(["Active", "Advisory", "Off"])
                await asyncio.to_thread(lambda n=name, m=mode: objects.put(n, mode=m))
        await asyncio.sleep(draw.uniform(0.0, 0.1))


async def _agrees(run: ServingScheduler, objects: Objects) -> None:
    """Return True if the policies in force are those of the objects."""

    async def differs() -> bool:
        there = await asyncio.to_thread(objects.modes)
        return there != await run.in_force()

    await run.until(differs, False, "policies in force are the objects")


async def test_however_often_it_is_cut_off_it_ends_with_what_is_there(
    server: ApiClient, objects: Objects, cut: Cut, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    draw = random.Random(seed)
    config = kubeconfig(server, tmp_path, f"https://127.0.0.1:{cut.port}")
    async with serving(tmp_path, config) as run:
        for _ in range(5):
            await _write_on(objects, draw, 15)
            cut.cut()
            await _write_on(objects, draw, 10)
            cut.open = True
        await _agrees(run, objects)


@needs_processes
async def test_it_outlives_kills_of_the_api_server_and_compactions(
    objects: Objects, tmp_path: Path
) -> None:
    names = [name for name in SERVERS if (Path(RUN) / f"{name}.pid").exists()]
    servers = [ApiServerProcess(name) for name in names]
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    draw = random.Random(seed)
    async with serving(tmp_path, Path(KUBECONFIG)) as run:
        await _write_on(objects, draw, 20)
        for killed in [*([each] for each in servers), servers]:
            for each in killed:
                await asyncio.to_thread(each.kill)
            await asyncio.to_thread(compact)
            for each in killed:
                each.start()
            await _write_on(objects, draw, 40)
        await _agrees(run, objects)
        await run.until(run.troubles, [], "nothing is wrong any more")


async def test_many_writers_conflict_and_the_status_speaks_of_the_newest(
    server: ApiClient, objects: Objects, tmp_path: Path
) -> None:
    objects.put("chat", mode="Active")
    async with serving(tmp_path, Path(KUBECONFIG)) as run:
        await run.until(lambda: objects.condition("chat"), ("True", "Active"), "it is in force")
        path = f"{PATH}/{PREFIX}chat"
        for count in range(60):
            label: Object = {"metadata": {"labels": {"count": str(count)}}}
            await asyncio.to_thread(server.call, path, "PATCH", label, kind=MERGE)
            spec: Object = {"spec": {"slackShare": count / 100}}
            await asyncio.to_thread(server.call, path, "PATCH", spec, kind=MERGE)

        def behind() -> int:
            each = objects.get("chat")
            return int(each["metadata"]["generation"] - each["status"]["observedGeneration"])

        await run.until(behind, 0, "the newest generation is observed")
        assert await run.troubles() == []


async def test_without_permission_one_line_says_so_and_the_charts_role_is_enough(
    server: ApiClient, objects: Objects, tmp_path: Path
) -> None:
    from tests.unit.helm.rendering import objects as rendered

    account = "rose-test"
    accounts = "/api/v1/namespaces/default/serviceaccounts"
    server.create(accounts, {"metadata": {"name": account}})
    asked: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = server.call(f"{accounts}/{account}/token", "POST", asked)["status"]["token"]
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    made = []
    objects.put("chat", mode="Active")
    try:
        async with serving(tmp_path, kubeconfig(server, tmp_path, token=token)) as run:

            async def refused() -> bool:
                return any("RELEASE-controller" in line for line in await run.troubles())

            await run.until(refused, True, "it says what is not permitted")
            for key, each in rendered().items():
                kind, _, name = key.partition("/")
                if "-controller" not in name or "Role" not in kind:
                    continue
                if "subjects" in each:
                    each["subjects"] = [
                        {"kind": "ServiceAccount", "name": account, "namespace": "default"}
                    ]
                space = "" if kind.startswith("Cluster") else "namespaces/default/"
                path = f"{rbac}/{space}{kind.lower()}s"
                server.create(path, each)
                made.append(f"{path}/{name}")
            await run.until(run.mode, pb.HARVEST_MODE_ACTIVE, "the role lets it read")
            await run.until(
                lambda: objects.condition("chat"), ("True", "Active"), "and write the status"
            )
            await run.until(lambda: "Active" in objects.events("chat"), True, "and tell of it")
            await run.until(run.troubles, [], "nothing is wrong any more")
    finally:
        for path in made:
            server.delete(path)
        server.delete(f"{accounts}/{account}")
