"""RoseReplica: one of verl's rollout replicas, a Ray actor without resources.

agent loop ── generate ──► RoseServer ──► gateways ──► replicas of ROSE, on GPUs outside of Ray
"""

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from rose.errors import RefusedError
from rose.integrations.settings import TrainerSettings
from rose.integrations.verl.configuration import (
    ends_turns,
    lengths_of,
    refuse_unfit,
    settings_of,
)
from rose.integrations.verl.rollout_turns import RolloutTurns
from rose.integrations.verl.turns import Lengths

SERVER = "rose_server"


class RoseServer:
    """Ray actor that verl's agent loops and trainer call as a rollout server; it forwards turns to
    ROSE's gateway.
    """

    def __init__(
        self, settings: TrainerSettings, lengths: Lengths, lag: int, ends_turns: bool
    ) -> None:
        self._turns = RolloutTurns(settings, lengths, lag, ends_turns=ends_turns)

    async def generate(self, **asked: object) -> TokenOutput:
        """Return verl's TokenOutput of one turn; see `RolloutTurns.generate`."""
        return TokenOutput(**await self._turns.generate(**asked))  # type: ignore[arg-type]

    async def published(self, version: int, step: int) -> None:
        """Record that the weights of verl's global step `step` are ROSE's version `version`; see
        `RolloutTurns.published`.
        """
        self._turns.published(version, step)

    async def abort_all_requests(self, reject_request: bool = False, **_: object) -> dict[str, int]:
        """Abort turns before an update of weights; return their number as `aborted_count`.

        See `RolloutTurns.abort`.
        """
        return {"aborted_count": self._turns.abort(rejects=reject_request)}

    async def resume_generation(self, **_: object) -> None:
        """Let turns begin again after an update of weights."""
        self._turns.resume()

    async def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: replicas keep their memory, and each version has a cache of its own."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = set_global_steps = _nothing


class NoWorker:
    """Stand-in for workers that receive weights: a ROSE replica has none in verl."""

    def execute_checkpoint_engine(self, *_: object, **__: object) -> dict[str, Any]:
        return {}

    def update_weights(self, *_: object, **__: object) -> None:
        return None


class RoseReplica(RolloutReplica):  # type: ignore[misc]  # verl's types are not read
    """Rollout replica of verl that takes no GPU: its server is a Ray actor without resources."""

    async def init_standalone(self) -> None:
        """Start the server in verl's standalone mode, with one placeholder worker and no GPUs of
        Ray.
        """
        self.rollout_mode = RolloutMode.STANDALONE
        # verl makes a group of all replicas' workers, which must not be empty.
        self.workers = [ray.remote(NoWorker).options(num_cpus=0).remote()]
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the RoseServer actor and set verl's handle and address of it.

        Raises `ConfigError`, `RefusedError`.
        """
        refuse_unfit(self.config, self.model_config)
        if self.is_reward_model or self.is_teacher_model:
            raise RefusedError(
                "a reward model or teacher is no replica of the policy; serve it as a job of its"
                " own, and ask the gateway from the reward function"
            )
        settings = settings_of(self.config)
        # Colocated modes generate for the next step; the other mode runs ahead of it.
        hybrid = self.rollout_mode is RolloutMode.HYBRID
        lag = 0 if hybrid else settings.max_staleness
        name = f"{SERVER}_{self.replica_rank}{self.name_suffix}"
        actor = ray.remote(RoseServer).options(
            name=name, num_cpus=0, max_concurrency=self.max_concurrency
        )
        server = actor.remote(settings, lengths_of(self.config), lag, ends_turns())
        self.servers = [server]
        self._server_handle = server
        # verl identifies its servers by address.
        self._server_address = f"{settings.gateway.partition('//')[2]}#{self.replica_rank}"
