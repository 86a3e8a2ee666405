"""What NVIDIA's driver says about the cards of this machine: reads alone, no setting, no reset."""

from rose.nvml.card import Card, CardReader, Client, Usage
from rose.nvml.choice import card_of
from rose.nvml.errors import CardError
from rose.nvml.nvml import Nvml
from rose.nvml.usable import insist_usable, version_text

__all__ = [
    "Card",
    "CardError",
    "CardReader",
    "Client",
    "Nvml",
    "Usage",
    "card_of",
    "insist_usable",
    "version_text",
]
