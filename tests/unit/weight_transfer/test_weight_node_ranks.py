"""Ranks of a node as processes: an update is decoded once, and a rank may die at any time."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import blake3
import pytest
from weight_cases import model, next_model

from bench.weights.ranks import write_safetensors
from tests.harness.processes import Forked
from weight_transfer import ChunkStore, SigningKey, TensorBits, VersionPublisher

PROGRAM = str(Path(__file__).with_name("node_rank_main.py"))
VERSIONS = 3


class Node:
    """A checkpoint, its versions, and the ranks that read it."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack = root, stack
        self.ranks = root / "ranks"
        base = {n: t for n, t in model(1).items() if t.dtype == "bfloat16"}
        (root / "model").mkdir()
        write_safetensors(root / "model" / "model.safetensors", base)
        publisher = VersionPublisher(
            ChunkStore(root / "store"), "job", "test", SigningKey.generate(), clock=lambda: 0.0
        )
        self.models = [base]
        for version in range(1, VERSIONS + 1):
            self.models.append(next_model(self.models[-1], version, 0.2))
            publisher.publish(version, version - 1, *self.models[-2:])

    def start(self, place: str, hold_at: int | None = None) -> "Rank":
        words = [str(self.root), str(self.ranks / place), str(VERSIONS)]
        words += [] if hold_at is None else [str(hold_at)]
        return Rank(self._stack.enter_context(Forked(PROGRAM, *words, stdout=True)))


class Rank:
    def __init__(self, process: Forked) -> None:
        self.process = process
        self._leads: bool | None = None

    @property
    def leads(self) -> bool:
        """Return the first line that the rank prints, once it has read the checkpoint."""
        if self._leads is None:
            self._leads = bool(self.says()["leads"])
        return self._leads

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))


def all_follow(node: Node, ranks: list[Rank]) -> None:
    """Every version, one after the other, each decoded once and the same everywhere."""
    assert [rank.leads for rank in ranks].count(True) == 1
    for version in range(1, VERSIONS + 1):
        assert [rank.says() for rank in ranks] == [{"decoded": version}] * len(ranks)
        step(ranks)
        said = [rank.says() for rank in ranks]
        assert {each["version"] for each in said} == {version}
        assert {each["held"] for each in said} == {held(node.models[version])}
        decodes = [each["decodes"] for each in said]
        assert sorted(decodes) == [0] * (len(ranks) - 1) + [len(node.models[0])]
        step(ranks)


def step(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.process.send_signal(signal.SIGUSR1)


def held(tensors: dict[str, TensorBits]) -> str:
    found = blake3.blake3()
    for name in sorted(tensors):
        found.update(tensors[name].bits.tobytes())
    return found.hexdigest()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(tmp_path, stack)


@pytest.mark.parametrize("size", [2, 4])
def test_an_update_is_decoded_once_and_all_ranks_have_it_bit_for_bit(node: Node, size: int) -> None:
    all_follow(node, [node.start("engine") for _ in range(size)])


@pytest.mark.parametrize("size", [2, 4])
def test_when_the_rank_that_decodes_is_killed_nothing_activates_anywhere(
    node: Node, size: int
) -> None:
    leader = node.start("engine", hold_at=1)
    assert leader.leads
    others = [node.start("engine") for _ in range(size - 1)]
    assert not any(rank.leads for rank in others)
    assert "decoding" in leader.says()
    leader.process.send_signal(signal.SIGKILL)
    for rank in others:
        said = rank.says()
        assert (said["error"], said["version"]) == ("StoreError", 0)
        assert "has ended" in said["message"]
        assert rank.process.wait(30) == 0
    # The engine starts anew, and so do its ranks; what the dead ones left is gone.
    all_follow(node, [node.start("engine-2") for _ in range(size)])
    assert [path.name for path in node.ranks.iterdir()] == ["engine-2"]


def test_a_rank_that_only_follows_takes_nobody_with_it(node: Node) -> None:
    leader = node.start("engine", hold_at=1)
    assert leader.leads
    follower = node.start("engine")
    assert not follower.leads
    assert "decoding" in leader.says()
    follower.process.send_signal(signal.SIGKILL)
    follower.process.wait(30)
    assert leader.process.poll() is None
