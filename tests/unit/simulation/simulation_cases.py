"""A small cluster for tests of the simulator: seconds of it cost milliseconds."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from rose.simulation import (
    ClusterSpec,
    DedicatedReplicas,
    EngineFigures,
    EpisodeTurn,
    GuestSpec,
    HostPool,
    RolloutEpisode,
    Scenario,
    TrainerSpec,
    UserRequest,
)
from slo import SloSpec, StepProfile

# Slow steps, so that there are few of them.
STEPS = StepProfile(0.04, 1e-5, 0.0, 1e-8)
ENGINE = EngineFigures(
    "m", 1, STEPS, 60_000, 100_000, 10**9, max_sequences=16, max_step_tokens=1_024
)
GUEST = GuestSpec(ENGINE, kv_base_tokens=8_000, granule_tokens=512, token_budget=512)


@dataclass(frozen=True)
class Episodes:
    """Two turns each; the longer ones come in some groups."""

    scores: bool = False

    def trajectory(self, seed: int, prompt: int, sample: int) -> RolloutEpisode:
        rng = random.Random(f"{seed}/{prompt}/{sample}")
        first = EpisodeTurn(64, rng.randint(5, 20), 0.1)
        last = EpisodeTurn(16, rng.randint(5, 30) * (3 if prompt % 3 == 0 else 1))
        # Every other prompt teaches nothing.
        score = float(sample % 2) if prompt % 2 else 1.0
        return RolloutEpisode((first, last), 32, score)


@dataclass(frozen=True)
class Users:
    """Requests at a steady rate, a burst of them every so often."""

    rate: float = 1.0
    burst: int = 6

    def requests(self, seed: int) -> Iterator[UserRequest]:
        rng, at_s = random.Random(seed), 0.0
        while True:
            at_s += rng.expovariate(self.rate)
            count = self.burst if rng.random() < 0.1 else 1
            for _ in range(count):
                yield UserRequest(at_s, rng.randint(50, 800), rng.randint(2, 20))


@dataclass(frozen=True)
class Silence:
    """No request ever."""

    requests_made: tuple[UserRequest, ...] = field(default=())

    def requests(self, seed: int) -> Iterator[UserRequest]:
        return iter(self.requests_made)


def small(
    *,
    hosts: int = 2,
    replicas: int = 1,
    until_s: float = 60.0,
    users: Users | Silence = Users(),
    guest: GuestSpec | None = GUEST,
    steps: int = 2,
    **trainer: object,
) -> Scenario:
    """Two hosts with guests, a dedicated replica, and two steps of two groups of four."""
    pool = HostPool(hosts, ENGINE, SloSpec("m", 1.0, 0.2), guest) if hosts else None
    spec = {"groups": 2, "samples": 4, "train_s_per_token": 1e-4, "weight_bytes": 10**9}
    return Scenario(
        "small",
        ClusterSpec(DedicatedReplicas(replicas, ENGINE), 2, pool),
        TrainerSpec(**{**spec, "steps": steps, **trainer}),  # type: ignore[arg-type]
        Episodes(),
        users,
        until_s=until_s,
        assumptions=("it is small",),
    )
