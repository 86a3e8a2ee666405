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
    fixed_seed,
    lengths_of,
    refuse_unfit,
    replays_routes,
    settings_of,
)
from rose.integrations.verl.rollout_turns import RolloutTurns
from rose.integrations.verl.turns import Lengths

SERVER = "rose_server"


class RoseServer:
    """Ray actor with the methods that verl's agent loops and trainer call on a rollout server; it
    sends turns to ROSE's gateways.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        lengths: Lengths,
        lag: int,
        ends_turns: bool,
        replays_routes: bool,
        seed: int | None,
    ) -> None:
        self._turns = RolloutTurns(
            settings, lengths, lag, ends_turns=ends_turns, replays_routes=replays_routes, seed=seed
        )

    async def generate(self, **asked: object) -> TokenOutput:
        """Generate one turn and return verl's TokenOutput; see `RolloutTurns.generate`."""
        return TokenOutput(**await self._turns.generate(**asked))  # type: ignore[arg-type]

    async def published(self, version: int, step: int) -> None:
        """Record that a version was published after a global step; see `RolloutTurns.published`."""
        self._turns.published(version, step)

    async def abort_all_requests(self, reject_request: bool = False, **_: object) -> dict[str, int]:
        """Abort turns before an update of weights, and return their number as `aborted_count`; see
        `RolloutTurns.abort`.
        """
        return {"aborted_count": self._turns.abort(rejects=reject_request)}

    async def resume_generation(self, **_: object) -> None:
        """Let turns start again after the update of weights; see `RolloutTurns.resume`."""
        self._turns.resume()

    async def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: replicas manage their memory, and each version has a cache of its own."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = set_global_steps = _nothing


class NoWorker:
    """Stand-in for the workers that receive weights in verl; its methods do nothing, since a ROSE
    replica has no workers there.
    """

    def execute_checkpoint_engine(self, *_: object, **__: object) -> dict[str, Any]:
        return {}

    def update_weights(self, *_: object, **__: object) -> None:
        return None


class RoseReplica(RolloutReplica):  # type: ignore[misc]  # verl's types are not read
    """Rollout replica in verl's terms, which takes no GPU: it starts one RoseServer actor."""

    async def init_standalone(self) -> None:
        """Start the actor without Ray resources: ROSE's replicas are not among Ray's."""
        self.rollout_mode = RolloutMode.STANDALONE
        # verl makes a group of all replicas' workers, which must not be empty.
        self.workers = [ray.remote(NoWorker).options(num_cpus=0).remote()]
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the RoseServer actor. Raises ConfigError, or RefusedError for a configuration that
        ROSE cannot serve.
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
        server = actor.remote(
            settings,
            lengths_of(self.config),
            lag,
            ends_turns(),
            replays_routes(self.config),
            fixed_seed(self.config, self.replica_rank),
        )
        self.servers = [server]
        self._server_handle = server
        # verl identifies its servers by address.
        self._server_address = f"{settings.gateway.partition('//')[2]}#{self.replica_rank}"
