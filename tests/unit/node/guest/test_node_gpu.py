"""A replica on a GPU: its card is found, insisted on, and told to its engine."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_bench import node_of_one

from rose.engines import Device, process_spec
from rose.errors import EngineStartError, RoseError
from rose.node import HostConfig, NodeConfig, ReplicaConfig
from rose.node.daemon import NodeDaemon
from rose.node.guest.memory_gauges import ENGINE_BYTES, NO_PIPES, Gpus
from rose.nvml import CardError, CardReader
from tests.fakes.cuda.nvml import StandInReader, card

GIB = 1 << 30
CARDS = (card(uuid="GPU-a0"), card(index=1, uuid="GPU-b0"))


def replica(tmp_path: Path, **changes: Any) -> ReplicaConfig:
    return node(tmp_path, None, **changes).replicas[0]


def node(tmp_path: Path, host: Any, **changes: Any) -> NodeConfig:
    return node_of_one(tmp_path, HostConfig(page=tmp_path / "page", device=host), **changes)


def gpus(reader: CardReader) -> Gpus:
    return Gpus(lambda: reader)


@pytest.fixture
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a control daemon would have its pipes; `control` itself is not there."""
    folder = tmp_path / "mps"
    folder.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder))
    return folder


@pytest.mark.parametrize(("device", "uuid"), [(0, "GPU-a0"), (1, "GPU-b0"), ("GPU-b", "GPU-b0")])
def test_an_engine_sees_its_card_alone_by_a_name_that_does_not_move(
    tmp_path: Path, device: int | str, uuid: str
) -> None:
    told = gpus(StandInReader(*CARDS)).environment(replica(tmp_path, device=device))
    assert (told["CUDA_DEVICE_ORDER"], told["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", uuid)


def test_a_node_without_a_gpu_asks_no_driver(tmp_path: Path) -> None:
    def absent() -> CardReader:
        raise AssertionError("asked")

    NodeDaemon(node(tmp_path, None, device=None), Gpus(absent))


def test_its_engine_is_started_for_a_gpu(tmp_path: Path) -> None:
    config = replica(tmp_path, kv_backend="cuda", engine_python="/opt", sleep_mode=True)
    beside = node(tmp_path, None)
    env = gpus(StandInReader(*CARDS)).environment(config)
    spec = config.engine_spec(beside, gpu_env=env)
    process = process_spec(spec)
    assert (spec.device, process.argv[0], process.share) == (Device.CUDA, "/opt", "aside")
    assert process.env["CUDA_VISIBLE_DEVICES"] == "GPU-b0"
    assert process.env["VLLM_SERVER_DEV_MODE"] == process.env["ROSE_GATED_START"] == "1"
    assert "--enable-sleep-mode" in process.argv
    assert "--enforce-eager" not in process.argv
    eager = replica(tmp_path, cuda_graphs=False).engine_spec(beside)
    assert "--enforce-eager" in process_spec(eager).argv
    assert "--enable-sleep-mode" not in process_spec(eager).argv


def test_an_engine_on_the_cpu_is_started_as_before(tmp_path: Path) -> None:
    config = replica(tmp_path, device=None)
    process = process_spec(config.engine_spec(node(tmp_path, None)))
    assert process.share == "background"
    assert "--enforce-eager" in process.argv
    assert not any(name.startswith("CUDA") for name in process.env)
    assert "ROSE_GATED_START" not in process.env


def test_the_operators_own_variables_have_the_last_word(tmp_path: Path) -> None:
    config = replica(tmp_path, extra_env={"CUDA_VISIBLE_DEVICES": "GPU-x"})
    env = gpus(StandInReader(*CARDS)).environment(config)
    told = config.engine_spec(node(tmp_path, None), gpu_env=env).extra_env
    assert told["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    assert told["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def no_driver() -> CardReader:
    raise CardError("no NVIDIA driver is here; run elsewhere")


@pytest.mark.parametrize(
    ("open_reader", "told"),
    [
        (no_driver, "no NVIDIA driver is here"),
        (StandInReader, "sees no GPU"),
        (lambda: StandInReader(card()), "GPU 1 is none or more than one of 0: Stand-in GPU"),
        (lambda: StandInReader(CARDS[0], card(index=1, mig=True)), "MIG is on"),
        (lambda: StandInReader(CARDS[0], card(index=1, cuda=(12, 4))), "serves CUDA 12.4"),
        (
            lambda: StandInReader(CARDS[0], card(index=1, compute_mode="prohibited")),
            "compute mode prohibited",
        ),
    ],
)
def test_a_node_does_not_start_with_a_card_that_cannot_be(
    tmp_path: Path, open_reader: Callable[[], CardReader], told: str
) -> None:
    with pytest.raises(CardError, match=told) as caught:
        NodeDaemon(node(tmp_path, None), Gpus(open_reader))
    assert isinstance(caught.value, RoseError), "`rose node` says these in one line"
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page").exists(), "something was begun"


@pytest.mark.parametrize("host", [1, "GPU-b0", None])
def test_a_guest_shares_its_hosts_card_however_it_is_named(tmp_path: Path, host: Any) -> None:
    gpus(StandInReader(*CARDS)).insist_all(node(tmp_path, host))


def test_a_hosts_card_has_to_be_there_too(tmp_path: Path) -> None:
    with pytest.raises(CardError, match="GPU 7 is none"):
        gpus(StandInReader(*CARDS)).insist_all(node(tmp_path, 7, device=None))


@pytest.mark.parametrize("host", [0, "GPU-a0"])
def test_a_guest_on_another_card_than_its_host_is_refused(tmp_path: Path, host: Any) -> None:
    with pytest.raises(CardError, match=r"guest is on GPU 1 and its host on .*0; a guest shares"):
        gpus(StandInReader(*CARDS)).insist_all(node(tmp_path, host))


def test_weights_and_kv_have_to_fit_on_the_card_beside_the_headroom(tmp_path: Path) -> None:
    reader = StandInReader(*CARDS)
    (tmp_path / "model.safetensors").write_bytes(b"")
    os.truncate(tmp_path / "model.safetensors", 16 * GIB)
    config = replica(tmp_path, kv_bytes=8 * GIB)
    reader.free = ENGINE_BYTES + 25 * GIB
    gpus(reader).insist_room(config, GIB)
    reader.free -= 1
    with pytest.raises(
        EngineStartError, match=r"guest: .* need 27\.0 GiB of Stand-in GPU .GPU 1. and 27\.0"
    ):
        gpus(reader).insist_room(config, GIB)
    reader.free = None
    with pytest.raises(CardError):
        gpus(reader).insist_room(config, 0)
    gpus(reader).insist_room(replica(tmp_path, device=None), 1 << 60)


def test_priority_and_share_are_told_to_a_client_of_mps(tmp_path: Path, pipes: Path) -> None:
    os.mkfifo(pipes / "control")
    config = replica(tmp_path, mps_priority="low", mps_thread_percentage=40)
    told = gpus(StandInReader(*CARDS)).environment(config)
    assert told["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert told["CUDA_MPS_PIPE_DIRECTORY"] == str(pipes)


def test_a_daemon_may_listen_on_a_socket_and_an_engine_have_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(own)  # a socket's path may be 107 bytes long
    with socket.socket(socket.AF_UNIX) as control:
        control.bind("control")
        config = replica(
            tmp_path, mps_priority="low", extra_env={"CUDA_MPS_PIPE_DIRECTORY": str(own)}
        )
        told = gpus(StandInReader(*CARDS)).environment(config)
    assert told["CUDA_MPS_PIPE_DIRECTORY"] == str(own)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in told


@pytest.mark.parametrize("left_over", ["", "control"])
def test_without_a_control_daemon_mps_is_refused(
    tmp_path: Path, pipes: Path, left_over: str
) -> None:
    if left_over:
        (pipes / left_over).write_text("no pipe")
    with pytest.raises(CardError, match=r"no MPS control daemon has its pipes in .*mps; start"):
        gpus(StandInReader(*CARDS)).insist_all(node(tmp_path, None, mps_priority="low"))


def test_a_guest_does_not_join_mps_unless_it_is_asked_to(tmp_path: Path, pipes: Path) -> None:
    """CUDA joins any control daemon that it finds. A dedicated replica takes no host along."""
    os.mkfifo(pipes / "control")
    told = gpus(StandInReader(*CARDS)).environment(replica(tmp_path))
    assert told.pop("CUDA_MPS_PIPE_DIRECTORY") == NO_PIPES
    assert not any("MPS" in name for name in told)
    assert not Path(NO_PIPES).is_dir()
    told = gpus(StandInReader(*CARDS)).environment(replica(tmp_path, kind="dedicated"))
    assert not any("MPS" in name for name in told)


def test_a_card_for_one_process_is_not_shared_without_mps(tmp_path: Path, pipes: Path) -> None:
    reader = StandInReader(CARDS[0], card(index=1, compute_mode="exclusive process"))
    with pytest.raises(CardError, match="lets one process in: guest cannot share it"):
        gpus(reader).insist_all(node(tmp_path, None))
    os.mkfifo(pipes / "control")
    gpus(reader).insist_all(node(tmp_path, None, mps_priority="low"))
    gpus(reader).insist_all(node(tmp_path, None, kind="dedicated"))
