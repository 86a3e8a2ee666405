"""Every kind of member reaches a scheduler with its certificate, as the process that it is."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.gateway import GatewaySettings
from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.replicas.watch import WatchedTable
from rose.logs.eventlog import EventLog
from rose.main.scheduler import SchedulerSettings, serve, settings_of
from rose.node.config import NodeConfig
from rose.node.scheduler_session import NodeIdentity, SchedulerSession
from rose.operate.client import SchedulerClient
from rose.rpc import rose_pb2 as pb
from rose.security import CertificateFiles, Role
from rose.security.audit_log import audit_file, verify
from rose.weight_distribution.weight_publisher import trainers_channel
from tests.harness.certificates import Certificates
from tests.harness.waiting import PATIENCE_S, until_async


@pytest.fixture
def cluster(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ca")


def arguments(files: CertificateFiles) -> list[str]:
    ca, certificate, key = map(str, files.paths)
    return ["--ca", ca, "--certificate", certificate, "--key", key]


def settings(tmp_path: Path, port: int, files: CertificateFiles) -> SchedulerSettings:
    argv = ["--port", str(port), "--store", str(tmp_path / "s.sqlite")]
    return settings_of([*argv, "--log-dir", str(tmp_path / "log"), *arguments(files)])


async def test_node_gateway_trainer_and_operator_are_served(
    cluster: Certificates, tmp_path: Path, unused_tcp_port: int
) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    stop = asyncio.Event()
    own = cluster.of(Role.SCHEDULER, "s0")
    serving = asyncio.create_task(serve(settings(tmp_path, unused_tcp_port, own), stop))
    told: list[pb.NodeCommand] = []
    tables: list[tuple[ReplicaEntry, ...]] = []
    heard: list[str] = []
    with contextlib.closing(EventLog(tmp_path / "log", "n0")) as events:
        session = SchedulerSession(
            address,
            NodeIdentity("n0"),
            list,
            told.append,
            events,
            cluster.of(Role.NODE, "n0"),
        )
        gateway = cluster.of(Role.GATEWAY, "gw")
        watch = WatchedTable(
            address, "gw", 5.0, lambda event, **_: heard.append(event), certificates=gateway
        )
        trainer = trainers_channel(address, cluster.of(Role.TRAINER, "grpo"))

        async def register() -> None:
            await trainer.call(
                lambda stub, left_s: stub.RegisterJob(
                    pb.RegisterJobRequest(job="grpo"), timeout=left_s
                ),
                PATIENCE_S,
            )

        tasks = [
            asyncio.create_task(session.run()),
            asyncio.create_task(watch.run(tables.append)),
        ]
        try:
            await until_async(
                lambda: bool(told and "scheduler_connected" in heard), PATIENCE_S, "both"
            )
            await register()
            operator = SchedulerClient(address, certificates=cluster.of(Role.OPERATOR, "ada"))
            snapshot = await asyncio.to_thread(operator.snapshot)
            assert [job.job for job in snapshot.jobs] == ["grpo"]
            viewer = SchedulerClient(address, certificates=cluster.of(Role.VIEWER, "auditor"))
            assert (await asyncio.to_thread(viewer.snapshot)).jobs == snapshot.jobs
            with pytest.raises(RefusedError, match="viewer auditor may not call SetHarvest"):
                await asyncio.to_thread(viewer.set_harvest, pb.HARVEST_MODE_HOLD, "")
            # The trainer's certificate is renewed: its next call shows the new one.
            cluster.of(Role.TRAINER, "grpo")
            await register()
            for files, error, line in (
                (None, UnavailableError, "give --ca, --certificate and --key"),
                (
                    cluster.of(Role.NODE, "n1"),
                    RefusedError,
                    "may not call Snapshot; operator or viewer may",
                ),
                (
                    Certificates(tmp_path / "other").of(Role.OPERATOR, "eve"),
                    UnavailableError,
                    "rose certs show",
                ),
            ):
                client = SchedulerClient(address, certificates=files)
                with pytest.raises(error, match=line) as caught:
                    await asyncio.to_thread(client.snapshot)
                assert "\n" not in str(caught.value)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await trainer.close()
            stop.set()
            await serving
    audited = verify(audit_file(tmp_path / "log", "scheduler"))
    assert audited.wrong == ""
    assert audited.records >= 5


def test_a_process_refuses_a_certificate_of_another_role(
    cluster: Certificates, tmp_path: Path
) -> None:
    node = cluster.of(Role.NODE, "n0")
    with pytest.raises(ConfigError, match="give one of role scheduler"):
        settings(tmp_path, 7400, node)
    with pytest.raises(ConfigError, match="give one of role gateway"):
        GatewaySettings(port=0, scheduler="127.0.0.1:1", certificates=node)
    with pytest.raises(ConfigError, match="give one of role trainer"):
        trainers_channel("127.0.0.1:1", node)


def test_the_network_is_served_with_certificates_or_not_at_all(
    cluster: Certificates, tmp_path: Path
) -> None:
    argv = ["--host", "0.0.0.0", "--store", str(tmp_path / "s"), "--log-dir", str(tmp_path)]
    with pytest.raises(ConfigError, match="give --ca, --certificate and --key"):
        settings_of(argv)
    own = cluster.of(Role.SCHEDULER, "s0")
    assert settings_of([*argv, *arguments(own)]).certificates is not None
    with pytest.raises(ConfigError, match="all three or none"):
        settings_of([*argv, "--ca", str(own.paths[0])])


def test_a_node_bears_the_name_of_its_certificate(cluster: Certificates, tmp_path: Path) -> None:
    ca, certificate, key = map(str, cluster.of(Role.NODE, "n0").paths)
    file = tmp_path / "node.json"
    written = {
        "node": "n0",
        "scheduler": "127.0.0.1:7400",
        "run_dir": str(tmp_path),
        "log_dir": str(tmp_path),
        "replicas": [],
        "unsigned": True,
        "certificates": {"ca": ca, "certificate": certificate, "key": key},
    }

    def load(**changes: object) -> NodeConfig:
        file.write_text(json.dumps(written | changes))
        return NodeConfig.load(file)

    config = load()
    assert config.certificates.files is config.certificates.files
    # The same certificate serves for weights, unless there is one for these.
    assert config.transport.credentials(config.certificates).certificate == Path(certificate)
    with pytest.raises(ConfigError, match="is of node n0, and this is n1"):
        load(node="n1")
    with pytest.raises(ConfigError, match="all three or none"):
        load(certificates={"ca": ca})
