"""One copy for the ranks of a node, in one process and in several, of which any may die."""

import json
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import blake3
import pytest
from msgspec import structs

from bench.weights.ranks import write_safetensors
from tests.harness.processes import Forked
from tests.unit.weight_transfer.weight_cases import assert_holds, chunks_of, model, next_model
from weight_transfer import (
    ChunkStore,
    DigestMismatchError,
    Receiver,
    SigningKey,
    StagedTensor,
    StagedUpdate,
    StoreError,
    TensorBits,
    VerifiedManifest,
    VersionPublisher,
    WrongBaseError,
)
from weight_transfer.apply.node_copy import SILENT_S, NodeCopy
from weight_transfer.apply.receiver import UpdatePlan
from weight_transfer.apply.shared_segment import Address, SharedSegment, elect
from weight_transfer.format.checkpoint import Checkpoint

KEY = SigningKey.from_hex("04" * 32)


class SleptClock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_sleep: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


class RankedNode:
    """Ranks of one node, all in this process."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, SleptClock()
        self.base = {n: t for n, t in model(1).items() if t.dtype == "bfloat16"}
        (root / "model").mkdir()
        write_safetensors(root / "model" / "model.safetensors", self.base.values())
        self.store = ChunkStore(root / "store")
        self.publisher = VersionPublisher(self.store, "job", "test", KEY, clock=lambda: 0.0)
        self.place = root / "ranks" / "engine"

    def pair(self) -> tuple["LocalRank", "LocalRank"]:
        """Publish version 1, of the weights `new`; return a leader and a follower."""
        self.new = next_model(self.base, 1, 0.3)
        self.publisher.publish(1, 0, self.base, self.new)
        return self.rank(), self.rank()

    def rank(self, place: Path | None = None) -> "LocalRank":
        checkpoint = Checkpoint.open(self.root / "model")
        copy = NodeCopy(checkpoint, place or self.place, self.clock, self.clock.sleep)
        return LocalRank(self, copy)


class LocalRank:
    def __init__(self, node: RankedNode, copy: NodeCopy) -> None:
        self._node, self.copy = node, copy
        self.receiver = Receiver.over(copy)

    def plan(self, *versions: int, base: int | None = None) -> UpdatePlan:
        found = [self._node.store.get_manifest(version) for version in versions]
        if base is not None:
            found.insert(0, self._node.store.get_manifest(base, base=True))
        return self.receiver.plan(
            [VerifiedManifest.check(each, KEY.verify_key) for each in found], 0.0
        )

    def decode(self, plan: UpdatePlan, attempt: str = "first") -> StagedUpdate:
        return self.copy.decode(plan, partial(self.decode_tensor, plan), attempt)

    def decode_tensor(self, plan: UpdatePlan, name: str) -> StagedTensor:
        return self.receiver.decode_tensor(
            plan, name, chunks_of(self._node.store, *plan.tensors[name])
        )


@pytest.fixture
def node(tmp_path: Path) -> RankedNode:
    return RankedNode(tmp_path)


def test_a_chain_and_a_base_arrive_on_all_ranks(node: RankedNode) -> None:
    models = [node.base]
    for version, density in enumerate((0.1, 0.0, 1.0), start=1):
        models.append(next_model(models[-1], version, density))
        node.publisher.publish(version, version - 1, models[-2], models[-1])
    joined = next_model(models[-1], 9, 1.0)
    node.publisher.publish_base(4, joined)
    ranks = [node.rank() for _ in range(3)]
    assert [rank.copy.leads for rank in ranks] == [True, False, False]
    for attempt, (versions, base, wanted) in enumerate(
        [((1,), None, models[1]), ((2, 3), None, models[3]), ((), 4, joined)]
    ):
        updates = [rank.decode(rank.plan(*versions, base=base), str(attempt)) for rank in ranks]
        for rank, update in zip(ranks, updates, strict=True):
            rank.receiver.commit(update)
            rank.receiver.commit(update)
            assert_holds(rank.receiver, wanted, update.version)


def test_a_rank_alone_needs_no_place(node: RankedNode) -> None:
    new = next_model(node.base, 1, 0.3)
    node.publisher.publish(1, 0, node.base, new)
    rank = LocalRank(node, NodeCopy(Checkpoint.open(node.root / "model")))
    rank.receiver.commit(rank.decode(rank.plan(1), ""))
    assert_holds(rank.receiver, new, 1)


def test_weights_that_no_version_changed_stay_in_the_checkpoints_files(node: RankedNode) -> None:
    name = "proj"
    new = node.base | {name: next_model(node.base, 1, 0.3)[name]}
    node.publisher.publish(1, 0, node.base, new)
    rank = node.rank()
    rank.receiver.commit(rank.decode(rank.plan(1)))
    assert_holds(rank.receiver, new, 1)
    shared = rank.copy._segment.data
    begin, end = shared.ctypes.data, shared.ctypes.data + shared.nbytes
    inside = {n for n, t in rank.copy.tensors.items() if begin <= t.bits.ctypes.data < end}
    assert inside == {name}


def test_the_leaders_failure_is_everybodys(node: RankedNode) -> None:
    leader, follower = node.pair()
    plan = leader.plan(1)

    def broken(name: str) -> StagedTensor:
        raise WrongBaseError(f"{name}: made for other weights")

    with pytest.raises(WrongBaseError):
        leader.copy.decode(plan, broken, "first")
    with pytest.raises(WrongBaseError, match="made for other weights"):
        follower.decode(plan, "first")
    leader.decode(plan, "second")
    update = follower.decode(follower.plan(1), "second")
    assert update.changed


def test_an_earlier_attempt_is_not_taken_for_this_one(node: RankedNode) -> None:
    leader, follower = node.pair()
    leader.decode(leader.plan(1), "first")
    with pytest.raises(StoreError, match="did not begin"):
        follower.decode(follower.plan(1), "second")
    assert node.clock.now_s > SILENT_S
    with pytest.raises(StoreError, match="name of each attempt"):
        follower.decode(follower.plan(1), "")


def test_a_leader_that_stands_still_is_not_waited_for(node: RankedNode) -> None:
    leader, follower = node.pair()
    plan = leader.plan(1)
    names = list(plan.tensors)

    def stands_still(name: str) -> StagedTensor:
        """At the second tensor the others give up; they had a minute for each."""
        if name == names[1]:
            with pytest.raises(StoreError, match="stood still for 60 s"):
                follower.decode(follower.plan(1), "first")
            raise StoreError("never mind")
        return leader.decode_tensor(plan, name)

    with pytest.raises(StoreError, match="never mind"):
        leader.copy.decode(plan, stands_still, "first")
    assert_holds(follower.receiver, node.base, 0)


def test_weights_that_are_damaged_on_the_way_activate_on_no_follower(node: RankedNode) -> None:
    leader, follower = node.pair()
    update = leader.decode(leader.plan(1))
    for values in (update.tensors[0].change.new, update.tensors[0].change.old):
        values[0] ^= 1
        with pytest.raises(DigestMismatchError):
            follower.decode(follower.plan(1))
        values[0] ^= 1
    indices = update.tensors[0].change.indices
    real, indices[-1] = int(indices[-1]), 1 << 40
    with pytest.raises(DigestMismatchError):
        follower.decode(follower.plan(1))
    indices[-1] = real
    assert follower.decode(follower.plan(1)).changed == update.changed


def test_a_leader_that_decoded_another_version_is_not_believed(node: RankedNode) -> None:
    """The same bytes on the wire and the same attempt, and the manifest says something else."""
    leader, follower = node.pair()
    leader.decode(leader.plan(1))
    plan = follower.plan(1)
    other = structs.replace(plan.tensors["proj"][-1], digest_after="0" * 16)
    wrong = replace(plan, tensors={**plan.tensors, "proj": (other,)})
    with pytest.raises(DigestMismatchError, match="not the published ones"):
        follower.decode(wrong)


def test_ranks_that_read_other_files_are_no_crew(node: RankedNode, tmp_path: Path) -> None:
    leader = node.rank()
    other = {n: t for n, t in next_model(node.base, 5).items() if n != "bias"}
    write_safetensors(tmp_path / "new", other.values())
    (tmp_path / "new").rename(tmp_path / "model" / "model.safetensors")
    with pytest.raises(StoreError, match="different checkpoints"):
        node.rank()
    assert_holds(leader.receiver, node.base, 0)


def test_a_follower_whose_version_is_another_is_told(node: RankedNode) -> None:
    models = [node.base, next_model(node.base, 1, 0.3)]
    models.append(next_model(models[1], 2, 0.3))
    node.publisher.publish(1, 0, *models[:2])
    node.publisher.publish(2, 1, *models[1:])
    leader, follower = node.rank(), node.rank()
    one = leader.decode(leader.plan(1))
    behind = follower.decode(follower.plan(1))
    leader.receiver.commit(one)
    leader.receiver.commit(leader.decode(leader.plan(2), "second"))
    with pytest.raises(WrongBaseError, match="at version 2, not at 1"):
        follower.receiver.commit(behind)


def test_a_follower_commits_once_the_leader_has(node: RankedNode) -> None:
    leader, follower = node.pair()
    update, own = leader.decode(leader.plan(1)), follower.decode(follower.plan(1))
    with pytest.raises(StoreError, match="stood still"):
        follower.receiver.commit(own)
    assert_holds(follower.receiver, node.base, 0)
    node.clock.on_sleep = lambda: leader.receiver.commit(update)
    follower.receiver.commit(own)
    assert_holds(follower.receiver, node.new, 1)


def test_a_rank_that_comes_when_versions_were_applied_is_refused(node: RankedNode) -> None:
    node.publisher.publish(1, 0, node.base, next_model(node.base, 1, 0.3))
    leader = node.rank()
    leader.receiver.commit(leader.decode(leader.plan(1)))
    with pytest.raises(StoreError, match="at version 1 already"):
        node.rank()


def record(node: RankedNode, name: str = "engine", **changes: Any) -> Path:
    """Write a place that names some segment of this process, its fields changed."""
    place = node.place.with_name(name)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.write_text(json.dumps(asdict(SharedSegment.make("gone", 4096).address) | changes))
    place.chmod(0o600)
    return place


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pid": "x"}', "{" * 900])
def test_a_torn_record_is_refused(node: RankedNode, text: str) -> None:
    record(node).write_text(text)
    with pytest.raises(StoreError, match="names no segment"):
        node.rank()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o711])
def test_a_record_and_a_folder_that_others_may_enter_are_refused(
    node: RankedNode, mode: int, tmp_path: Path
) -> None:
    node.place.parent.mkdir()
    node.place.parent.chmod(mode)
    with pytest.raises(StoreError, match="not this user's alone"):
        node.rank()
    node.place.parent.chmod(0o700)
    path = record(node)
    path.chmod(mode)
    with pytest.raises(StoreError, match="not this user's alone"):
        node.rank()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be read"):
        node.rank()


def test_what_dead_ranks_left_is_removed(node: RankedNode) -> None:
    left = record(node, pid=2**22 + 1)
    node.rank(node.place.with_name("next"))
    assert not left.exists()
    kept = record(node, "kept", namespace=1)
    node.rank(node.place.with_name("third"))
    assert kept.exists(), "of another container: nobody here knows whether it lives"


def test_only_the_sealed_memory_that_was_named_is_opened(tmp_path: Path) -> None:
    segment = SharedSegment.make("mine", 4096)
    assert SharedSegment.open(segment.address).data.size == 4096
    other = SharedSegment.make("other", 4096)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)

    def unsealed(descriptor: int) -> dict[str, int]:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, 4096)
        status = os.fstat(descriptor)
        return {"descriptor": descriptor, "device": status.st_dev, "inode": status.st_ino}

    for changes, words in (
        ({"namespace": 1}, "one namespace of process ids"),
        ({"descriptor": other.address.descriptor}, "not the segment"),
        ({"nbytes": 8192}, "not the segment"),
        (unsealed(file), r"no sealed memory|changed by others"),
        (unsealed(loose), "changed by others"),
    ):
        with pytest.raises(StoreError, match=words):
            SharedSegment.open(replace(segment.address, **changes))
    os.close(file)
    os.close(loose)
    segment.withdraw()
    with pytest.raises(StoreError):
        SharedSegment.open(segment.address)


def test_nobody_but_its_maker_writes_to_a_segment() -> None:
    segment = SharedSegment.make("mine", 4096)
    reader = SharedSegment.open(segment.address)
    segment.data[0] = 7
    assert reader.data[0] == 7
    reader.data[1] = 9
    assert segment.data[1] == 0, "a reader's changes are its own"
    again = os.open(segment.address.path, os.O_RDWR)
    for change in (mmap.mmap, os.ftruncate):
        with pytest.raises(OSError, match="not permitted"):
            change(again, 4095)
    with pytest.raises(OSError, match="not permitted"):
        os.write(again, b"x")
    assert os.fstat(again).st_mode & 0o777 == 0o600
    os.close(again)


def test_of_many_one_is_elected(tmp_path: Path) -> None:
    segments = [SharedSegment.make("one", 4096) for _ in range(3)]
    found = {elect(tmp_path / "ranks" / "engine", segment.address) for segment in segments}
    assert found == {segments[0].address}
    assert isinstance(found.pop(), Address)


PROGRAM = str(Path(__file__).with_name("node_rank_main.py"))
VERSIONS = 3


class VersionedNode(RankedNode):
    """A checkpoint with its versions, and the processes of ranks that read it."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        super().__init__(root)
        self._stack = stack
        self.ranks = root / "ranks"
        self.models = [self.base]
        for version in range(1, VERSIONS + 1):
            self.models.append(next_model(self.models[-1], version, 0.2))
            self.publisher.publish(version, version - 1, *self.models[-2:])

    def start(self, place: str, hold_at: int | None = None) -> "RankProcess":
        words = [str(self.root), str(self.ranks / place), str(VERSIONS)]
        words += [] if hold_at is None else [str(hold_at)]
        return RankProcess(self._stack.enter_context(Forked(PROGRAM, *words, stdout=True)))

    def decoding(self, size: int) -> tuple["RankProcess", list["RankProcess"]]:
        """Start so many ranks, of which the first leads and stops as it decodes; return both."""
        leader = self.start("engine", hold_at=1)
        assert leader.leads
        others = [self.start("engine") for _ in range(size - 1)]
        assert not any(rank.leads for rank in others)
        assert "decoding" in leader.says()
        return leader, others


class RankProcess:
    def __init__(self, process: Forked) -> None:
        self.process = process

    @cached_property
    def leads(self) -> bool:
        """Value of the first line that the rank prints, once it has read the checkpoint."""
        return bool(self.says()["leads"])

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))


def all_follow(node: VersionedNode, ranks: list[RankProcess]) -> None:
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


def step(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.process.send_signal(signal.SIGUSR1)


def held(tensors: dict[str, TensorBits]) -> str:
    found = blake3.blake3()
    for name in sorted(tensors):
        found.update(tensors[name].bits.tobytes())
    return found.hexdigest()


@pytest.fixture
def versioned(tmp_path: Path) -> Iterator[VersionedNode]:
    with ExitStack() as stack:
        yield VersionedNode(tmp_path, stack)


@pytest.mark.parametrize("size", [2, 4])
def test_an_update_is_decoded_once_and_all_ranks_have_it_bit_for_bit(
    versioned: VersionedNode, size: int
) -> None:
    all_follow(versioned, [versioned.start("engine") for _ in range(size)])


@pytest.mark.parametrize("size", [2, 4])
def test_when_the_rank_that_decodes_is_killed_nothing_activates_anywhere(
    versioned: VersionedNode, size: int
) -> None:
    leader, others = versioned.decoding(size)
    leader.process.send_signal(signal.SIGKILL)
    for rank in others:
        said = rank.says()
        assert (said["error"], said["version"]) == ("StoreError", 0)
        assert "has ended" in said["message"]
        assert rank.process.wait(30) == 0
    # The engine starts anew, and so do its ranks; what the dead ones left is gone.
    all_follow(versioned, [versioned.start("engine-2") for _ in range(size)])
    assert [path.name for path in versioned.ranks.iterdir()] == ["engine-2"]


def test_a_rank_that_only_follows_takes_nobody_with_it(versioned: VersionedNode) -> None:
    leader, (follower,) = versioned.decoding(2)
    follower.process.send_signal(signal.SIGKILL)
    follower.process.wait(30)
    assert leader.process.poll() is None
