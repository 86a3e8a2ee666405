"""A trainer publishes from plain code: versions follow each other, waits end, errors are a line."""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rose.client.errors import GatewayUnavailable
from rose.errors import NotAnnouncedError, RefusedError, UnavailableError
from rose.integrations import PolicyPublisher, TrainerSettings
from rose.integrations import policy_publisher as publisher
from rose.integrations.lora import LoraSettings, digest_of_base
from rose.integrations.ranks import everywhere
from rose.weight_distribution import Receipt
from tests.harness.policies import NORM, checkpoint, trainer_settings, weights
from weight_transfer import Adapter, SigningKey, TensorBits, WeightError, tensor_bits

torch = pytest.importorskip("torch")


@dataclass
class Begun:
    latest: int = 0
    resumed: int | None = None


@dataclass
class StandInWeightPublisher:
    """Stand-in for `WeightPublisher`; answers are those of the class."""

    begun: ClassVar[Begun] = Begun()
    held: ClassVar[Mapping[str, TensorBits]] = {}
    trouble: ClassVar[Exception | None] = None
    made: ClassVar[list["StandInWeightPublisher"]] = []
    calls: list[tuple[str, int]] = field(default_factory=list)
    parents: list[Mapping[str, TensorBits]] = field(default_factory=list)
    closed: bool = False
    announced: int = 0
    adapter: Adapter | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, job: str, *_: object, **options: object) -> None:
        self.calls, self.parents, self.closed, self.options = [], [], False, options
        self.adapter = None
        type(self).made.append(self)

    async def start(self) -> Begun:
        if self.trouble:
            raise self.trouble
        return self.begun

    async def restore(self) -> Mapping[str, TensorBits]:
        return self.held

    async def publish(
        self, version: int, parent: int, old: Mapping[str, TensorBits], new: object
    ) -> Receipt:
        assert version == parent + 1
        self.parents.append(old)
        return self._receipt("delta", version)

    async def publish_anew(self, version: int, new: object) -> Receipt:
        return self._receipt("anew", version)

    async def announce_late(self) -> None:
        self.announced += 1

    async def close(self) -> None:
        self.closed = True

    def _receipt(self, how: str, version: int) -> Receipt:
        if self.trouble:
            raise self.trouble
        self.calls.append((how, version))
        return Receipt(version, wire_bytes=10, full_bytes=100, density=0.1, publish_s=0.0)


@dataclass
class Row:
    version: int
    live: bool = True


class StandInClient:
    """A gateway that says which versions are served: `rows`, one list for each time it is asked."""

    rows: ClassVar[list[list[Row]]] = []
    down = False

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def __aenter__(self) -> "StandInClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def versions(self) -> "StandInClient":
        if self.down:
            raise GatewayUnavailable("no gateway answers")
        self.replicas = self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]
        return self

    def serving(self, version: int, job: str) -> int:
        assert job == "grpo"
        return sum(row.live and row.version >= version for row in self.replicas)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerSettings:
    monkeypatch.setattr(publisher, "WeightPublisher", StandInWeightPublisher)
    monkeypatch.setattr(publisher, "RolloutClient", StandInClient)
    monkeypatch.setattr(publisher, "read_model_dir", lambda _: checkpoint(weights()))
    monkeypatch.setattr(publisher, "LOOK_S", 0.001)
    monkeypatch.setattr(StandInClient, "rows", [[Row(99)]])
    monkeypatch.setattr(StandInWeightPublisher, "made", [])
    SigningKey.generate().save(tmp_path / "key")
    return trainer_settings(tmp_path, timeout_s=5.0)


@pytest.fixture
def policy(settings: TrainerSettings) -> Iterator[PolicyPublisher]:
    with PolicyPublisher(settings) as made:
        yield made


def test_versions_follow_the_checkpoint_one_by_one(policy: PolicyPublisher) -> None:
    assert policy.version == 0
    assert [policy.publish(weights(seed).items()) for seed in (1, 2)] == [1, 2]
    (made,) = StandInWeightPublisher.made
    assert made.calls == [("delta", 1), ("delta", 2)]
    assert [
        (old[NORM].bits == checkpoint(weights(k))[NORM].bits).all()
        for k, old in enumerate(made.parents)
    ] == [True, True]
    assert [each.version for each in policy.receipts] == [1, 2]
    assert policy.oldest_allowed == 1, "two versions, and one of them may be behind"


def test_adapters_begin_a_chain_and_new_settings_begin_another(settings: TrainerSettings) -> None:
    base = {"m.weight": tensor_bits("m.weight", torch.ones(6, 5))}
    tensors = [
        (f"base_model.model.m.lora_{letter}.weight", torch.rand(*shape))
        for letter, shape in (("A", (2, 5)), ("B", (6, 2)))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "read_model_dir", lambda _: base)
        with PolicyPublisher(settings) as policy:
            for alpha in (4.0, 4.0, 8.0, 8.0):
                policy.publish(tensors, lora=LoraSettings(2, alpha))
            (made,) = StandInWeightPublisher.made
            assert made.calls == [("anew", 1), ("delta", 2), ("anew", 3), ("delta", 4)]
            assert made.adapter == Adapter(digest_of_base(base), 2, 8.0)


def test_a_trainer_that_starts_again_goes_on_from_what_it_published(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInWeightPublisher, "begun", Begun(latest=7, resumed=7))
    monkeypatch.setattr(StandInWeightPublisher, "held", checkpoint(weights(seed=7)))
    with PolicyPublisher(settings) as policy:
        assert (policy.resumed, policy.version) == (True, 7)
        assert policy.restore() is StandInWeightPublisher.held
        assert policy.publish(weights(seed=8).items()) == 8
    assert (policy.resumed, policy.version) == (True, 8), "it is closed, and knows it still"
    (made,) = StandInWeightPublisher.made
    assert made.calls == [("delta", 8)]
    assert made.parents == [StandInWeightPublisher.held]
    assert made.closed


@pytest.mark.parametrize("resumed", [None, 7])
def test_a_run_that_cannot_go_on_from_its_root_replaces_the_jobs_versions_whole(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch, resumed: int | None
) -> None:
    async def torn(_: StandInWeightPublisher) -> None:
        raise WeightError("a chunk is gone")

    monkeypatch.setattr(StandInWeightPublisher, "begun", Begun(latest=7, resumed=resumed))
    monkeypatch.setattr(StandInWeightPublisher, "restore", torn)
    with PolicyPublisher(settings) as policy:
        assert not policy.resumed
        with pytest.raises(RefusedError, match="holds no version"):
            policy.restore()
        assert policy.oldest_allowed == 8, "versions before are of weights that nobody trains"
        assert [policy.publish(weights(seed).items()) for seed in (1, 2)] == [8, 9]
        assert policy.oldest_allowed == 8
    assert StandInWeightPublisher.made[0].calls == [("anew", 8), ("delta", 9)]


@pytest.mark.parametrize(
    ("trouble", "kind", "words", "next_version"),
    [
        (NotAnnouncedError("no scheduler answers"), NotAnnouncedError, "no scheduler", 2),
        (OSError(28, "No space left"), RefusedError, "version 1 is not published: .*No space", 1),
    ],
    ids=["not announced", "full disk"],
)
def test_after_a_failure_the_next_version_is_what_the_store_says(
    policy: PolicyPublisher,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Exception,
    kind: type[Exception],
    words: str,
    next_version: int,
) -> None:
    policy.start()
    monkeypatch.setattr(StandInWeightPublisher, "trouble", trouble)
    with pytest.raises(kind, match=words) as told:
        policy.publish(weights(seed=1).items())
    assert "\n" not in str(told.value)
    monkeypatch.setattr(StandInWeightPublisher, "trouble", None)
    assert policy.publish(weights(seed=2).items()) == next_version
    assert StandInWeightPublisher.made[0].calls == [("delta", next_version)]


def test_a_version_is_announced_before_anybody_waits_for_it(policy: PolicyPublisher) -> None:
    policy.start()
    policy.wait_served(1, 0)
    assert StandInWeightPublisher.made[0].announced == 1


def test_it_returns_once_enough_live_replicas_serve_the_version(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [[], [Row(1)], [Row(1), Row(1, live=False)], [Row(1), Row(0)], [Row(1), Row(2)]]
    monkeypatch.setattr(StandInClient, "rows", seen)
    with PolicyPublisher(replace(settings, replicas=2)) as policy:
        policy.publish(weights().items())
    assert seen == [[Row(1), Row(2)]]


@pytest.mark.parametrize(
    ("down", "words"),
    [(False, r"0 of 1 do \(1 replicas known\)"), (True, "the gateway does not answer")],
)
def test_a_version_that_nobody_serves_is_waited_for_so_long_and_said(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch, down: bool, words: str
) -> None:
    monkeypatch.setattr(StandInClient, "rows", [[Row(0)]])
    monkeypatch.setattr(StandInClient, "down", down)
    with PolicyPublisher(replace(settings, timeout_s=0.05)) as policy:
        with pytest.raises(UnavailableError, match=words) as told:
            policy.publish(weights().items())
        assert "\n" not in str(told.value)
        # The version is published: the next one follows it.
        monkeypatch.setattr(StandInClient, "rows", [[Row(9)]])
        monkeypatch.setattr(StandInClient, "down", False)
        assert policy.publish(weights(seed=1).items()) == 2


def test_nobody_is_waited_for_where_that_is_said(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInClient, "rows", [[]])
    with PolicyPublisher(settings) as policy:
        assert policy.publish(weights().items(), wait=False) == 1
    with PolicyPublisher(replace(settings, replicas=0)) as policy:
        assert policy.publish(weights().items()) == 1


def test_a_scheduler_that_is_away_leaves_nothing_running_and_may_be_tried_again(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicyPublisher(settings)
    monkeypatch.setattr(StandInWeightPublisher, "trouble", UnavailableError("no scheduler"))
    with pytest.raises(UnavailableError, match="no scheduler"):
        policy.start()
    assert [each.closed for each in StandInWeightPublisher.made] == [True]
    monkeypatch.setattr(StandInWeightPublisher, "trouble", None)
    with policy:
        assert policy.publish(weights().items()) == 1


def test_it_pickles_as_what_it_was_built_from(policy: PolicyPublisher) -> None:
    there: PolicyPublisher = pickle.loads(pickle.dumps(policy))
    assert there.settings == policy.settings
    assert there.receipts == []


class StandInGroup:
    """Two ranks; `said` is the result that the first one sends to the others, or its error."""

    def __init__(self, rank: int, *said: object) -> None:
        self.rank, self.said = rank, list(said)

    def broadcast_object_list(self, objects: list[object], src: int) -> None:
        assert src == 0
        if self.rank:
            objects[:] = self.said
        else:
            self.said = objects


def as_rank(monkeypatch: pytest.MonkeyPatch, group: StandInGroup) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: group.rank)
    monkeypatch.setattr(dist, "broadcast_object_list", group.broadcast_object_list)


def test_other_ranks_publish_nothing_and_learn_the_version_or_the_error(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, StandInGroup(1, (8, 7), None))
    with PolicyPublisher(settings) as policy:
        assert policy.publish(weights().items()) == 8
        assert policy.oldest_allowed == 7
    as_rank(monkeypatch, StandInGroup(1, None, "no space"))
    with PolicyPublisher(settings) as policy, pytest.raises(RefusedError, match="no space"):
        policy.publish(weights().items())
    assert StandInWeightPublisher.made == []


def test_the_first_rank_tells_the_others_unless_a_trainer_asks_only_it(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = StandInGroup(0)
    as_rank(monkeypatch, group)
    with PolicyPublisher(settings) as policy:
        assert policy.publish(weights().items(), collective=False) == 1
        assert group.said == []
        with pytest.raises(RefusedError):
            policy.publish([])
    assert "the trainer does not give" in str(group.said)


def test_a_rank_that_fails_for_whatever_reason_leaves_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed as dist

    gathered: list[object] = []

    def all_gather_object(every: list[object], own: object) -> None:
        gathered.append(own)
        every[:] = [own, None]

    def run_out() -> None:
        raise RuntimeError("out of memory")

    as_rank(monkeypatch, StandInGroup(0))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    with pytest.raises(RuntimeError, match="out of memory"):
        everywhere(run_out)
    assert gathered == ["out of memory"]
