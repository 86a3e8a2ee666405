"""Both fidelities play the same scenarios: the fluid's throughput lies within 5% of the steps'."""

from dataclasses import replace

import pytest

from rose.simulation import (
    ClusterSpec,
    DedicatedPool,
    GuestSpec,
    HostPool,
    Run,
    Scenario,
    carry_out,
    published_engine,
)
from rose.simulation.fluid.run import run_fluid
from rose.simulation.setups import FROZEN_LAKE_8B
from rose.simulation.workloads.amounts import LogNormal
from rose.simulation.workloads.episodes import FROZEN_LAKE
from rose.simulation.workloads.traffic import AZURE_CODE_2023, BurstyTraffic
from slo import SloSpec

ENGINE = published_engine("8b")
GUEST = GuestSpec(replace(ENGINE, kv_tokens=200_000), kv_base_tokens=50_000, slack_share=0.5)
STEADY = BurstyTraffic(4.0, LogNormal(1_000, 0.5), LogNormal(100, 0.5))
TRAFFIC = {
    "idle hosts": None,
    "steady users": STEADY,
    "bursty users": replace(AZURE_CODE_2023, rate_per_s=5.14),
}


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TRAFFIC)
def test_the_fluid_agrees_with_the_steps_of_the_same_scenario(name: str) -> None:
    """Policy `paper` borrows all guests all the time, as the fluid does."""
    pool = HostPool(4, ENGINE, SloSpec("8b", 2.0, 0.1), GUEST)
    scenario = Scenario(
        name,
        ClusterSpec(DedicatedPool(2, ENGINE), 8, pool),
        replace(FROZEN_LAKE_8B.trainer(steps=2), groups=8),
        FROZEN_LAKE,
        TRAFFIC[name],
    )
    fluid, steps = run_fluid(scenario), carry_out(Run(scenario, "paper"))
    assert fluid.steps_per_hour == pytest.approx(steps.steps_per_hour, rel=0.05)
    assert fluid.tokens_per_s == pytest.approx(steps.tokens_per_s, rel=0.05)
    if TRAFFIC[name] is not None:
        assert fluid.users is not None
        assert steps.users is not None
        assert fluid.users.ttft_s.p90 == pytest.approx(steps.users.ttft_s.p90, rel=0.15)
