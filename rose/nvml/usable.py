"""Whether ROSE can work on such a card and driver at all. Pure."""

from rose.nvml.card import Card
from rose.nvml.errors import CardError

LEAST_CUDA = (12, 8)


def insist_usable(card: Card) -> None:
    """Raise CardError, with what to do, when nothing of ROSE runs there."""
    if card.cuda < LEAST_CUDA:
        raise CardError(
            f"driver {card.driver} serves CUDA {version_text(card.cuda)}, and"
            f" {version_text(LEAST_CUDA)} is needed; use a machine with driver 570 or newer"
        )
    if card.mig:
        raise CardError(
            f"MIG is on: {card.name} is cut into instances; use a whole card"
            " (ROSE never changes a card's settings)"
        )
    if card.compute_mode == "prohibited":
        raise CardError(f"{card.name} is in compute mode prohibited; its owner must allow work")


def version_text(version: tuple[int, int]) -> str:
    """As a person reads it."""
    return "unknown" if version == (0, 0) else f"{version[0]}.{version[1]}"
