"""RLBoost as published: preemptible instances, and the training cards for a window of each step.

Source: Wu et al., "RLBoost: Harvesting Preemptible Resources for Cost-Efficient Reinforcement
Learning on LLMs" (arXiv 2510.19225, 2025; 1.51x to 1.97x over reserved cards alone). Its three
mechanisms, and what stands for them here:

* adaptive rollout offload: the reserved (training) cards roll out too at the beginning of a step,
  for a window that adapts from step to step; then they train. `OffloadWindow` grows the window
  while training would wait for rollouts anyway, and shrinks it when fewer are left for it;
* pull-based weight transfer: a new instance fetches the newest version by itself, as all do here;
* token-level collection and migration: what the turn journal does for every policy here.

Its leasing is `spot`'s: whatever is offered is taken at once and kept until it is preempted.
"""

from elastic_scheduler.policies.baselines import SpotPolicy

GROW = 1.25
SHRINK = 0.8
FIRST_WINDOW_S = 60.0
LEAST_WINDOW_S, MOST_WINDOW_S = 5.0, 600.0


class RlboostPolicy(SpotPolicy):
    """Takes every preemptible instance, and the training cards while their window is open."""

    name = "rlboost"


class OffloadWindow:
    """Seconds of each rollout phase in which the training cards roll out."""

    def __init__(self) -> None:
        self.window_s = FIRST_WINDOW_S

    def step(self, rollout_s: float) -> None:
        """A rollout phase took so long: longer than the window, the window was too short."""
        factor = GROW if rollout_s > self.window_s else SHRINK
        self.window_s = min(MOST_WINDOW_S, max(LEAST_WINDOW_S, self.window_s * factor))
