"""vLLM's own weight transfer from a trainer, to ROSE: backend `rose` of its trainer engines.

    import rose.integrations.vllm
    engine = WeightTransferTrainerFactory.trainer_init(
        RoseTrainerInitInfo(rank=rank), client=client, source=ModuleSource(model)
    )
    engine.send_weights()  # all ranks together, after each step

A trainer with this interface (vLLM 0.32) changes only the line of the init info; the client, which
drives one vLLM's control plane, is not used.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rose.errors import ConfigError
from rose.integrations.policy_publisher import PolicyPublisher
from rose.integrations.ranks import rank
from rose.integrations.settings import TrainerSettings

BACKEND = "rose"


@dataclass
class RoseTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM's types are not checked
    """settings: of the trainer's side; without them the environment's (`ROSE_*`)."""

    backend: ClassVar[str] = BACKEND
    settings: TrainerSettings | None = None


class RoseTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publisher of the source's tensors as the job's next version; it waits until it is served."""

    init_info_cls = RoseTrainerInitInfo

    def __init__(
        self,
        publisher: PolicyPublisher,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        is_sender: bool,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.publisher = publisher

    @classmethod
    def trainer_init(
        cls,
        init_info: RoseTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Register the job. Raises `ConfigError`, `UnavailableError`."""
        if source is None:
            raise ConfigError(f"backend {BACKEND!r} sends whole models; give a WeightSource")
        if source.held_names() is not None:
            raise ConfigError(
                f"backend {BACKEND!r} takes sources that hold all names on each rank; for others"
                " see ShardedPublisher in docs/weights.md"
            )
        if init_info.is_sender != (rank() == 0):
            raise ConfigError(
                f"rank {init_info.rank} is rank {rank()} of torch.distributed; the first publishes"
            )
        publisher = PolicyPublisher(init_info.settings or TrainerSettings.from_env())
        publisher.start()
        return cls(publisher, client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """Publish, on all ranks together; return once it is served. Raises `RoseError`."""
        self.publisher.publish(self.source)

    def shutdown(self) -> None:
        self.publisher.close()


WeightTransferTrainerFactory.register_engine(BACKEND, RoseTrainerEngine)
