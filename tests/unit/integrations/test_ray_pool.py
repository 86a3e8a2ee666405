"""A dedicated pool asks Ray for what it needs and gives it back; Ray stands in.

With the real one, where it is installed: tests/trainers/test_ray.py.
"""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rose.errors import ConfigError, UnavailableError

NODE = {"scheduler": "127.0.0.1:9", "run_dir": "run", "log_dir": "log", "unsigned": True}
REPLICA = {"model_dir": "models/policy"}
POOL = "rose.integrations.ray"


class ActorDiedError(Exception):
    """Error of Ray's, for an actor that is restarted no more."""


class StandInActor:
    """Notes what becomes of it; every call is answered at once."""

    def __init__(self, node: Any) -> None:
        self.node, self.dead, self.killed = node, False, False
        self.drained_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: (self, name, given))

    def answer(self, name: str, given: tuple[Any, ...]) -> Any:
        if self.dead:
            raise ActorDiedError
        if name == "drain":
            (self.drained_s,) = given
        return {"node": self.node.name} if name == "place" else True


class StandInRayCluster:
    """Room for so many replicas, in groups that are noted."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.actors: list[StandInActor] = []
        self.options: list[dict[str, Any]] = []
        self.groups: list[SimpleNamespace] = []

    def group(self, bundles: list[dict[str, float]], strategy: str) -> SimpleNamespace:
        fits = sum(each.bundle_count for each in self.groups) + len(bundles) <= self.room
        made = SimpleNamespace(
            id=object(), bundle_count=len(bundles), strategy=strategy, wait=lambda _: fits
        )
        self.groups.append(made)
        return made

    def modules(self) -> Iterator[ModuleType]:
        def options(**given: Any) -> SimpleNamespace:
            self.options.append(given)

            def remote(node: Any, gpus: int) -> StandInActor:
                self.actors.append(StandInActor(node))
                return self.actors[-1]

            return SimpleNamespace(remote=remote)

        errors = {
            name: type(name, (Exception,), {})
            for name in ("ActorUnavailableError", "GetTimeoutError")
        }
        exceptions = SimpleNamespace(RayActorError=ActorDiedError, **errors)
        yield _module(
            "ray",
            remote=lambda cls: SimpleNamespace(options=options),
            get=lambda asked, timeout: asked[0].answer(*asked[1:]),
            kill=lambda actor: setattr(actor, "killed", True),
            available_resources=lambda: {"CPU": 0.0},
            exceptions=exceptions,
            ObjectRef=object,
        )
        yield _module("ray.util")
        yield _module(
            "ray.util.placement_group",
            placement_group=self.group,
            remove_placement_group=self.groups.remove,
        )
        yield _module(
            "ray.util.scheduling_strategies",
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                group,
                placement_group_bundle_index,
            ),
        )


def _module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    return made


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInRayCluster]:
    standin = StandInRayCluster(room=4)
    for module in standin.modules():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # Modules imported with the stand-in must not outlive it.
    monkeypatch.delitem(sys.modules, POOL, raising=False)
    yield standin
    sys.modules.pop(POOL, None)


@pytest.fixture
def pool(ray: StandInRayCluster) -> Any:
    return importlib.import_module(POOL).DedicatedPool(3, 0, node=NODE, replica=REPLICA)


def test_each_replica_has_an_actor_in_a_group_of_its_own(ray: StandInRayCluster, pool: Any) -> None:
    assert [each["node"] for each in pool.places()] == ["rose-0", "rose-1", "rose-2"]
    assert [group.strategy for group in ray.groups] == ["PACK"] * 3
    given = [each["scheduling_strategy"] for each in ray.options]
    assert given == [(group, 0) for group in ray.groups]


def test_the_newest_are_drained_first_and_their_names_are_taken_again(
    ray: StandInRayCluster, pool: Any
) -> None:
    first, *rest = ray.actors
    pool.scale(1)
    assert (first.drained_s, first.killed) == (None, False)
    assert all(each.killed and each.drained_s == 300.0 for each in rest)
    assert len(ray.groups) == 1
    pool.scale(2)
    assert [each["node"] for each in pool.places()] == ["rose-0", "rose-1"]
    pool.drain()
    assert (len(pool), ray.groups) == (0, [])


def test_where_ray_has_no_room_nothing_changes(ray: StandInRayCluster, pool: Any) -> None:
    with pytest.raises(UnavailableError, match="no room for 2 times"):
        pool.scale(5)
    assert len(pool) == len(ray.groups) == 3


def test_an_actor_that_ray_restarts_no_more_is_replaced(ray: StandInRayCluster, pool: Any) -> None:
    ray.actors[1].dead = True
    pool.scale(3)
    assert [each["node"] for each in pool.places()] == ["rose-0", "rose-2", "rose-1"]
    assert len(ray.groups) == 3


@pytest.mark.parametrize(
    ("node", "replica", "why"),
    [
        (NODE, {**REPLICA, "prot": 1}, "prot"),
        ({**NODE, "node": "n"}, REPLICA, "'node'"),
        (NODE, {**REPLICA, "port": 1}, "'port'"),
        ({**NODE, "unsigned": False}, REPLICA, "verify_key is missing"),
    ],
)
def test_what_no_node_would_take_is_refused_before_ray_is_asked(
    ray: StandInRayCluster, node: dict[str, Any], replica: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        importlib.import_module(POOL).DedicatedPool(1, 0, node=node, replica=replica)
    assert not ray.groups
