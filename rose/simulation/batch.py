"""Many runs at once: on Ray where it is installed and asked for, else on processes of this machine.

Results come back in the order of what was asked, whoever was done first.
"""

import importlib.util
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rose.errors import ConfigError
from rose.simulation.results import RunResult
from rose.simulation.run import run
from rose.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Run:
    """One run that is asked for."""

    scenario: Scenario
    policy: str
    seed: int = 0
    options: Mapping[str, float] = field(default_factory=dict)


def carry_out(asked: Run) -> RunResult:
    """Run one."""
    return run(asked.scenario, asked.policy, asked.seed, asked.options)


def run_all(
    asked: Sequence[Run], workers: int | None = None, ray_address: str | None = None
) -> Iterator[RunResult]:
    """Run all, `workers` at once (None: as many as this machine has cores).

    ray_address: of a Ray cluster, or `local`; None for processes. Raises ConfigError where Ray is
    asked for and not installed.
    """
    if ray_address is not None:
        yield from _on_ray(asked, ray_address)
        return
    most = min(len(asked), workers or os.cpu_count() or 1)
    if most <= 1:
        yield from map(carry_out, asked)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(most, mp_context=context) as pool:
        yield from pool.map(carry_out, asked)


def _on_ray(asked: Sequence[Run], address: str) -> Iterator[RunResult]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed; leave out --ray, or install ray")
    ray: Any = importlib.import_module("ray")
    began = not ray.is_initialized()
    if began:
        ray.init(address=None if address == "local" else address, log_to_driver=False)
    try:
        task = ray.remote(num_cpus=1)(carry_out)
        waiting = [task.remote(each) for each in asked]
        for each in waiting:
            yield ray.get(each)
    finally:
        if began:
            ray.shutdown()
