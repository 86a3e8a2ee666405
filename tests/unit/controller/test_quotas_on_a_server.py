"""Placeholder pods on a real API server bound a job's guests, and its nodes show what is lent.

The test is Kueue, the kubelet and the ROSE node: it makes, starts and deletes pods as these do, and
gives leases back when it is asked to.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc.aio
import pytest

pytest.importorskip("kubernetes", reason="needs the Kubernetes client")

from elastic_scheduler import HarvestMode
from rose.addresses import free_port
from rose.controller.kube_api import RESOURCE
from rose.main.scheduler import SchedulerSettings, serve
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.store import StoreName
from tests.harness.programs.api_server import (
    KUBECONFIG,
    MARKS,
    MERGE,
    ApiClient,
    Cut,
    Object,
    kubeconfig,
)
from tests.unit.helm.rendering import objects as rendered
from tests.unit.scheduler.service_cases import FakeNode

pytestmark = MARKS
JOB, SPACE, NODE = "grpo", "rose-test-quotas", "rose-test-lender"
GUESTS = ("g0", "g1", "g2")
WITHIN_S = 30.0
# Seconds from a pod's deletion to the command that takes the lease back: a count each second.
FOLLOWS_S = 3.0
PODS, NODES = f"/api/v1/namespaces/{SPACE}/pods", "/api/v1/nodes"


class Cluster:
    """Kueue's and the kubelet's side."""

    def __init__(self, server: ApiClient) -> None:
        self._server = server
        server.have_definition()
        server.create("/api/v1/namespaces", {"metadata": {"name": SPACE}})
        accounts = f"/api/v1/namespaces/{SPACE}/serviceaccounts"
        server.create(accounts, {"metadata": {"name": "default"}})
        server.delete(f"{NODES}/{NODE}")
        server.create(NODES, {"metadata": {"name": NODE}})

    def admit(self, name: str) -> None:
        """Bind a pod to the node, as once its gate was taken away, and start it."""
        pod: Object = {
            "metadata": {"name": name, "labels": {"rose.dev/job": JOB}},
            "spec": {
                "nodeName": NODE,
                "automountServiceAccountToken": False,
                "containers": [{"name": "placeholder", "image": "rose"}],
            },
        }
        self._server.call(PODS, "POST", pod)
        self.phase(name, "Running")

    def phase(self, name: str, phase: str) -> None:
        self._server.call(
            f"{PODS}/{name}/status", "PATCH", {"status": {"phase": phase}}, kind=MERGE
        )

    def preempt(self, name: str) -> None:
        """Delete it as Kueue does: it is there until the kubelet has ended it."""
        self._server.call(f"{PODS}/{name}", "DELETE")

    def advertised(self) -> str | None:
        status = self._server.call(f"{NODES}/{NODE}")["status"]
        said = [status.get(key, {}).get(RESOURCE) for key in ("capacity", "allocatable")]
        assert said[0] == said[1]
        return said[0]  # type: ignore[no-any-return]

    def clean(self) -> None:
        for each in self._server.call(PODS)["items"]:
            name = each["metadata"]["name"]
            self._server.delete(f"{PODS}/{name}?gracePeriodSeconds=0")
        self._server.delete(f"{NODES}/{NODE}")


@pytest.fixture(scope="module")
def server() -> ApiClient:
    return ApiClient(Path(KUBECONFIG))


@pytest.fixture
def cluster(server: ApiClient) -> Iterator[Cluster]:
    made = Cluster(server)
    yield made
    made.clean()


class Lender(FakeNode):
    """Offers guests and gives each back at once when it is asked to; keeps when it was."""

    def __init__(self, stub: SchedulerStub) -> None:
        super().__init__(stub, NODE)
        self.released_s: list[float] = []
        self._tasks = [asyncio.create_task(each()) for each in (self._offer, self._give_back)]

    async def _offer(self) -> None:
        while True:
            offers = [
                pb.Offer(replica=name, kind=1, url=f"http://{name}", ttl_s=3.0, healthy=True)
                for name in GUESTS
            ]
            self.say(offers=pb.Offers(offers=offers))
            await asyncio.sleep(0.5)

    async def _give_back(self) -> None:
        while True:
            release = (await self.hears_next()).release
            self.released_s.append(time.monotonic())
            self.say(released=pb.Released(replica=release.replica, epoch=release.epoch))

    async def hears_next(self) -> pb.NodeCommand:
        while (command := await self.told.get()).WhichOneof("command") != "release":
            pass
        return command

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().leave()


class Run:
    """A scheduler of this process with a lender and a job that wants all guests."""

    def __init__(self, folder: Path, config: Path) -> None:
        port = free_port()
        settings = SchedulerSettings(
            "127.0.0.1",
            port,
            StoreName(str(folder / "s.sqlite")),
            folder,
            HarvestMode.ACTIVE,
            0.05,
            kubernetes=True,
            kubeconfig=config,
            quotas={JOB: SPACE},
        )
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(serve(settings, self._stop))
        self._channel = make_channel(f"127.0.0.1:{port}")
        self.stub = SchedulerStub(self._channel)
        self.node: Lender

    async def begin(self) -> None:
        async def registered() -> bool:
            await self.stub.RegisterJob(pb.RegisterJobRequest(job=JOB, max_staleness=1), timeout=5)
            return True

        await self.until(registered, True, "the job is registered")
        self.node = Lender(self.stub)

    async def guests(self) -> int:
        return (await self.job()).guests

    async def why(self) -> str:
        return (await self.job()).held_back.partition(";")[0]

    async def job(self) -> pb.JobView:
        [job] = (await self.stub.Snapshot(pb.SnapshotRequest(), timeout=5)).jobs
        return job

    async def troubles(self) -> list[str]:
        return list((await self.stub.Snapshot(pb.SnapshotRequest(), timeout=5)).troubles)

    async def until(self, ask: Callable[[], object], wanted: object, what: str) -> None:
        """Until what is asked, in a thread unless it is a coroutine, is that."""
        found: object = None
        end_s = time.monotonic() + WITHIN_S
        while found != wanted:
            if self._task.done():
                self._task.result()
            if time.monotonic() > end_s:
                pytest.fail(f"{what}: {found!r} and not {wanted!r}")
            with contextlib.suppress(grpc.aio.AioRpcError, OSError):
                found = (
                    await ask()
                    if asyncio.iscoroutinefunction(ask)
                    else await asyncio.to_thread(ask)
                )
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        if hasattr(self, "node"):
            await self.node.leave()
        self._stop.set()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()


@contextlib.asynccontextmanager
async def running(folder: Path, config: Path) -> AsyncIterator[Run]:
    made = Run(folder, config)
    try:
        await made.begin()
        yield made
    finally:
        await made.close()


NONE_RUNS = "no guests: none of its placeholder pods runs"


async def test_guests_follow_pods_that_are_admitted_and_preempted(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with running(tmp_path, Path(KUBECONFIG)) as run:
        await run.until(cluster.advertised, "3", "its node shows what it may lend")
        await run.until(run.why, NONE_RUNS, "and nothing is lent")
        assert await run.guests() == 0
        began_s = time.monotonic()
        for name in ("p0", "p1"):
            await asyncio.to_thread(cluster.admit, name)
        await run.until(run.guests, 2, "a guest for each pod")
        sys.stdout.write(f"leased {time.monotonic() - began_s:.2f} s after admission\n")
        assert await run.why() == ""
        for act, left in ((cluster.preempt, 1), (lambda name: cluster.phase(name, "Failed"), 0)):
            began_s = time.monotonic()
            await asyncio.to_thread(act, f"p{1 - left}")
            await run.until(run.guests, left, "one lease goes back")
            took_s = run.node.released_s[-1] - began_s
            sys.stdout.write(f"released {took_s:.2f} s after a pod ended\n")
            assert took_s < FOLLOWS_S
        assert len(run.node.released_s) == 2, "one lease for each pod"
        await run.until(run.why, NONE_RUNS, "the last pod ended")
        await run.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_HOLD))
        await run.until(cluster.advertised, "0", "a node that is held lends nothing")


async def test_without_the_api_server_no_guest_is_added_and_none_is_taken(
    server: ApiClient, cluster: Cluster, tmp_path: Path
) -> None:
    cut = Cut(server)
    try:
        config = kubeconfig(server, tmp_path, f"https://127.0.0.1:{cut.port}")
        async with running(tmp_path, config) as run:
            await asyncio.to_thread(cluster.admit, "p0")
            await run.until(run.guests, 1, "a guest for its pod")
            cut.cut()
            unread = f"no new guests: its placeholder pods in namespace {SPACE} cannot be read"
            await run.until(run.why, unread, "the count is too old")
            assert any(f"quotas of namespace {SPACE}: " in e for e in await run.troubles())
            await asyncio.to_thread(cluster.admit, "p1")
            await asyncio.to_thread(cluster.preempt, "p0")
            await asyncio.sleep(3.0)
            assert await run.guests() == 1
            cut.open = True
            await run.until(run.why, "", "it is read again")
            await asyncio.to_thread(cluster.admit, "p2")
            await run.until(run.guests, 2, "what happened meanwhile counts")
            await run.until(run.troubles, [], "nothing is wrong any more")
    finally:
        cut.close()


async def test_without_permission_one_line_says_so_and_the_charts_roles_are_enough(
    server: ApiClient, cluster: Cluster, tmp_path: Path
) -> None:
    account = "rose-test-quotas"
    accounts = "/api/v1/namespaces/default/serviceaccounts"
    server.create(accounts, {"metadata": {"name": account}})
    asked: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = server.call(f"{accounts}/{account}/token", "POST", asked)["status"]["token"]
    values: Object = {"quotas": [{"job": JOB, "namespace": SPACE, "queue": "borrowed", "most": 3}]}
    made = []
    try:
        async with running(tmp_path, kubeconfig(server, tmp_path, token=token)) as run:
            await asyncio.to_thread(cluster.admit, "p0")

            async def refused() -> list[str]:
                begins = ("quotas of namespace", "lent GPUs are not")
                return sorted(e[:19] for e in await run.troubles() if e.startswith(begins))

            both = ["lent GPUs are not a", "quotas of namespace"]
            await run.until(refused, both, "it says what is not permitted")
            assert await run.guests() == 0
            for key, each in rendered(values).items():
                kind, _, name = key.partition("/")
                if "-controller" not in name or "Role" not in kind:
                    continue
                if "subjects" in each:
                    each["subjects"] = [
                        {"kind": "ServiceAccount", "name": account, "namespace": "default"}
                    ]
                space = each["metadata"].get("namespace", "default")
                each["metadata"]["namespace"] = space = SPACE if space == SPACE else "default"
                within = "" if kind.startswith("Cluster") else f"namespaces/{space}/"
                if not within:
                    del each["metadata"]["namespace"]
                path = f"/apis/rbac.authorization.k8s.io/v1/{within}{kind.lower()}s"
                server.create(path, each)
                made.append(f"{path}/{name}")
            await run.until(run.guests, 1, "the role lets it count")
            await run.until(cluster.advertised, "3", "and write what is lent")
            await run.until(run.troubles, [], "nothing is wrong any more")
    finally:
        for path in made:
            server.delete(path)
        server.delete(f"{accounts}/{account}")
