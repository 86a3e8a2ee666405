"""Publishing from torch ranks: plain modules, FSDP2 and DTensors."""

from weight_transfer.torch.placements import local_weights, state_pieces
from weight_transfer.torch.publisher import ShardedPublisher

__all__ = ["ShardedPublisher", "local_weights", "state_pieces"]
