"""A dedicated pool asks Ray for what it needs and gives it back; Ray stands in.

With the real one, where it is installed: tests/trainers/test_ray.py.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rose.errors import ConfigError, UnavailableError
from rose.integrations.ray_node import PoolNode
from rose.node.config import NodeConfig
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import Role

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


# ---- files of its nodes ----


HERE = ("10.0.0.7", 7_410)


def node(folder: Path, **more: Any) -> dict[str, Any]:
    return {**NODE, "run_dir": str(folder / "run"), "log_dir": str(folder / "log"), **more}


def replica(folder: Path) -> dict[str, Any]:
    return {"model_dir": str(folder)}


def told(each: PoolNode, proxied: tuple[str, int] | None = None) -> NodeConfig:
    return NodeConfig.model_validate_json(each.write(8_100, None, proxied).read_text())


def test_a_proxied_replica_is_offered_over_tls_by_its_own_certificate(tmp_path: Path) -> None:
    ca = DevelopmentCa.make(tmp_path / "ca", "c")
    own = {name: ca.issue(Role.NODE, name) for name in ("rose-0", "rose-1")}
    folder = own["rose-0"].certificate.parent
    assert folder == own["rose-1"].certificate.parent
    marked = {
        part: str(getattr(own["rose-0"], part)).replace("rose-0", "{node}")
        for part in ("certificate", "key")
    }
    config = node(tmp_path, certificates={"ca": str(ca.file), **marked})
    for name, files in own.items():
        each = PoolNode(name, config, replica(tmp_path), {})
        each.check()
        read = told(each, HERE)
        assert read.certificates.certificate == files.certificate
        assert read.certificates.key == files.key
        assert read.offered_url(read.dedicated[0]) == f"https://10.0.0.7:7410/{name}"


def test_without_a_proxy_turns_stay_on_their_machine_and_a_fenced_network_is_said(
    tmp_path: Path,
) -> None:
    read = told(PoolNode("rose-0", node(tmp_path), replica(tmp_path)))
    assert read.proxy is None
    assert read.offered_url(read.dedicated[0]) == "http://127.0.0.1:8100"
    read = told(PoolNode("rose-0", node(tmp_path), replica(tmp_path), {"insecure": True}), HERE)
    assert read.proxy is not None
    assert read.proxy.insecure


@pytest.mark.parametrize(
    ("given", "more", "proxy", "words"),
    [
        ({"proxy": {}}, {}, None, "the pool sets 'proxy' itself"),
        ({"node": "n"}, {}, None, "the pool sets 'node' itself"),
        ({}, {"port": 1}, None, "the pool sets 'port' itself"),
        ({}, {}, {"port": 1}, "the pool sets 'port' itself"),
        ({}, {"prot": 1}, None, "prot"),
        ({}, {}, {"insecur": True}, "proxy.insecur"),
        ({"unsigned": False}, {}, None, "verify_key is missing"),
    ],
)
def test_what_a_pool_cannot_use_is_refused_before_ray_is_asked(
    ray: StandInRayCluster,
    tmp_path: Path,
    given: dict[str, Any],
    more: dict[str, Any],
    proxy: dict[str, Any] | None,
    words: str,
) -> None:
    kinds = {"node": node(tmp_path, **given), "replica": replica(tmp_path) | more, "proxy": proxy}
    with pytest.raises(ConfigError, match=words):
        importlib.import_module(POOL).DedicatedPool(1, 0, **kinds)
    assert not ray.groups
