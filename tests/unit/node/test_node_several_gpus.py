"""Replicas and hosts of several GPUs: what a node refuses before it starts anything, in a line, how
it starts engines of several ranks, and how it counts their memory.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from node_bench import node_of_one

from executor import ControlPage, GuardConfig, GuestState
from executor.grant_controller import HarvestCaps
from rose.engines import process_spec
from rose.errors import ConfigError, EngineStartError
from rose.node import HostConfig, NodeConfig, ReplicaConfig
from rose.node.guest import memory_gauges
from rose.node.guest.memory_gauges import DRIVER, ENGINE_BYTES, PAGE, DeviceMemory, Gpus
from rose.node.orders import SchedulerCaps
from rose.nvml import Card, CardError, Client
from tests.fakes.cuda.nvml import StandInReader, card
from tests.fakes.guarded_guest import LeasedGuest, guard_thread
from tests.harness.seated_host import SeatedHost

GIB = 1 << 30
NODE = {"node": "n", "scheduler": "127.0.0.1:1", "run_dir": "r", "log_dir": "l", "unsigned": True}
DEDICATED = {"id": "d", "kind": "dedicated", "model_dir": "m", "port": 9_100}
GUEST = {"id": "g", "kind": "guest", "model_dir": "m", "port": 9_000}
CARDS = tuple(card(index=index, uuid=f"GPU-{letter}0") for index, letter in enumerate("abcd"))


class SeveralCards(StandInReader):
    """Reader of cards that differ in free memory and processes, by index."""

    def __init__(self, *cards: Card) -> None:
        super().__init__(*cards)
        self.frees = [100 * GIB for _ in cards]
        self.lists: list[tuple[Client, ...]] = [() for _ in cards]

    def free_bytes(self, card: Card) -> int:
        return self.frees[card.index]

    def clients(self, card: Card) -> tuple[Client, ...]:
        return self.lists[card.index]


@pytest.fixture
def reader() -> SeveralCards:
    return SeveralCards(*CARDS)


@pytest.fixture
def gpus(reader: SeveralCards) -> Gpus:
    return Gpus(lambda: reader)


# ---- files ----

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"replicas": [DEDICATED | {"device": 0, "devices": [0, 1], "tensor_parallel": 2}]},
        "replicas.0: Value error, device is short for devices of one GPU; leave one of them out",
    ),
    (
        {"host": {"page": "p", "device": 0, "devices": [0, 1]}, "replicas": []},
        "host: Value error, device is short for devices of one GPU; leave one of them out",
    ),
    (
        {"host": {"page": "p", "devices": ["GPU-a", "GPU-b", "GPU-a"]}, "replicas": []},
        "host: Value error, devices: GPU GPU-a is named twice",
    ),
    (
        {"replicas": [DEDICATED | {"devices": [0, 1]}]},
        "replicas.0: Value error, devices: 2 named, and tensor_parallel x data_parallel is 1; name"
        " one GPU for each rank",
    ),
    (
        {"replicas": [DEDICATED | {"device": 0, "tensor_parallel": 2, "data_parallel": 2}]},
        "replicas.0: Value error, devices: 1 named, and tensor_parallel x data_parallel is 4; name"
        " one GPU for each rank",
    ),
    (
        {"host": {"page": "p"}, "replicas": [GUEST | {"data_parallel": 2}]},
        "replicas.0: Value error, data_parallel: a guest has one scheduler, which its gate holds;"
        " make it tensor_parallel, or the replica dedicated",
    ),
    (
        {"replicas": [DEDICATED | {"engine": "sglang", "data_parallel": 2}]},
        "replicas.0: Value error, data_parallel: sglang does not have it that a dedicated replica"
        " has several data-parallel ranks (ROSE's calls reach the ranks of one copy); leave"
        " data_parallel out, or run this replica on another engine",
    ),
    (
        {"replicas": [DEDICATED | {"core": 0, "cores": [0, 1]}]},
        "replicas.0: Value error, core is short for cores of one CPU; leave one of them out",
    ),
    (
        {"replicas": [DEDICATED | {"tensor_parallel": 0}]},
        "replicas.0.tensor_parallel: Input should be greater than or equal to 1",
    ),
    (
        {"replicas": [DEDICATED | {"devices": "host"}]},
        "replicas.0.devices: Input should be a valid tuple",
    ),
    (
        {"host": {"page": "p"}, "replicas": [GUEST | {"device": "host"}]},
        "g: its host names no GPU that it could share",
    ),
    (
        {
            "host": {"page": "p", "devices": [0, 1]},
            "replicas": [GUEST | {"device": "host", "tensor_parallel": 4}],
        },
        "g: tensor_parallel is 4, and its host has 2 GPUs; lower it, or name the others in the"
        " host's devices",
    ),
    (
        {"replicas": [DEDICATED | {"engine_args": ["--enable-expert-parallel"]}]},
        "replicas.0: Value error, engine_args: the node has expert_parallel for"
        " --enable-expert-parallel; leave out --enable-expert-parallel",
    ),
]


def load(tmp_path: Path, said: dict[str, Any]) -> NodeConfig:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(NODE | said))
    return NodeConfig.load(path)


@pytest.mark.parametrize(("said", "line"), WRONG)
def test_a_file_whose_ranks_have_no_place_is_refused_in_a_line(
    tmp_path: Path, said: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, said)
    assert str(caught.value).removeprefix(f"{tmp_path / 'node.json'}: ") == line


@pytest.mark.parametrize(
    ("host", "guest", "gpus"),
    [
        ({"device": 3}, {"device": "host"}, (3,)),
        ({"devices": [0, 1]}, {"device": "host", "tensor_parallel": 2}, (0, 1)),
        # A guest on some of its host's GPUs: the first, or those that it names.
        ({"devices": [2, 3, 0, 1]}, {"device": "host", "tensor_parallel": 2}, (2, 3)),
        ({"devices": [0, 1, 2, 3]}, {"devices": [3, 2], "tensor_parallel": 2}, (3, 2)),
        ({"devices": [0, 1]}, {}, ()),
    ],
)
def test_a_guest_is_on_the_gpus_of_its_host(
    tmp_path: Path, host: dict[str, Any], guest: dict[str, Any], gpus: tuple[int, ...]
) -> None:
    config = load(tmp_path, {"host": {"page": "p"} | host, "replicas": [GUEST | guest]})
    assert config.replicas[0].gpus == gpus


# ---- command lines ----

UNIPROC = "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor"
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
# Tokens whose KV is 1 MiB on a rank that has all four heads.
TOKENS = (1 << 20) // (2 * 2 * 4 * 64 * 2)


@pytest.mark.parametrize(
    ("fields", "there", "absent"),
    [
        ({}, {UNIPROC}, ("parallel", "remote-code", "tokenizer=")),
        (
            {"tensor_parallel": 2, "expert_parallel": True},
            {
                "--tensor-parallel-size=2",
                "--enable-expert-parallel",
                "--distributed-executor-backend=mp",
            },
            ("data-parallel",),
        ),
        ({"data_parallel": 2}, {"--data-parallel-size=2", UNIPROC}, ("tensor-parallel",)),
        (
            {"trust_remote_code": True, "tokenizer": "words"},
            {"--trust-remote-code", "--tokenizer=words"},
            (),
        ),
        (
            {"engine": "sglang", "tensor_parallel": 2, "expert_parallel": True},
            {"--tp-size=2", "--ep-size=2", f"--max-total-tokens={2 * TOKENS}"},
            ("parallel", "tokenizer"),
        ),
        # More ranks than heads: each has one.
        ({"engine": "sglang", "tensor_parallel": 8}, {f"--max-total-tokens={4 * TOKENS}"}, ()),
        (
            {"engine": "sglang", "trust_remote_code": True, "tokenizer": "words"},
            {"--trust-remote-code", "--tokenizer-path=words", f"--max-total-tokens={TOKENS}"},
            ("tp-size", "ep-size"),
        ),
    ],
)
def test_an_engine_of_several_ranks_is_started_as_its_file_says(
    tmp_path: Path, fields: dict[str, Any], there: set[str], absent: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    said = DEDICATED | {"model_dir": str(tmp_path), "kv_bytes": 1 << 20} | fields
    config = load(tmp_path, {"replicas": [said]})
    argv = process_spec(config.replicas[0].engine_spec(config)).argv
    assert there <= set(argv)
    assert [word for word in argv for part in absent if part in word and word not in there] == []


@pytest.mark.parametrize(
    ("fields", "worker"),
    [
        ({}, None),
        ({"tensor_parallel": 2}, "executor.vllm.cpu_worker.CpuKvWorker"),
        ({"tensor_parallel": 2, "devices": [0, 1]}, None),
        (
            {"tensor_parallel": 2, "devices": [0, 1], "kv_backend": "cuda"},
            "executor.vllm.reserved_worker.ReservedKvWorker",
        ),
    ],
)
def test_ranks_of_a_guest_have_the_worker_that_gives_their_kv_memory_back(
    tmp_path: Path, fields: dict[str, Any], worker: str | None
) -> None:
    config = load(tmp_path, {"host": {"page": "p"}, "replicas": [GUEST | fields]})
    argv = process_spec(config.replicas[0].engine_spec(config)).argv
    workers = [word.partition("=")[2] for word in argv if word.startswith("--worker-cls")]
    assert workers == ([worker] if worker else [])


@pytest.mark.parametrize(("named", "cores"), [({"core": 1}, (1,)), ({"cores": [0, 1]}, (0, 1))])
def test_ranks_on_a_cpu_are_pinned_to_its_cores(
    tmp_path: Path, named: dict[str, Any], cores: tuple[int, ...]
) -> None:
    config = load(tmp_path, {"replicas": [DEDICATED | named]})
    assert process_spec(config.replicas[0].engine_spec(config)).cores == cores


# ---- cards ----


def node(tmp_path: Path, host: Any, **changes: Any) -> NodeConfig:
    guest = {"device": None, "tensor_parallel": len(changes.get("devices", ())) or 1} | changes
    return node_of_one(tmp_path, HostConfig(page=tmp_path / "page", devices=host), **guest)


def test_an_engine_sees_its_cards_in_the_order_of_its_ranks(tmp_path: Path, gpus: Gpus) -> None:
    config = node(tmp_path, [], devices=[2, "GPU-a"], mps_thread_percentage=None)
    told = gpus.environment(config.replicas[0])
    assert (told["CUDA_DEVICE_ORDER"], told["CUDA_VISIBLE_DEVICES"]) == (
        "PCI_BUS_ID",
        "GPU-c0,GPU-a0",
    )


@pytest.mark.parametrize(
    ("host", "devices"), [([0, 1], [0, 1]), ([0, 1], ["GPU-b", 0]), ([3, 1, 2], [2]), ([], [1, 3])]
)
def test_a_guest_on_all_or_some_of_its_hosts_gpus_is_taken(
    tmp_path: Path, gpus: Gpus, host: list[Any], devices: list[Any]
) -> None:
    gpus.insist_all(node(tmp_path, host, devices=devices))


COPIES = {"tensor_parallel": 1, "data_parallel": 2, "kind": "dedicated"}
APART = {"id": "d", "kind": "dedicated", "model_dir": Path("m"), "port": 9_100}


@pytest.mark.parametrize(
    ("host", "devices", "dedicated", "line"),
    [
        (
            [0, 7],
            [0],
            (),
            "GPU 7 is none or more than one of 0: Stand-in GPU GPU-a0, 1: Stand-in GPU GPU-b0, 2:"
            " Stand-in GPU GPU-c0, 3: Stand-in GPU GPU-d0; name one of them",
        ),
        ([0, "GPU-a"], [0], (), "GPU 0 and GPU GPU-a are the same one, GPU-a0; name each GPU once"),
        (
            [0, 1],
            [1, 2],
            (),
            "guest is on GPU 2 and its host on 0, 1; a guest shares its host's GPUs",
        ),
        (
            [0, 1],
            [0],
            ("GPU-b", 2),
            "d is dedicated and on GPU GPU-b, where the host or its guest is; name another GPU, or"
            " make it a guest",
        ),
        (
            [],
            [1],
            (2, 1),
            "d is dedicated and on GPU 1, where the host or its guest is; name another GPU, or make"
            " it a guest",
        ),
    ],
)
def test_gpus_that_overlap_wrongly_or_are_not_there_are_refused_in_a_line(
    tmp_path: Path, gpus: Gpus, host: list[Any], devices: list[Any], dedicated: Any, line: str
) -> None:
    config = node(tmp_path, host, devices=devices)
    if dedicated:
        ranks = {"devices": dedicated, "tensor_parallel": len(dedicated)}
        apart = ReplicaConfig.model_validate(APART | ranks)
        config = config.model_copy(update={"replicas": (*config.replicas, apart)})
    with pytest.raises(CardError) as caught:
        gpus.insist_all(config)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tensor_parallel": 2}, 2),
        (COPIES, 1),
        (COPIES | {"expert_parallel": True}, 2),
    ],
)
def test_each_card_has_to_have_room_for_its_part(
    tmp_path: Path, reader: SeveralCards, gpus: Gpus, fields: dict[str, Any], parts: int
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    os.truncate(tmp_path / "model.safetensors", 16 * GIB)
    config = node(tmp_path, [], devices=[0, 1], kv_bytes=GIB, **fields).replicas[0]
    reader.frees[1] = needed = ENGINE_BYTES + 16 * GIB // parts + 2 * GIB
    gpus.insist_room(config, GIB)
    reader.frees[1] -= 1
    with pytest.raises(EngineStartError, match=r"guest: .* of Stand-in GPU \(GPU 1\) and"):
        gpus.insist_room(config, GIB)
    reader.frees[:2] = needed, needed
    gpus.insist_room(config, GIB)


def test_a_host_that_computes_on_another_gpu_than_its_file_says_is_named(
    tmp_path: Path, reader: SeveralCards, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostConfig(page=tmp_path / "page", devices=(0, 1))
    with subprocess.Popen(["sleep", "60"]) as rank:
        reader.lists[0] = (Client(os.getpid(), GIB),)
        reader.lists[2] = (Client(rank.pid, GIB),)
        monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: False)
        gpus.insist_used(host, [os.getpid()])
        monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: True)
        for unknown in ([], [2**22 + 1]):
            gpus.insist_used(host, unknown)
        gpus.insist_used(host.model_copy(update={"devices": ()}), [os.getpid()])
        gpus.insist_used(host.model_copy(update={"devices": (2, 1, 0)}), [os.getpid()])
        with pytest.raises(CardError) as caught:
            gpus.insist_used(host, [os.getpid()])
        rank.kill()
    assert str(caught.value) == (
        f"the host (process {rank.pid}) computes on GPU 2 GPU-c0, and 0, 1 is named as its own;"
        " correct host.devices"
    )


# ---- memory ----


def gauge(reader: SeveralCards, state: Callable[[], GuestState | None]) -> DeviceMemory:
    return DeviceMemory(reader, CARDS[:2], os.getpgrp, state)


def test_what_a_guest_gave_back_is_what_its_slowest_card_has(
    reader: SeveralCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: True)
    held = gauge(reader, lambda: None)
    figures = []
    for first, second in ((5, 7), (3, 7), (3, 6), (0, 6), (0, 0)):
        reader.lists[0] = (Client(os.getpid(), first * GIB),) if first else ()
        reader.lists[1] = (Client(os.getpid(), second * GIB),) if second else ()
        amount = held.held_bytes()
        figures.append(None if amount is None else amount / GIB)
    # A card without one of its living processes is unknown.
    assert figures == [12, 12, 10, None, None]
    assert (held.by, held.sees_all) == (DRIVER, True)


def test_a_guest_that_is_gone_holds_nothing_however_its_cards_differed(
    reader: SeveralCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: True)
    with subprocess.Popen(["sleep", "60"], process_group=0) as process:
        held = DeviceMemory(reader, CARDS[:2], lambda: process.pid, lambda: None)
        reader.lists[:2] = (Client(process.pid, 5 * GIB),), (Client(process.pid, 7 * GIB),)
        assert held.held_bytes() == 12 * GIB
        process.kill()
    reader.lists[0] = ()
    assert held.held_bytes() == 12 * GIB, "the other card's are still out"
    reader.lists[1] = ()
    assert held.held_bytes() == 0


@pytest.mark.parametrize(
    ("claimed", "grown", "held"),
    [
        (4, (4, 4), 6),
        (4, (2, 2), 6),
        (4, (2, 0), 10),
        (4, (1, 3), 8),
        (0, (9, 9), 10),
        (4, (-1, 9), 10),
    ],
)
def test_a_page_is_believed_as_far_as_every_card_has_more_room(
    reader: SeveralCards, claimed: int, grown: tuple[int, int], held: int
) -> None:
    state = GuestState(bytes_mapped=10 * GIB)
    gauge_ = gauge(reader, lambda: state)
    assert gauge_.held_bytes() == 10 * GIB
    state = replace(state, bytes_mapped=(10 - claimed) * GIB)
    for index, more in enumerate(grown):
        reader.frees[index] += more * GIB
    assert (gauge_.held_bytes(), gauge_.by) == (held * GIB, PAGE)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("ranks", "gpus", "cap", "granules"),
    [
        # 8 MiB of its own and 100 lent, in granules of 1 MiB on each rank.
        (1, 1, None, 108),
        (4, 4, None, 108),
        (1, 1, 20 * MIB, 20),
        (4, 4, 20 * MIB, 5),
        # All ranks of a CPU share what one rank of the host lends.
        (2, 1, None, (2 * 8 + 100) // 2),
    ],
)
def test_a_guests_limits_count_the_memory_of_all_its_ranks(
    tmp_path: Path, ranks: int, gpus: int, cap: int | None, granules: int
) -> None:
    caps = SchedulerCaps()
    caps.heard()
    caps.harvest = HarvestCaps(kv_bytes=cap)
    page = ControlPage.create(tmp_path / "page")
    host = SeatedHost(page)
    guard = guard_thread(
        page,
        tmp_path,
        config=GuardConfig(512, 64, kv_base_bytes=ranks * 8 * MIB),
        caps=caps,
        gpus=gpus,
        guest=LeasedGuest(ranks=ranks),
    )
    host.tell(granules_total=200, granules_lent=100, bytes_lent=100 * MIB)
    page.guest.write(
        GuestState(
            granules_total=500, granules_mapped=130, bytes_mapped=130 * MIB, granule_bytes=MIB
        )
    )
    assert guard.tick().kv_granule_cap == granules
    assert guard.guest is not None
    assert guard.guest.bytes_mapped == ranks * 130 * MIB
    limit = granules if cap is None else 108
    assert guard.owed_bytes == (130 - limit) * ranks * MIB
    host.close()
    page.close()
