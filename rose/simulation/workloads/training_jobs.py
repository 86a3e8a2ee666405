"""Training jobs of the paper's two set-ups, and their GRPO and DAPO batches.

Training time follows from arithmetic: 6 operations per parameter and token, at a share of the
cards' peak that trainers reach in bf16.
"""

import math
from dataclasses import dataclass, replace

from rose.errors import ConfigError
from rose.simulation.trainer import Algorithm, TrainerSpec
from rose.simulation.workloads.episodes import ALFWORLD, FROZEN_LAKE, Environment

OPERATIONS = 6
# Hopper's dense bf16 peak, and the share of it that trainers of such models report.
PEAK_FLOPS_S = 989e12
TRAINING_MFU = 0.35
BF16_BYTES = 2
# Prompts that verl's DAPO recipe generates per prompt that it trains on: 1,536 for 512.
DAPO_GENERATED = 3.0


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One RL job: its episodes, its cards, and the batch of a step.

    borrowed_cards: at most so many of the serving cluster. Raises ConfigError for a batch that is
    no whole number of groups.
    """

    name: str
    environment: Environment
    parameters: float
    rollout_cards: int
    training_cards: int
    borrowed_cards: int
    batch: int
    group: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.group < 1 or self.batch % self.group:
            raise ConfigError(f"{self.name}: a batch of {self.batch} has no groups of {self.group}")

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions that were not measured, a sentence each."""
        return (
            *self.environment.assumptions,
            f"training: {OPERATIONS} operations per parameter and token at {TRAINING_MFU:.0%} of"
            f" {PEAK_FLOPS_S / 1e12:.0f} TFLOP/s a card",
        )

    def grpo(self, steps: int = 5, max_staleness: int = 0) -> TrainerSpec:
        """Groups of samples; synchronous unless tokens may be `max_staleness` versions old."""
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

    def dapo(self, steps: int = 5, max_staleness: int = 0) -> TrainerSpec:
        """GRPO that starts more groups than it needs and drops those that teach nothing."""
        return replace(
            self.grpo(steps, max_staleness),
            algorithm=Algorithm.DAPO,
            over_sampling=DAPO_GENERATED - 1,
        )


FROZEN_LAKE_8B = TrainingJob("frozen_lake-8b", FROZEN_LAKE, 8.2e9, 8, 8, 16, 256, 16)
ALFWORLD_32B = TrainingJob("alfworld-32b", ALFWORLD, 32.8e9, 16, 32, 64, 1_024, 16)
JOBS = {job.name: job for job in (FROZEN_LAKE_8B, ALFWORLD_32B)}
