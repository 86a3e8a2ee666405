"""Scenario: cluster, workloads and trainer of one run, and which policy leases the guests."""

from dataclasses import dataclass, field

from rose.simulation.cluster import ClusterSpec
from rose.simulation.trainer import TrainerSpec
from rose.simulation.workload import RolloutWorkload, ServingWorkload


@dataclass(frozen=True, slots=True)
class Scenario:
    """Input of a run. until_s: it ends there at the latest, though not all steps are done.

    traffic: None for hosts without users. assumptions: sentences that tables print beside figures.
    """

    name: str
    cluster: ClusterSpec
    trainer: TrainerSpec
    rollouts: RolloutWorkload
    traffic: ServingWorkload | None = None
    until_s: float = 3_600.0
    slice_s: float = 10.0
    assumptions: tuple[str, ...] = ()
    options: dict[str, float] = field(default_factory=dict)
