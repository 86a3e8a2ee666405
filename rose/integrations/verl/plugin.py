"""Plugin of verl, found by its entry point (`verl.plugins`) in each process that imports verl.

actor_rollout_ref.rollout.name=rose                        RoseReplica, ServerAdapter
actor_rollout_ref.rollout.checkpoint_engine.backend=rose   RoseCheckpointEngine

verl logs an error of a plugin at DEBUG and continues without it. So nothing that may fail happens
here: errors are raised when `rose` is used, and `python -m rose.integrations.verl` prints them
beforehand.
"""

from typing import TYPE_CHECKING

import verl.workers.rollout.base as rollouts
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rose.integrations.tested import check_tested
from rose.integrations.verl.configuration import TESTED

if TYPE_CHECKING:
    from rose.integrations.verl.replica import RoseReplica

NAME = "rose"


def _replica() -> "type[RoseReplica]":
    check_tested("verl", TESTED)
    from rose.integrations.verl.replica import RoseReplica

    return RoseReplica


def register() -> None:
    """Register ROSE's replica, rollout adapter and checkpoint engine with verl under the name
    `rose`; a repeated call changes nothing.
    """
    RolloutReplicaRegistry.register(NAME, _replica)
    rollouts._ROLLOUT_REGISTRY[NAME, "async"] = "rose.integrations.verl.weights.ServerAdapter"
    from rose.integrations.verl.weights import RoseCheckpointEngine

    CheckpointEngineRegistry.register(NAME)(RoseCheckpointEngine)


register()
