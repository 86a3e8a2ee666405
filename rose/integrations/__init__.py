"""Integrations of trainers: what each needs beside its own configuration.

trainer's tensors --> PolicyPublisher --> WeightPublisher --> nodes trainer's prompts --> its own
client, or `rose.client` --> gateway
"""

from rose.integrations.publisher import PolicyPublisher, PolicyReceipt
from rose.integrations.settings import TrainerSettings

__all__ = ["PolicyPublisher", "PolicyReceipt", "TrainerSettings"]
