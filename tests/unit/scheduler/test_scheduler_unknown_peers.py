"""The scheduler obeys only peers that it knows: a stranger moves no lease, version or harvest.

Each test has an owner whose replica serves. Strangers come without a certificate, with another CA's
or with an expired one: TLS lets none of them in. And they come as members of the cluster that speak
for somebody else: those are told why not, and it is recorded.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from service_cases import Bench, FakeNode, running

from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.scheduler.core.job_registry import MAX_VERSION_LEAD
from rose.security import RPCS, CertificateFiles, Role
from tests.fakes.memory_store import InMemoryStore
from tests.harness.certificates import Certificates
from tests.harness.waiting import PATIENCE_S

JOB, OWNED, OWN_URL, FOREIGN_URL = "grpo", "d0", "http://127.0.0.1:9001", "http://127.0.0.1:9666"
TURNED_AWAY = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    # By TLS, before there is a call.
    grpc.StatusCode.UNAVAILABLE,
}


class Case:
    """A scheduler whose job has version 1, on one dedicated replica of node serving-0."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.folder = folder
        self.certificates = Certificates(folder / "ca")
        self._stack = stack

    async def begin(self) -> None:
        own = self.certificates.of(Role.SCHEDULER, "s0")
        self.bench = await self._stack.enter_async_context(
            running(Bench(InMemoryStore(), self.folder, certificates=own))
        )
        self.trainer = await self.member(Role.TRAINER, JOB)
        self.operator = await self.member(Role.OPERATOR, "ada")
        await self.trainer.RegisterJob(pb.RegisterJobRequest(job=JOB, max_staleness=1))
        await announce(self.trainer, 1, 0)
        self.owner = FakeNode(await self.member(Role.NODE, "serving-0"), "serving-0")
        self.owner.offer(replica=OWNED, kind=2, url=OWN_URL, policy_version=1)
        async with asyncio.timeout(PATIENCE_S):
            while not (row := await self.row(OWNED)) or not row.leased:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def member(self, role: Role, name: str) -> SchedulerStub:
        return await self.connected(self.certificates.of(role, name))

    async def connected(self, files: CertificateFiles) -> SchedulerStub:
        channel = make_channel(self.bench.address, files)
        return SchedulerStub(await self._stack.enter_async_context(channel))

    async def row(self, replica: str) -> pb.Replica | None:
        rows = (await self.operator.Snapshot(pb.SnapshotRequest())).replicas
        return next((each for each in rows if each.id == replica), None)

    def refusals(self) -> list[dict[str, str]]:
        """Return the audit records of members' refused calls."""
        lines = self.bench.log.read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == "call_refused"]

    async def stays_as_it_was(self) -> None:
        """The owner's stream and lease live, and the trainer's next version is free."""
        row = await self.row(OWNED)
        assert row is not None
        assert (row.url, row.leased, row.node) == (OWN_URL, True, "serving-0")
        assert not self.owner.call.done()
        snapshot = await self.operator.Snapshot(pb.SnapshotRequest())
        assert snapshot.harvest == pb.HARVEST_MODE_ACTIVE
        assert [each.id for each in snapshot.replicas] == [OWNED]
        assert [each.job for each in snapshot.jobs] == [JOB]
        await announce(self.trainer, 2, 1)


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[Case]:
    async with contextlib.AsyncExitStack() as stack:
        case = Case(tmp_path, stack)
        await case.begin()
        yield case


async def announce(stub: SchedulerStub, version: int, parent: int, job: str = JOB) -> None:
    await stub.AnnounceVersion(
        pb.AnnounceVersionRequest(job=job, version=version, parent=parent, url=OWN_URL)
    )


async def refused(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() in TURNED_AWAY
    assert "Traceback" not in str(caught.value.details())
    return caught.value


async def turned_away(node: FakeNode) -> str:
    """Why a stranger's stream has ended."""
    async with asyncio.timeout(PATIENCE_S):
        assert await node.call.code() in TURNED_AWAY, await node.call.details()
        return str(await node.call.details())


async def strangers(case: Case, kind: str) -> SchedulerStub:
    """A connection of somebody who is no member."""
    stack = case._stack
    if kind == "plain text":
        return SchedulerStub(await stack.enter_async_context(make_channel(case.bench.address)))
    ca = case.certificates.ca.file.read_bytes()
    options = case.certificates.of(Role.NODE, "serving-0").channel_options(Role.SCHEDULER)
    if kind == "no certificate":
        credentials = grpc.ssl_channel_credentials(ca)
    else:
        issuer = case.certificates.ca
        if kind == "another CA":
            issuer = Certificates(case.folder / "theirs").ca
        life_s = -10.0 if kind == "expired" else 60.0
        issued = issuer.issue(Role.NODE, "serving-0", life_s=life_s)
        credentials = grpc.ssl_channel_credentials(
            ca, issued.key.read_bytes(), issued.certificate.read_bytes()
        )
    channel = grpc.aio.secure_channel(case.bench.address, credentials, options)
    return SchedulerStub(await stack.enter_async_context(channel))


@pytest.mark.parametrize("kind", ["no certificate", "another CA", "expired", "plain text"])
async def test_who_is_no_member_is_answered_nothing(case: Case, kind: str) -> None:
    stub = await strangers(case, kind)
    node = FakeNode(stub, "serving-0")
    node.offer(replica=OWNED, kind=2, url=FOREIGN_URL, policy_version=1)
    await turned_away(node)
    await refused(announce(stub, 5, 1))
    await refused(stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF)))
    await refused(stub.Revoke(pb.RevokeRequest(replica=OWNED, reason="mine now")))
    await refused(stub.Snapshot(pb.SnapshotRequest()))
    await case.stays_as_it_was()


async def test_a_dedicated_replica_of_who_is_no_node_is_sent_no_prompts(case: Case) -> None:
    stub = await case.member(Role.GATEWAY, "gw")
    # Its hello alone: a client that is writing still may miss the reason.
    stranger = FakeNode(stub, "gw")
    assert "gateway gw may not call Attach; node may" in await turned_away(stranger)
    await case.stays_as_it_was()


async def test_a_node_is_not_thrown_out_by_another_that_takes_its_name(case: Case) -> None:
    stranger = FakeNode(await case.member(Role.NODE, "serving-1"), "serving-0")
    why = await turned_away(stranger)
    assert why == (
        "node serving-1 may not call Attach with node 'serving-0': only with its own name"
    )
    await case.stays_as_it_was()


async def test_a_node_speaks_for_itself_in_later_reports_too(case: Case) -> None:
    node = FakeNode(await case.member(Role.NODE, "serving-1"), "serving-1")
    await node.hears("harvest")
    node.node = "serving-0"
    node.offer(replica=OWNED, kind=2, url=FOREIGN_URL, policy_version=1)
    assert "serving-0" in await turned_away(node)
    await case.stays_as_it_was()


async def test_a_trainer_speaks_for_its_job_only(case: Case) -> None:
    stub = await case.member(Role.TRAINER, "ppo")
    for call in (
        announce(stub, 1 + MAX_VERSION_LEAD, 1),
        stub.RegisterJob(pb.RegisterJobRequest(job=JOB, max_staleness=9)),
    ):
        error = await refused(call)
        assert "trainer ppo may not call" in str(error.details())
    await case.stays_as_it_was()


async def test_gateways_report_for_themselves(case: Case) -> None:
    stub = await case.member(Role.GATEWAY, "gw-1")
    for name in ("gw-2", "gw-10", "gw-2/ab", ""):
        await refused(stub.ReportDemand(pb.DemandReport(gateway=name)))
    for name in ("gw-1", "gw-1/ab12"):
        await stub.ReportDemand(pb.DemandReport(gateway=name))


REQUESTS = {
    "ReportDemand": pb.DemandReport(gateway="me"),
    "RegisterJob": pb.RegisterJobRequest(job="me"),
    "AnnounceVersion": pb.AnnounceVersionRequest(job="me", version=1, url=OWN_URL),
    "SetHarvest": pb.SetHarvestRequest(mode=pb.HARVEST_MODE_HOLD),
    "Revoke": pb.RevokeRequest(replica="none"),
    "Snapshot": pb.SnapshotRequest(),
    "ListPolicies": pb.ListPoliciesRequest(),
    "ExplainPolicy": pb.ExplainPolicyRequest(),
}


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_may_call_what_the_table_says_and_nothing_else(
    case: Case, role: Role
) -> None:
    stub = await case.member(role, "me")
    for method, request in REQUESTS.items():
        try:
            await getattr(stub, method)(request)
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        denied = code is grpc.StatusCode.PERMISSION_DENIED
        assert denied is (role not in RPCS[method]), (method, code)
    watch = stub.WatchReplicas(pb.WatchReplicasRequest(gateway="me"))
    if role in RPCS["WatchReplicas"]:
        assert isinstance(await watch.read(), pb.ReplicaTable)
        watch.cancel()
    else:
        assert await watch.code() is grpc.StatusCode.PERMISSION_DENIED
    attach = FakeNode(stub, "me")
    if role in RPCS["Attach"]:
        await attach.hears("harvest")
        await attach.leave()
    else:
        assert await attach.call.code() is grpc.StatusCode.PERMISSION_DENIED


def test_every_method_has_a_row_in_the_table() -> None:
    assert set(RPCS) == set(pb.DESCRIPTOR.services_by_name["Scheduler"].methods_by_name)


async def test_refusals_are_recorded_with_their_reason_once(case: Case) -> None:
    stub = await case.member(Role.NODE, "serving-1")
    for _ in range(20):
        await refused(stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF)))
    (said,) = case.refusals()
    assert said["node"] == "node serving-1"
    assert "may not call SetHarvest; operator may" in said["reason"]
    (audited,) = [fields for event, fields, _ in case.bench.audited if event == "call_refused"]
    assert audited["reason"] == said["reason"]


async def test_frames_that_are_none_end_their_call_only(
    case: Case, capfd: pytest.CaptureFixture[str]
) -> None:
    operator = case.certificates.of(Role.OPERATOR, "ada")
    async with make_channel(case.bench.address, operator) as channel:
        method = channel.unary_unary("/rose.v1.Scheduler/SetHarvest")
        for frame in (b"\xff" * 64, b"\x08" + b"\xff" * 20, b"\x12\xff\xff\xff\x7f"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(frame)
            assert "Traceback" not in str(caught.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/rose.v1.Scheduler/NoSuchMethod")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    long = pb.RevokeRequest(replica="x" * (300 << 10))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await case.operator.Revoke(long)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    # Bytes that are no handshake, and one that is never finished.
    host, port = case.bench.address.split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 9_000, b""):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        writer.close()
        del reader
    await case.stays_as_it_was()
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_decisions_are_audited_with_their_figures_and_whose_call_they_followed(
    case: Case,
) -> None:
    await case.operator.Revoke(pb.RevokeRequest(replica=OWNED, reason="drill"))
    await case.operator.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_HOLD))
    by_event = {event: (fields, by) for event, fields, by in case.bench.audited}
    granted, _ = by_event["lease_granted"]
    assert granted["replica"] == OWNED
    assert {"epoch", "job", "node", "why", "figures"} <= granted.keys()
    revoked, by = by_event["revoked"]
    assert (revoked["reason"], by) == ("drill", "operator ada")
    asked, by = by_event["SetHarvestRequest"]
    assert (asked["mode"], by) == ("HARVEST_MODE_HOLD", "operator ada")
    announced, by = by_event["version_announced"]
    assert (announced["version"], by) == (1, f"trainer {JOB}")
    assert by_event["node_attached"] == ({"node": "serving-0"}, "node serving-0")


async def test_another_clusters_members_are_strangers_under_one_ca(case: Case) -> None:
    files = Certificates(case.folder / "staging", "staging")
    theirs = files.of(Role.OPERATOR, "eve")
    # A CA for both clusters vouches for her.
    case.certificates.ca.file.write_bytes(
        case.certificates.ca.file.read_bytes() + files.ca.file.read_bytes()
    )
    channel = grpc.aio.secure_channel(
        case.bench.address,
        grpc.ssl_channel_credentials(
            case.certificates.ca.file.read_bytes(),
            theirs.material().key,
            theirs.material().certificate,
        ),
        case.certificates.of(Role.OPERATOR, "ada").channel_options(Role.SCHEDULER),
    )
    async with channel:
        error = await refused(
            SchedulerStub(channel).SetHarvest(
                pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF),
                wait_for_ready=True,
                timeout=PATIENCE_S,
            )
        )
    assert "is of cluster staging; this is prod" in str(error.details())


async def test_a_client_believes_no_member_that_is_not_a_scheduler(case: Case) -> None:
    """A node that takes the scheduler's address is not spoken to."""
    async with (
        running(
            Bench(
                InMemoryStore(),
                case.folder / "evil",
                certificates=case.certificates.of(Role.NODE, "n"),
            )
        ) as evil,
        make_channel(evil.address, case.certificates.of(Role.TRAINER, JOB)) as channel,
    ):
        error = await refused(announce(SchedulerStub(channel), 2, 1))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_ends_with_its_certificate_and_comes_back_with_a_newer_one(
    case: Case,
) -> None:
    soon = case.certificates.of(Role.NODE, "serving-2", life_s=2.0)
    # A certificate's times are whole seconds.
    assert soon.material().not_after_s <= time.time() + 2.0
    node = FakeNode(await case.connected(soon), "serving-2")
    assert "node serving-2 has expired; connect again" in await turned_away(node)
    case.certificates.of(Role.NODE, "serving-2")
    again = FakeNode(await case.connected(soon), "serving-2")
    await again.hears("harvest")
    await case.stays_as_it_was()


async def test_a_scheduler_shows_a_newer_certificate_without_a_restart(case: Case) -> None:
    before = case.certificates.ca.file
    # Everything anew, of another CA; the scheduler's own files are replaced in place.
    other = Certificates(case.folder / "newer")
    fresh = other.ca.issue(Role.SCHEDULER, "s0")
    folder = before.parent
    (folder / "scheduler-s0.key").write_bytes(fresh.key.read_bytes())
    (folder / "scheduler-s0.pem").write_bytes(fresh.certificate.read_bytes())
    before.write_bytes(other.ca.file.read_bytes())
    operator = await case.connected(other.of(Role.OPERATOR, "ada"))
    # A client waits for a scheduler that others are connecting to right now.
    shown = await operator.Snapshot(pb.SnapshotRequest(), wait_for_ready=True, timeout=PATIENCE_S)
    assert shown.replicas
    assert not case.owner.call.done()
