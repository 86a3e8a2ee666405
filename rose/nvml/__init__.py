"""NVIDIA cards of this machine, as their driver reports them: reads alone, no setting, no reset."""

from rose.nvml.nvml import (
    Card,
    CardError,
    CardReader,
    Client,
    Nvml,
    Usage,
    card_of,
    insist_usable,
    version_text,
)

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
