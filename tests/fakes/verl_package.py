"""Modules of verl and Ray as far as the plugin touches them, where neither is installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

# The plugin's own, which must not outlive what they were imported with.
PLUGIN = ("plugin", "replica", "weights")


class _Awaited:
    """Result of a remote call, which can be awaited."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __await__(self) -> Iterator[Any]:
        if hasattr(self._made, "__await__"):
            return self._made.__await__()
        return self._value().__await__()

    async def _value(self) -> Any:
        return self._made


class Handle:
    """An actor in this process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=lambda *given, **named: _Awaited(method(*given, **named)))


class StandInRay:
    """Named actors, all of them here."""

    def __init__(self) -> None:
        self.named: dict[str, Handle] = {}
        self.options: list[dict[str, Any]] = []

    def module(self) -> ModuleType:
        ray = ModuleType("ray")
        members: dict[str, Any] = {
            "remote": self._remote,
            "get_actor": self.named.__getitem__,
            "util": SimpleNamespace(list_named_actors=lambda: list(self.named)),
        }
        ray.__dict__.update(members)
        return ray

    def _remote(self, cls: type) -> Any:
        def options(**given: Any) -> Any:
            def remote(*arguments: Any) -> Handle:
                handle = Handle(cls(*arguments))
                self.options.append(given)
                self.named[given.get("name", cls.__name__)] = handle
                return handle

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)


class RolloutReplica:
    """Its constructor and its properties, as verl's replicas have them."""

    max_concurrency = 1_000

    def __init__(self, replica_rank: int, config: Any, model_config: Any) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.name_suffix = ""
        self.is_reward_model = self.is_teacher_model = False
        self.rollout_mode: Any = None


class BaseRollout:
    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh


@contextmanager
def installed() -> Iterator[tuple[StandInRay, SimpleNamespace]]:
    """Both packages can be imported within; (Ray, verl's registries by name)."""
    assert "verl" not in sys.modules
    ray = StandInRay()
    replicas: dict[str, Any] = {}
    engines: dict[str, Any] = {}
    rollouts: dict[tuple[str, str], str] = {}

    def keep_engine(name: str) -> Any:
        return lambda cls: engines.__setitem__(name, cls)

    modules = {
        "verl.workers.rollout.replica": {
            "RolloutMode": SimpleNamespace(HYBRID="hybrid", STANDALONE="standalone"),
            "RolloutReplica": RolloutReplica,
            "RolloutReplicaRegistry": SimpleNamespace(register=replicas.__setitem__),
            "TokenOutput": SimpleNamespace,
        },
        "verl.workers.rollout.base": {"BaseRollout": BaseRollout, "_ROLLOUT_REGISTRY": rollouts},
        "verl.workers.config": {"HFModelConfig": object, "RolloutConfig": object},
        "verl.checkpoint_engine.base": {
            "CheckpointEngine": object,
            "CheckpointEngineRegistry": SimpleNamespace(register=keep_engine),
        },
    }
    found: dict[str, ModuleType] = {"ray": ray.module()}
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = found.setdefault(path, ModuleType(path))
            if depth > 1:
                setattr(found[".".join(parts[: depth - 1])], parts[depth - 1], module)
        found[name].__dict__.update(members)
    # Other modules that are imported meanwhile stay: torch cannot be imported twice.
    sys.modules.update(found)
    try:
        yield ray, SimpleNamespace(replicas=replicas, rollouts=rollouts, engines=engines)
    finally:
        for name in (*found, *(f"rose.integrations.verl.{each}" for each in PLUGIN)):
            sys.modules.pop(name, None)
