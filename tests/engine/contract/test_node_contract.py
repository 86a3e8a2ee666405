"""A guest of each engine under a real node daemon: leased, frozen, drained, ballooned, updated."""

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from contract_engines import ROOT, ContractEngine
from tiny_model import VOCABULARY, save_tiny_model

from executor import ControlPage, GrantMode, GuestState
from rose.addresses import free_ports
from rose.engines import EngineKind, module_path
from rose.integrations.settings import TrainerSettings
from rose.node.guest.guest_record import running_guests
from rose.process.child import group_alive
from rose.rpc import rose_pb2 as pb
from rose.rpc.rose_pb2_grpc import SchedulerStub
from tests.harness.seated_host import SeatedHost
from tests.harness.waiting import until
from weight_transfer import SigningKey

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

START_S = 480.0
BEAT_S = 0.02
GUEST = "guest"
KV_BYTES = 96 << 20


@dataclass
class PublishedLoad:
    """State that the host publishes on its page, until it is changed."""

    page: ControlPage
    said: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._host = SeatedHost(self.page)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._host.tell(**self.said)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._host.close()


class Cluster:
    """A scheduler and a node daemon with a guest; the host is its page."""

    def __init__(self, folder: Path, engine: ContractEngine) -> None:
        self.folder = folder
        save_tiny_model(folder / "model", dtype="bfloat16")
        self.page = ControlPage.create(folder / "page")
        self.host = PublishedLoad(self.page)
        self.scheduler_port, self.port = free_ports(2)
        self.key = SigningKey.generate()
        self.key.save(folder / "key")
        argv = [sys.executable, "-m", "rose.main.scheduler", f"--port={self.scheduler_port}"]
        argv += [f"--store={folder / 'store'}", f"--log-dir={folder / 'logs'}"]
        argv += ["--harvest=ACTIVE", "--cooldown-s=0.2"]
        self.processes = [self._spawn("scheduler", argv)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.scheduler_port}")
        self.stub = SchedulerStub(self._channel)
        grpc.channel_ready_future(self._channel).result(timeout=120)
        (folder / "node.json").write_text(json.dumps(self._node(engine)))
        daemon = ROOT / "tests/engine/short_daemon.py"
        argv = [sys.executable, str(daemon), "--config", str(folder / "node.json")]
        self.daemon = self._spawn("daemon", argv)
        self.processes.append(self.daemon)

    def close(self) -> None:
        for process in reversed(self.processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            process.wait(60)
        self._channel.close()
        self.host.stop()
        self.page.close()

    @property
    def guest(self) -> GuestState:
        return self.page.guest.peek() or GuestState()

    def until(self, what: Callable[[], object], why: str, within_s: float = 30.0) -> None:
        try:
            until(lambda: bool(what()), within_s, why, every_s=0.02)
        except AssertionError as error:
            error.add_note(f"{self.guest}, {self.page.grant.peek()}")
            log = self.folder / "logs" / f"{GUEST}.log"
            error.add_note((self.folder / "daemon.log").read_text()[-2000:])
            if log.exists():
                error.add_note(log.read_text()[-4000:])
            raise

    def state(self) -> dict[str, Any]:
        with suppress(OSError), self._asked("state", None) as answer:
            return dict(json.loads(answer.read()))
        return {}

    def turn(self, tokens: int) -> list[dict[str, Any]]:
        prompt = [(7 * k + 3) % VOCABULARY for k in range(48)]
        sampling = {"temperature": 0.0, "max_tokens": tokens}
        body = {"request_id": "turn", "token_ids": prompt, "sampling": sampling}
        with self._asked("generate", body) as answer:
            return [json.loads(line) for line in answer]

    def _asked(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}/rose/v1/{path}"
        return urllib.request.urlopen(urllib.request.Request(url, data), timeout=60)

    def _spawn(self, name: str, argv: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(argv, stdout=log, stderr=log, process_group=0)

    def _node(self, engine: ContractEngine) -> dict[str, object]:
        guest: dict[str, object] = {
            "id": GUEST,
            "kind": "guest",
            "engine": engine.kind.value,
            "model_dir": str(self.folder / "model"),
            "port": self.port,
            "kv_bytes": KV_BYTES,
            "max_sequences": 4,
            "max_model_len": 512,
            "pressure_policy": "adaptive",
            "tensor_parallel": engine.ranks,
        }
        if engine.python is not None:
            paths = f"{ROOT}:{module_path(self.folder / 'metadata')}"
            environ = engine.rank_env | {"PYTHONPATH": paths}
            guest |= {"engine_python": engine.python, "extra_env": environ}
        return {
            "node": "node-0",
            "scheduler": f"127.0.0.1:{self.scheduler_port}",
            "run_dir": str(self.folder / "run"),
            "log_dir": str(self.folder / "logs"),
            "verify_key": self.key.verify_key.hex,
            "host": {"page": str(self.page.path)},
            "replicas": [guest],
        }


@pytest.fixture(scope="module")
def cluster(
    contract_engine: ContractEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), contract_engine)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.mark.promise("guest.node")
def test_a_node_daemon_leases_freezes_balloons_updates_drains_and_ends_it(
    cluster: Cluster, contract_engine: ContractEngine
) -> None:
    torch = pytest.importorskip("torch")
    from rose.integrations.policy_publisher import PolicyPublisher
    from weight_transfer.format.checkpoint import read_model_dir
    from weight_transfer.format.tensors import tensor_of

    folder = cluster.folder
    settings = TrainerSettings(
        "job",
        f"127.0.0.1:{cluster.scheduler_port}",
        "http://127.0.0.1:1",
        folder / "model",
        folder / "root",
        folder / "key",
    )
    with PolicyPublisher(settings) as publisher:
        cluster.until(lambda: cluster.state().get("admitting"), "it is leased", START_S)
        assert cluster.state()["warm"] is True
        lines = cluster.turn(8)
        assert sum(len(line.get("token_ids", ())) for line in lines) == 8

        # Frozen by its host's first request, within a step.
        cluster.host.said = {"running": 1}
        cluster.until(lambda: cluster.state().get("running") == 0, "nothing runs")
        turn = threading.Thread(target=cluster.turn, args=(64,))
        turn.start()
        cluster.until(lambda: cluster.guest.gate_reason == "host_busy", "it is held")
        before = cluster.guest.step_seq
        cluster.host.said = {}
        turn.join(60)
        assert cluster.guest.step_seq > before

        # Its host fills its own KV memory.
        whole = cluster.guest.granules_mapped
        cluster.host.said = {"kv_used": 97, "kv_total": 100}
        cluster.until(lambda: cluster.guest.granules_mapped < whole, "it gives memory back")
        cluster.host.said = {"kv_used": 1, "kv_total": 100}
        # An idle engine needs none: turns make it ask.
        cluster.until(
            lambda: cluster.turn(8) and cluster.guest.granules_mapped == whole, "it has it again"
        )
        cluster.host.said = {}

        # The trainer publishes.
        base = {name: tensor_of(bits) for name, bits in read_model_dir(folder / "model").items()}
        new = {name: weight + 0.05 * torch.randn_like(weight) for name, weight in base.items()}
        assert publisher.publish(new.items(), wait=False) == 1
        cluster.until(lambda: cluster.state().get("policy_version") == 1, "it has the version", 90)
        assert {line.get("version", 1) for line in cluster.turn(8)} == {1}
        cluster.until(lambda: cluster.guest.policy_version == 1, "its page tells it too")

        # An operator stops lending.
        ended: list[list[dict[str, Any]]] = []
        turn = threading.Thread(target=lambda: ended.append(cluster.turn(440)))
        turn.start()
        cluster.until(lambda: cluster.state().get("running") == 1, "a turn runs")
        cluster.stub.SetHarvest(
            pb.SetHarvestRequest(mode=pb.HARVEST_MODE_HOLD_AND_DRAIN), timeout=30
        )
        turn.join(60)
        assert ended[0][-1]["finish_reason"] == "revoked"
        assert ended[0][0]["token_ids"], "its tokens were handed back"
        cluster.until(lambda: not cluster.state()["admitting"], "no lease is left")
        cluster.until(lambda: _mode(cluster) is GrantMode.FREEZE, "the daemon freezes it")
        cluster.until(lambda: cluster.guest.gate_reason, "it says why")

    record = running_guests(folder / "run")[GUEST]
    group = record.identity.pid
    assert group_alive(group)
    cluster.daemon.terminate()
    assert cluster.daemon.wait(60) == 0
    cluster.until(lambda: not group_alive(group), "it ended its guest")
    assert contract_engine.kind in (EngineKind.VLLM, EngineKind.SGLANG)


def _mode(cluster: Cluster) -> GrantMode | None:
    grant = cluster.page.grant.peek()
    return None if grant is None else grant.mode
