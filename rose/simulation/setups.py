"""Set-ups by name: the ROSE paper's two, with GRPO, DAPO and an asynchronous trainer; and a fleet.

| name | cards | batch |
| --- | --- | --- |
| frozen_lake-8b | 8 rollout, 8 training, up to 16 borrowed | 256 in groups of 16 |
| frozen_lake-8b-prompts | as above | 4,096: 256 groups of 16 |
| alfworld-32b | 16 rollout, 32 training, up to 64 borrowed | 1,024 in groups of 16 |

`-dapo`: over-sampled and filtered. `-async`: tokens may be one version behind. The paper (arXiv
2605.06534) gives models, cards, batches and groups; all other figures are in `assumptions`.
A batch counts episodes: so does `rollout_batch_size` of ROLL, the framework of the paper's authors,
which has to be a multiple of the group's size. In `-prompts` it counts prompts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rose.errors import ConfigError
from rose.simulation.engine_specs import EngineFigures, published_engine, source
from rose.simulation.fluid.fleet import Deployment, FleetJob, FleetSpec
from rose.simulation.fluid.hosts import HostPoolFluid, UserMix
from rose.simulation.scenario import (
    Algorithm,
    ClusterSpec,
    DedicatedReplicas,
    GuestSpec,
    HostPool,
    Scenario,
    TrainerSpec,
)
from rose.simulation.workloads.episodes import ALFWORLD, CODING_SESSIONS, FROZEN_LAKE, Environment
from rose.simulation.workloads.traffic import (
    AZURE_CODE_2023,
    AZURE_CONVERSATION_2023,
    CODE_DAY,
    CONVERSATION_DAY,
    DAY_S,
    HOUR_S,
    Bursts,
    BurstyTraffic,
)
from slo import SloSpec, preset

# Training time follows from arithmetic: operations per parameter and token, at a share of the
# cards' peak (Hopper's dense bf16) that trainers of such models report.
OPERATIONS = 6
PEAK_FLOPS_S = 989e12
TRAINING_MFU = 0.35
BF16_BYTES = 2

CARD = "h200"
# A guest's own share of the host's KV memory, so that it can hold a few turns at any time.
GUEST_BASE_SHARE = 0.05
GRANULE_BYTES = 128 << 20
REQUESTS_PER_HOST_S = 1.0
MOST_SEQUENCES = 128
GUEST_STEP_TOKENS = 1_024
SLACK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """RL job: its episodes, its model, its cards, and the batch of a step.

    borrowed_cards: the most that it borrows of the serving cluster.
    """

    name: str
    environment: Environment
    model: str
    slo: str
    parameters: float
    rollout_cards: int
    training_cards: int
    borrowed_cards: int
    batch: int
    group: int

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on figures of the job that were assumed and not measured."""
        return (
            *self.environment.assumptions,
            f"training: {OPERATIONS} operations per parameter and token at {TRAINING_MFU:.0%} of"
            f" {PEAK_FLOPS_S / 1e12:.0f} TFLOP/s a card",
        )

    def trainer(self, steps: int = 5, max_staleness: int = 0) -> TrainerSpec:
        """Return the job's GRPO trainer.

        max_staleness: versions that a token may be behind, 0 for a synchronous trainer.
        """
        per_token = OPERATIONS * self.parameters / (TRAINING_MFU * PEAK_FLOPS_S)
        return TrainerSpec(
            groups=self.batch // self.group,
            samples=self.group,
            train_s_per_token=per_token / self.training_cards,
            weight_bytes=math.ceil(self.parameters * BF16_BYTES),
            max_staleness=max_staleness,
            concurrency=2 * self.batch,
            steps=steps,
        )

    def scaled(self, scale: float) -> "TrainingJob":
        """Return the job with this share of its cards and batch.

        Raises ConfigError if a share of them is no whole number.
        """
        sizes = {
            "rollout_cards": self.rollout_cards * scale,
            "training_cards": self.training_cards * scale,
            "borrowed_cards": self.borrowed_cards * scale,
            "groups": self.batch * scale / self.group,
        }
        for name, size in sizes.items():
            if not (size >= 1 and size == int(size)):
                raise ConfigError(f"{self.name} at a scale of {scale:g}: {name} would be {size:g}")
        rollout, training, borrowed, groups = map(int, sizes.values())
        return replace(
            self,
            rollout_cards=rollout,
            training_cards=training,
            borrowed_cards=borrowed,
            batch=groups * self.group,
        )


FROZEN_LAKE_8B = TrainingJob(
    "frozen_lake-8b", FROZEN_LAKE, "qwen3-8b", "rose-7b", 8.2e9, 8, 8, 16, 256, 16
)
# A batch of 256 read as prompts, each with a group of episodes.
FROZEN_LAKE_8B_PROMPTS = replace(FROZEN_LAKE_8B, name="frozen_lake-8b-prompts", batch=256 * 16)
ALFWORLD_32B = TrainingJob(
    "alfworld-32b", ALFWORLD, "qwen3-32b", "rose-32b", 32.8e9, 16, 32, 64, 1_024, 16
)
# Job, algorithm and staleness of each set-up.
SETUPS: Mapping[str, tuple[TrainingJob, Algorithm, int]] = MappingProxyType(
    {
        f"{job.name}{suffix}": (job, algorithm, max_staleness)
        for job in (FROZEN_LAKE_8B, ALFWORLD_32B)
        for suffix, algorithm, max_staleness in (
            ("", Algorithm.GRPO, 0),
            ("-dapo", Algorithm.DAPO, 0),
            ("-async", Algorithm.GRPO, 1),
        )
    }
    | {FROZEN_LAKE_8B_PROMPTS.name: (FROZEN_LAKE_8B_PROMPTS, Algorithm.GRPO, 0)}
)


def setup_scenario(name: str, steps: int = 3, load: float = 1.0, scale: float = 1.0) -> Scenario:
    """Return the scenario of a set-up by name; its hosts serve the same model that the job trains.

    load: users' requests as a multiple of the usual ones. scale: share of all cards and of the
    batch, which leaves each card its share of the work, and a router fewer replicas to choose from.
    Raises ConfigError if a share of them is no whole number.
    """
    whole, algorithm, max_staleness = SETUPS[name]
    job = whole.scaled(scale)
    served = published_engine(job.model, CARD)
    rollout = replace(served, max_sequences=MOST_SEQUENCES)
    hosts = job.borrowed_cards // served.cards
    trainer = job.trainer(steps, max_staleness)
    if algorithm is Algorithm.DAPO:
        trainer = replace(trainer, algorithm=algorithm, over_sampling=0.5)
    rate = REQUESTS_PER_HOST_S * hosts * load
    return Scenario(
        name=name,
        cluster=ClusterSpec(
            DedicatedReplicas(job.rollout_cards // rollout.cards, rollout),
            job.training_cards,
            _shared_hosts(job, hosts, served, rollout),
        ),
        trainer=trainer,
        rollouts=job.environment,
        traffic=replace(AZURE_CODE_2023, rate_per_s=rate),
        until_s=7_200.0,
        assumptions=(
            f"batch: {job.batch} episodes in groups of {job.group}; {job.rollout_cards} rollout,"
            f" {job.training_cards} training, up to {job.borrowed_cards} borrowed cards",
            *job.assumptions,
            f"engines: {served.model} on {served.cards} {CARD} cards, step times of {source()}",
            f"users: Azure code trace of 2023, its lengths and bursts, {rate:g} requests/s for"
            f" {hosts} hosts that serve {served.model}",
            f"a guest has {GUEST_BASE_SHARE:.0%} of the host's KV memory of its own and borrows the"
            f" rest but 20%; slackShare {SLACK_SHARE:g}",
            "host and guest in a step at once: each at half its speed",
            "weights: 5% of a version's bytes are sent, 2.5 GB/s between clusters, 12.5 GB/s"
            " inside",
            "spot, serverless, rlboost: cards that Kubernetes' autoscaler frees (60% utilisation, 5"
            " minutes without need), an engine answers 60 s later; users get them back at once",
            "libra: all training cards roll out between training phases, 3 s to change sides",
        ),
    )


def _shared_hosts(
    job: TrainingJob, hosts: int, served: EngineFigures, rollout: EngineFigures
) -> HostPool:
    """Return the pool of hosts with guests; both models' weights and the guest's own KV are taken
    off the host's memory.
    """
    own_bytes = GUEST_BASE_SHARE * served.kv_bytes
    left_bytes = served.kv_bytes - rollout.weight_bytes - own_bytes
    host = replace(served, kv_tokens=int(left_bytes // served.kv_bytes_per_token))
    most_bytes = own_bytes + host.kv_bytes
    guest = GuestSpec(
        replace(
            rollout,
            kv_tokens=int(most_bytes // rollout.kv_bytes_per_token),
            max_step_tokens=GUEST_STEP_TOKENS,
        ),
        kv_base_tokens=int(own_bytes // rollout.kv_bytes_per_token),
        slack_share=SLACK_SHARE,
        granule_tokens=GRANULE_BYTES // rollout.kv_bytes_per_token,
        token_budget=GUEST_STEP_TOKENS,
    )
    return HostPool(hosts, host, preset(job.slo), guest)


# Mean load of a fleet's hosts as a share of what they could serve with full batches.
MEAN_LOAD = 0.22
# A service with many users is more even than the recorded hour of one.
CHAT = replace(AZURE_CONVERSATION_2023, day=CONVERSATION_DAY, bursts=Bursts(2.0, 0.2, 30.0))
CODE = replace(AZURE_CODE_2023, day=CODE_DAY, bursts=Bursts(4.0, 0.2, 12.0, 0.3))
# Prompts that verl's DAPO recipe generates beyond each prompt that it trains on: 1,536 for 512.
DAPO_OVER_SAMPLING = 2.0


def thousand_cards(days: float = 1.0) -> FleetSpec:
    """Return a fleet of 800 serving cards (70B, 32B and 8B) and 200 cards of seven jobs, from
    Monday 00:00 for so many days.
    """
    coding = replace(FROZEN_LAKE_8B, training_cards=24, batch=128, group=8).trainer()
    coding = replace(coding, algorithm=Algorithm.DAPO, over_sampling=DAPO_OVER_SAMPLING)
    return FleetSpec(
        (
            _deployment("chat-70b", "70b", 4, 100, CHAT),
            _deployment("code-32b", "32b", 2, 100, CODE),
            _deployment("chat-8b", "8b", 1, 200, CHAT),
        ),
        (
            *(_fleet_job(f"alfworld-{n}", ALFWORLD_32B, "32b", 2, 6.0 * n) for n in range(2)),
            *(_fleet_job(f"frozen-lake-{n}", FROZEN_LAKE_8B, "8b", 1, 3.0 * n) for n in range(4)),
            FleetJob("coding", "8b", 16, 1, 24, 32, coding, CODING_SESSIONS),
        ),
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
    capacity = HostPoolFluid(engine, hosts, mix).capacity_rps() * hosts
    traffic = replace(traffic, rate_per_s=MEAN_LOAD * capacity)
    return Deployment(name, hosts, engine, traffic, SloSpec(model, 2.0, 0.2))


def _fleet_job(name: str, job: TrainingJob, model: str, cards: int, start_h: float) -> FleetJob:
    return FleetJob(
        name, model, job.rollout_cards // cards, cards, job.training_cards, job.borrowed_cards,
        job.trainer(), job.environment, start_s=start_h * HOUR_S,
    )  # fmt: skip
