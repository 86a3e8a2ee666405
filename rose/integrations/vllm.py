"""Backend `rose` of vLLM's own weight transfer: a trainer engine that publishes versions.

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
    """Init info of vLLM's trainer engine `rose`.

    settings: the trainer's; None reads them from `ROSE_*` variables.
    """

    backend: ClassVar[str] = BACKEND
    settings: TrainerSettings | None = None


class RoseTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """vLLM trainer engine that publishes a source's tensors as the job's next version."""

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
        """Register the job with the scheduler and return the engine of this rank.

        Raises `ConfigError`, `UnavailableError`.
        """
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
        """Publish the source's tensors, on all ranks together; return when replicas serve the
        version.

        Raises `RoseError`.
        """
        self.publisher.publish(self.source)

    def shutdown(self) -> None:
        """Stop serving versions to nodes; published versions stay."""
        self.publisher.close()


WeightTransferTrainerFactory.register_engine(BACKEND, RoseTrainerEngine)
