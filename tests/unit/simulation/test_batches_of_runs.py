"""Many runs come back in their order, from Ray where it is there and processes otherwise."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from simulation_cases import small

from rose.errors import ConfigError
from rose.simulation.run import Run, carry_out, run_all


class StandinRay(ModuleType):
    """Ray as far as it is asked: tasks run when they are waited for."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.began: list[Any] = []
        self.ended = 0

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str | None, log_to_driver: bool) -> None:
        self.began.append(address)

    def remote(self, **_: int) -> Any:
        def task(call: Any) -> Any:
            remote = ModuleType("task")
            remote.remote = lambda *args: lambda: call(*args)  # type: ignore[attr-defined]
            return remote

        return task

    def get(self, waiting: Any) -> Any:
        return waiting()

    def shutdown(self) -> None:
        self.ended += 1


def asked() -> list[Run]:
    return [Run(small(steps=1), policy, 2) for policy in ("fixed", "rose")]


def test_ray_runs_them_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandinRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    results = list(run_all(asked(), ray_address="local"))
    assert results == [carry_out(each) for each in asked()]
    assert (ray.began, ray.ended) == ([None], 1)


def test_ray_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        list(run_all(asked(), ray_address="local"))


@pytest.mark.nightly
def test_processes_give_what_one_process_gives() -> None:
    assert list(run_all(asked(), workers=2)) == [carry_out(each) for each in asked()]
