"""A fleet of 1,000 cards: three serving deployments with daily shapes, and seven training jobs."""

from dataclasses import replace

from rose.simulation.calibration.published import published_engine
from rose.simulation.fluid.fleet import Deployment, FleetJob, FleetSpec
from rose.simulation.fluid.host_pool import HostPoolFluid, UserMix
from rose.simulation.workloads.serving import (
    AZURE_CODE_2023,
    AZURE_CONVERSATION_2023,
    CODE_DAY,
    CONVERSATION_DAY,
    DAY_S,
    HOUR_S,
    Bursts,
    BurstyTraffic,
)
from rose.simulation.workloads.sessions import CODING_SESSIONS
from rose.simulation.workloads.training_jobs import ALFWORLD_32B, FROZEN_LAKE_8B, TrainingJob
from slo import SloSpec

# Mean load as a share of what the hosts could serve with full batches.
MEAN_LOAD = 0.22
# A service with many users is more even than the recorded hour of one.
CHAT_BURSTS = Bursts(2.0, 0.2, 30.0)
CODE_BURSTS = Bursts(4.0, 0.2, 12.0, 0.3)


def thousand_cards(days: float = 1.0) -> FleetSpec:
    """800 serving cards (70B, 32B and 8B) and 200 cards of seven jobs, from Monday 00:00 on."""
    chat = replace(AZURE_CONVERSATION_2023, day=CONVERSATION_DAY, bursts=CHAT_BURSTS)
    code = replace(AZURE_CODE_2023, day=CODE_DAY, bursts=CODE_BURSTS)
    deployments = (
        _deployment("chat-70b", "70b", 4, 100, chat),
        _deployment("code-32b", "32b", 2, 100, code),
        _deployment("chat-8b", "8b", 1, 200, chat),
    )
    jobs = [
        *(_job(f"alfworld-{n}", ALFWORLD_32B, "32b", 2, start_h=6.0 * n) for n in range(2)),
        *(_job(f"frozen-lake-{n}", FROZEN_LAKE_8B, "8b", 1, start_h=3.0 * n) for n in range(4)),
        _coding_job(),
    ]
    return FleetSpec(
        deployments,
        tuple(jobs),
        days * DAY_S,
        assumptions=(
            f"users' mean load is {MEAN_LOAD:.0%} of what hosts serve with full batches; their day"
            " follows DynamoLLM's conversation and coding services, their bursts are milder than"
            " those of the recorded hour, since more users share a deployment",
            "hosts lend beside users (slackShare 0.5) without a limit on how busy they are: with"
            " the default maxHostBusy of 0.85 a host that decodes all the time lends nothing",
            "a job borrows from one deployment at a time, for one rollout phase",
            *ALFWORLD_32B.assumptions,
            *FROZEN_LAKE_8B.environment.assumptions,
            "coding job: sessions like 355 recorded ones of coding agents, pauses up to 300 s",
        ),
    )


def _deployment(
    name: str, model: str, cards: int, hosts: int, traffic: BurstyTraffic
) -> Deployment:
    engine = published_engine(model, cards=cards)
    mix = UserMix(traffic.prompt.mean, traffic.output.mean)
    capacity = HostPoolFluid(engine.spec(), engine.profile, hosts, mix).capacity_rps() * hosts
    traffic = replace(traffic, rate_per_s=MEAN_LOAD * capacity)
    return Deployment(name, hosts, engine, traffic, SloSpec(model, 2.0, 0.2))


def _job(name: str, job: TrainingJob, model: str, cards: int, start_h: float) -> FleetJob:
    return FleetJob(
        name, model, job.rollout_cards // cards, cards, job.training_cards, job.borrowed_cards,
        job.grpo(), job.environment, start_s=start_h * HOUR_S,
    )  # fmt: skip


def _coding_job() -> FleetJob:
    """DAPO on coding sessions: 16 rollout and 24 training cards, up to 32 borrowed ones."""
    sized = replace(FROZEN_LAKE_8B, name="coding", training_cards=24, batch=128, group=8)
    return FleetJob("coding", "8b", 16, 1, 24, 32, sized.dapo(), CODING_SESSIONS)
