"""Integrations of trainers: the code that each needs beside its own configuration.

trainer's tensors --> PolicyPublisher --> WeightPublisher --> nodes
trainer's prompts --> its own client, or `rose.client` --> gateway
"""

from rose.integrations.policy_publisher import PolicyPublisher, PolicyReceipt
from rose.integrations.settings import TrainerSettings

__all__ = ["PolicyPublisher", "PolicyReceipt", "TrainerSettings"]
