"""Set-ups by name: the ROSE paper's two, with GRPO, DAPO and an asynchronous trainer.

| name | cards | batch |
| --- | --- | --- |
| frozen_lake-8b | 8 rollout, 8 training, up to 16 borrowed | 256 in groups of 16 |
| alfworld-32b | 16 rollout, 32 training, up to 64 borrowed | 1,024 in groups of 16 |

`-dapo`: over-sampled and filtered. `-async`: tokens may be one version behind. The paper (arXiv
2605.06534) says models, cards, batches and groups; whatever else stands here is in `assumptions`.
A batch counts episodes: so does `rollout_batch_size` of ROLL, the framework of the paper's authors,
which has to be a multiple of the group's size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rose.errors import ConfigError
from rose.simulation.calibration import PublishedEngine, published_engine
from rose.simulation.calibration.published import source
from rose.simulation.cluster import ClusterSpec, DedicatedPool, EngineSpec, GuestSpec, HostPool
from rose.simulation.scenario import Scenario
from rose.simulation.workloads import (
    ALFWORLD_32B,
    AZURE_CODE_2023,
    FROZEN_LAKE_8B,
    BurstyTraffic,
    TrainingJob,
)
from slo import preset

CARD = "h200"
# A guest's own share of the host's KV memory, so that it can hold a few turns at any time.
GUEST_BASE_SHARE = 0.05
GRANULE_BYTES = 128 << 20
REQUESTS_PER_HOST_S = 1.0
MOST_SEQUENCES = 128
GUEST_STEP_TOKENS = 1_024
SLACK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Setup:
    """One set-up: job, algorithm and the model that its serving cluster serves."""

    job: TrainingJob
    rollout_model: str
    served_model: str
    slo: str
    algorithm: str = "grpo"
    max_staleness: int = 0
    traffic: BurstyTraffic = AZURE_CODE_2023


_FROZEN_LAKE = Setup(FROZEN_LAKE_8B, "qwen3-8b", "qwen3-8b", "rose-7b")
_ALFWORLD = Setup(ALFWORLD_32B, "qwen3-32b", "qwen3-32b", "rose-32b")
SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        f"{setup.job.name}{suffix}": replace(setup, algorithm=algorithm, max_staleness=stale)
        for setup in (_FROZEN_LAKE, _ALFWORLD)
        for suffix, algorithm, stale in (
            ("", "grpo", 0),
            ("-dapo", "dapo", 0),
            ("-async", "grpo", 1),
        )
    }
)


def setup_scenario(setup: Setup, steps: int = 3, load: float = 1.0, scale: float = 1.0) -> Scenario:
    """The scenario of a set-up.

    load: requests of users as a multiple of the usual ones. scale: of all cards and of the batch,
    which leaves each card its share of the work, and a router fewer replicas to choose from. Raises
    ConfigError where a share of them is no whole number.
    """
    job = _scaled(setup.job, scale)
    rollout = published_engine(setup.rollout_model, CARD)
    served = published_engine(setup.served_model, CARD, cards=rollout.cards)
    engine = replace(rollout.spec(), max_sequences=MOST_SEQUENCES)
    hosts = job.borrowed_cards // served.cards
    pool = HostPool(
        hosts, _beside(served, rollout), preset(setup.slo), _guest(served, rollout, engine)
    )
    trainer = job.grpo(steps, setup.max_staleness)
    if setup.algorithm == "dapo":
        trainer = replace(job.dapo(steps, setup.max_staleness), over_sampling=0.5)
    suffix = "" if setup.algorithm == "grpo" else f"-{setup.algorithm}"
    suffix = "-async" if setup.max_staleness else suffix
    rate = REQUESTS_PER_HOST_S * hosts * load
    return Scenario(
        name=f"{job.name}{suffix}",
        cluster=ClusterSpec(
            DedicatedPool(job.rollout_cards // rollout.cards, engine), job.training_cards, pool
        ),
        trainer=trainer,
        rollouts=job.environment,
        traffic=replace(setup.traffic, rate_per_s=rate),
        until_s=7_200.0,
        assumptions=(
            f"batch: {job.batch} episodes in groups of {job.group}; {job.rollout_cards} rollout,"
            f" {job.training_cards} training, up to {job.borrowed_cards} borrowed cards",
            *job.assumptions,
            *_assumptions(setup, rollout, hosts, rate),
        ),
    )


def _scaled(job: TrainingJob, scale: float) -> TrainingJob:
    sizes = {
        "rollout_cards": job.rollout_cards * scale,
        "training_cards": job.training_cards * scale,
        "borrowed_cards": job.borrowed_cards * scale,
        "groups": job.batch * scale / job.group,
    }
    for name, size in sizes.items():
        if not (size >= 1 and size == int(size)):
            raise ConfigError(f"{job.name} at a scale of {scale:g}: {name} would be {size:g}")
    rollout, training, borrowed, groups = map(int, sizes.values())
    return replace(
        job,
        rollout_cards=rollout,
        training_cards=training,
        borrowed_cards=borrowed,
        batch=groups * job.group,
    )


def _beside(served: PublishedEngine, guest: PublishedEngine) -> EngineSpec:
    """The host, less the memory that the guest's weights and its own KV take for good."""
    host = served.spec()
    own_bytes = GUEST_BASE_SHARE * served.kv_tokens * served.kv_bytes_per_token
    left_bytes = served.kv_tokens * served.kv_bytes_per_token - guest.weight_bytes - own_bytes
    return replace(host, kv_tokens=int(left_bytes // host.kv_bytes_per_token))


def _guest(served: PublishedEngine, guest: PublishedEngine, engine: EngineSpec) -> GuestSpec:
    own_bytes = GUEST_BASE_SHARE * served.kv_tokens * served.kv_bytes_per_token
    base_tokens = int(own_bytes // guest.kv_bytes_per_token)
    host = _beside(served, guest)
    most_bytes = own_bytes + host.kv_tokens * host.kv_bytes_per_token
    granule = GRANULE_BYTES // guest.kv_bytes_per_token
    return GuestSpec(
        replace(
            engine,
            kv_tokens=int(most_bytes // guest.kv_bytes_per_token),
            max_step_tokens=GUEST_STEP_TOKENS,
        ),
        kv_base_tokens=base_tokens,
        slack_share=SLACK_SHARE,
        granule_tokens=granule,
        token_budget=GUEST_STEP_TOKENS,
    )


def _assumptions(
    setup: Setup, rollout: PublishedEngine, hosts: int, rate: float
) -> tuple[str, ...]:
    return (
        f"engines: {rollout.model} on {rollout.cards} {CARD} cards, step times of {source()}",
        f"users: Azure code trace of 2023, its lengths and bursts, {rate:g} requests/s for"
        f" {hosts} hosts that serve {setup.served_model}",
        f"a guest has {GUEST_BASE_SHARE:.0%} of the host's KV memory of its own and borrows the"
        f" rest but 20%; slackShare {SLACK_SHARE:g}",
        "host and guest in a step at once: each at half its speed",
        "weights: 5% of a version's bytes are sent, 2.5 GB/s between clusters, 12.5 GB/s inside",
        "spot, serverless, rlboost: cards that Kubernetes' autoscaler frees (60% utilisation, 5"
        " minutes without need), an engine answers 60 s later; users get them back at once",
        "libra: all training cards roll out between training phases, 3 s to change sides",
    )
