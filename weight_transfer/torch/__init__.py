"""Publishing from torch ranks: plain modules, FSDP2 and DTensors."""

from weight_transfer.torch.placements import state_pieces
from weight_transfer.torch.publisher import ShardedPublisher
from weight_transfer.torch.weights import local_weights

__all__ = ["ShardedPublisher", "local_weights", "state_pieces"]
