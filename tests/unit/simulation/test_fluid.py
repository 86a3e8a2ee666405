"""The fluid model conserves work, behaves at its limits, and answers what-if questions."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import pytest

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.cli.main import main
from rose.errors import ConfigError
from rose.simulation import (
    ClusterSpec,
    DedicatedReplicas,
    EngineFigures,
    EpisodeTurn,
    GuestSpec,
    HostPool,
    RolloutEpisode,
    Scenario,
    SimulatedRun,
    TrainerSpec,
    UserRequest,
    carry_out,
    published_engine,
)
from rose.simulation.fluid.fleet import Deployment, FleetJob, FleetSpec, run_fleet
from rose.simulation.fluid.hosts import (
    HostPoolFluid,
    UserMix,
    busy_share,
)
from rose.simulation.fluid.rollout import EpisodeBatch, FluidPool, RolloutPhase, roll_out
from rose.simulation.fluid.run import run_fluid
from rose.simulation.fluid.what_if import WhatIfQuestion, what_if
from rose.simulation.setups import ALFWORLD_32B, FROZEN_LAKE_8B, thousand_cards
from rose.simulation.workloads.amounts import LogNormal
from rose.simulation.workloads.episodes import ALFWORLD, FROZEN_LAKE
from rose.simulation.workloads.traffic import AZURE_CODE_2023, CONVERSATION_DAY, BurstyTraffic
from slo import SloSpec, StepProfile

PROFILE = StepProfile(0.005, 2e-5, 0.0, 3e-8)
ENGINE = EngineFigures("m", 1, PROFILE, 200_000, 100_000, 16_000_000_000)
SLO = SloSpec("m", 2.0, 0.1)
POOL = HostPool(2, ENGINE, SLO, GuestSpec(ENGINE, 50_000, slack_share=0.5))
SIMPLE = RolloutEpisode((EpisodeTurn(100, 1_000),))


def scenario(**changed: object) -> Scenario:
    cluster = ClusterSpec(DedicatedReplicas(2, ENGINE), 8, POOL)
    trainer = TrainerSpec(4, 8, 1e-5, 16_000_000_000, steps=3)
    usual = Scenario("small", cluster, trainer, FROZEN_LAKE, AZURE_CODE_2023, until_s=3_600)
    return replace(usual, **changed)  # type: ignore[arg-type] # names are checked there


def batch_of(count: int, episode: RolloutEpisode = SIMPLE) -> EpisodeBatch:
    return EpisodeBatch.of([episode] * count)


def test_an_episode_alone_takes_its_steps_and_its_environment() -> None:
    waits = RolloutEpisode((EpisodeTurn(100, 500, 3.0), EpisodeTurn(1, 500)))
    own = FluidPool(1, ENGINE)
    phase = roll_out(batch_of(1, waits), own, None, lambda *_: 0.0, 64, 1.0)
    context = 100 + 500
    step_s = 0.005 + 2e-5 * (1 + 101 / 1_000) + 3e-8 * context
    assert phase.seconds == pytest.approx(1_000 * step_s + 3.0, rel=0.01)


def rolled(own: int, guests: int = 0, share: float = 0.0) -> RolloutPhase:
    lent = FluidPool(guests, ENGINE) if guests else None
    return roll_out(batch_of(64), FluidPool(own, ENGINE), lent, lambda *_: share, 64, 1.0)


def test_more_engines_are_faster_until_each_episode_has_one_and_guests_count_by_their_share() -> (
    None
):
    times = [rolled(count).seconds for count in (1, 2, 8, 64, 256)]
    assert times[0] > times[1] > times[2] > times[3]
    assert times[3] == pytest.approx(times[4])
    whole, none = rolled(2, 2, 1.0), rolled(2, 2, 0.0)
    assert whole.borrowed_tokens == pytest.approx(whole.output_tokens / 2, rel=0.01)
    assert none.borrowed_tokens == 0
    assert whole.seconds < none.seconds


def test_guests_alone_wait_for_cards_that_nobody_has() -> None:
    """A share of nothing does not divide by zero: time passes."""
    guests = FluidPool(1, ENGINE)
    phase = roll_out(
        batch_of(1), FluidPool(0, ENGINE), guests,
        lambda now_s, load: float(now_s >= 5.0), 8, 1.0,
    )  # fmt: skip
    assert 5.0 < phase.seconds < 15.0
    with pytest.raises(ValueError, match="no engine"):
        roll_out(batch_of(1), FluidPool(0, ENGINE), None, lambda *_: 0.0, 8, 1.0)


def test_hosts_are_busy_as_a_queue_of_requests_served_side_by_side_says() -> None:
    fluid = HostPoolFluid(ENGINE, 1, UserMix(1_000, 100))
    assert fluid.advance(0.0, 10.0) == 0.0
    for _ in range(200):
        busy = fluid.advance(0.5, 1.0)
    stay_s = fluid.stay_s(0.5, fluid.in_host)
    # One host: it is idle while nobody is there.
    assert busy == pytest.approx(1 - math.exp(-0.5 * stay_s), rel=1e-3)
    assert fluid.queued == 0


def test_hosts_that_are_asked_for_too_much_queue_and_work_it_off() -> None:
    fluid = HostPoolFluid(ENGINE, 1, UserMix(1_000, 100))
    most = fluid.capacity_rps()
    for _ in range(30):
        busy = fluid.advance(2 * most, 1.0)
    assert busy > 0.99
    assert fluid.queued == pytest.approx(30 * most, rel=0.1)
    for _ in range(60):
        fluid.advance(0.0, 1.0)
    assert fluid.queued == 0


def test_a_run_is_the_same_for_a_seed_and_has_no_figure_that_is_not_finite() -> None:
    first, again, other = (run_fluid(scenario(), seed) for seed in (0, 0, 1))
    assert first == again != other
    assert json.loads(first.to_json())["fidelity"] == "fluid"
    for step in first.steps:
        assert step.ended_s - step.started_s == pytest.approx(
            step.rollout_s + step.train_s + step.sync_s
        )
    assert first.users is not None
    assert first.users.requests > 100


def test_borrowing_shortens_rollouts_and_a_stale_trainer_waits_less() -> None:
    alone = run_fluid(scenario(), borrows=False)
    borrowing = run_fluid(scenario())
    assert borrowing.steps_per_hour > alone.steps_per_hour
    assert alone.borrowed_gpu_hours == 0 < borrowing.borrowed_gpu_hours
    stale = run_fluid(scenario(trainer=replace(scenario().trainer, max_staleness=1)))
    assert stale.steps_per_hour > borrowing.steps_per_hour


@dataclass(frozen=True)
class SteadyUsers:
    """Steady users for a while."""

    rate_per_s: float
    seconds: float = 400.0

    def requests(self, seed: int) -> Iterator[UserRequest]:
        traffic = BurstyTraffic(self.rate_per_s, LogNormal(1_000, 0.5), LogNormal(100, 0.5))
        return takewhile(lambda each: each.arrival_s <= self.seconds, traffic.requests(seed))


QUESTION = WhatIfQuestion(16, "70b", SloSpec("70b", 2.0, 0.2))


def test_the_busier_the_users_the_less_is_lent() -> None:
    answers = [what_if(QUESTION, SteadyUsers(rate)) for rate in (1.0, 4.0, 12.0)]
    assert answers[0].lent > answers[1].lent > answers[2].lent
    harvested = [each.harvested_tokens_a_day for each in answers]
    assert harvested == sorted(harvested, reverse=True)
    for answer in answers:
        assert answer.busy + answer.lent == pytest.approx(1.0, abs=0.02)
        assert abs(answer.lost_points) <= 0.1
        json.dumps(answer.plain(), allow_nan=False)


def test_slack_that_is_lent_costs_users_time_and_hosts_that_are_too_busy_are_left_alone() -> None:
    users = SteadyUsers(8.0)
    idle = what_if(QUESTION, users)
    slack = what_if(replace(QUESTION, slack_share=0.7), users)
    held = what_if(replace(QUESTION, hold=MaxHostBusy(share=0.3, resume=0.2)), users)
    assert slack.lent > idle.lent > held.lent
    assert slack.lending.tpot_s.p99 > idle.lending.tpot_s.p99 == idle.alone.tpot_s.p99
    assert held.held > 0.9


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpus": 3}, "gpus is 3; one engine of llama-3.1-70b has 4"),
        ({"gpus": 0}, "gpus is 0"),
        ({"slack_share": 2.0}, "slack_share is 2"),
        ({"card": "h100", "guest": "70b"}, "guest llama-3.1-70b: its weights do not fit"),
        ({"model": "7b"}, "model 7b"),
        ({"context": 10**8}, "context is 100000000; a guest has KV memory for"),
    ],
)
def test_impossible_questions_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        what_if(replace(QUESTION, **changed), SteadyUsers(1.0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the trace lasts"):
        what_if(QUESTION, SteadyUsers(1.0, 20.0))


def test_an_operator_asks_with_a_trace_and_reads_what_was_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"2026-01-01 00:{n // 60:02}:{n % 60:02},900,40\n" for n in range(600))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    asked = ["sim", "what-if", "--trace", str(path), "--gpus", "8", "--model", "70b"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    for part in ("harvested", "GPU-hours saved", "TTFT p99", "ASSUMED", "slackShare 0"):
        assert part in said
    assert main([*asked, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 600
    path.write_text(path.read_text() + "2026-01-01 00:00:00,1,1\n")
    assert main(asked) == 2
    assert f"{path}:602: TIMESTAMP" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", [1, 39, 40, 400])
def test_even_spread_keeps_as_many_hosts_busy_as_there_are_requests(hosts: int) -> None:
    assert busy_share(0.0, hosts) == 0.0
    shares = [busy_share(0.1 * n, hosts) for n in range(30)]
    assert shares == sorted(shares)
    assert all(share <= min(1.0, 0.1 * n) + 1e-9 for n, share in enumerate(shares))
    assert busy_share(5.0, hosts) > 0.99
    if hosts > 100:
        assert busy_share(0.5, hosts) == pytest.approx(0.5, abs=0.001)


TRAFFIC = BurstyTraffic(10.0, LogNormal(1_000, 0.5), LogNormal(60, 0.5), day=CONVERSATION_DAY)
SERVES = Deployment("chat", 8, published_engine("70b"), TRAFFIC, SloSpec("70b", 2.0, 0.2))
TRAINS = FleetJob(
    "train", "32b", 2, 2, 8, 16, replace(ALFWORLD_32B.trainer(), groups=4), ALFWORLD
)  # fmt: skip
FLEET = FleetSpec((SERVES,), (TRAINS, replace(TRAINS, name="other", start_s=900.0)), 3_600.0)


def test_a_fleet_is_the_same_for_a_seed_and_borrowing_helps_its_jobs() -> None:
    alone, borrowing = run_fleet(FLEET, borrows=False), run_fleet(FLEET)
    assert borrowing == run_fleet(FLEET)
    assert json.loads(json.dumps(borrowing.plain(), allow_nan=False))["cards"] == 56
    assert alone.borrowed_gpu_hours == 0 < borrowing.borrowed_gpu_hours
    for before, after in zip(alone.jobs, borrowing.jobs, strict=True):
        assert after.tokens_per_s > before.tokens_per_s
    assert alone.gpu_use < borrowing.gpu_use <= 1
    for hour in borrowing.series:
        assert 0 <= hour.borrowed <= hour.lendable + 1e-9
    assert thousand_cards(7.0).cards == 1_000


def test_nothing_is_borrowed_where_the_operator_or_the_memory_says_no() -> None:
    shy = replace(SERVES, hold=MaxHostBusy(share=0.05, resume=0.04), slack_share=0.0)
    assert run_fleet(replace(FLEET, deployments=(shy,))).borrowed_gpu_hours == 0
    small = replace(SERVES, engine=published_engine("8b"))
    assert run_fleet(replace(FLEET, deployments=(small,))).borrowed_gpu_hours == 0


def test_a_night_lends_more_than_an_afternoon() -> None:
    idle_only = replace(SERVES, slack_share=0.0)
    night, afternoon = (idle_only.lendable(hour * 3_600.0) for hour in (3, 14))
    assert night[0] < afternoon[0]
    assert night[1] > afternoon[1]


PUBLISHED = published_engine("8b")
PUBLISHED_GUEST = GuestSpec(
    replace(PUBLISHED, kv_tokens=200_000), kv_base_tokens=50_000, slack_share=0.5
)
STEADY = BurstyTraffic(4.0, LogNormal(1_000, 0.5), LogNormal(100, 0.5))
LOADS = {
    "idle hosts": None,
    "steady users": STEADY,
    "bursty users": replace(AZURE_CODE_2023, rate_per_s=5.14),
}


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOADS)
def test_the_fluid_agrees_with_the_steps_of_the_same_scenario(name: str) -> None:
    """Policy `paper` borrows all guests all the time, as the fluid does."""
    pool = HostPool(4, PUBLISHED, SloSpec("8b", 2.0, 0.1), PUBLISHED_GUEST)
    scenario = Scenario(
        name,
        ClusterSpec(DedicatedReplicas(2, PUBLISHED), 8, pool),
        replace(FROZEN_LAKE_8B.trainer(steps=2), groups=8),
        FROZEN_LAKE,
        LOADS[name],
    )
    fluid, steps = run_fluid(scenario), carry_out(SimulatedRun(scenario, "paper"))
    assert fluid.steps_per_hour == pytest.approx(steps.steps_per_hour, rel=0.05)
    assert fluid.tokens_per_s == pytest.approx(steps.tokens_per_s, rel=0.05)
    if LOADS[name] is not None:
        assert fluid.users is not None
        assert steps.users is not None
        assert fluid.users.ttft_s.p90 == pytest.approx(steps.users.ttft_s.p90, rel=0.15)
