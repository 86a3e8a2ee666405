"""Which card is meant by an index or a UUID. Pure."""

from rose.nvml.card import Card
from rose.nvml.errors import CardError


def card_of(cards: tuple[Card, ...], device: int | str) -> Card:
    """The card of that index, or the one whose UUID is or begins with `device`.

    Raises CardError when there is none, or when several begin so.
    """
    if not cards:
        raise CardError("the NVIDIA driver sees no GPU; run on a machine with one")
    if isinstance(device, int):
        found = [card for card in cards if card.index == device]
    else:
        found = [card for card in cards if card.uuid.startswith(device)]
    if len(found) != 1:
        known = ", ".join(f"{card.index}: {card.name} {card.uuid}" for card in cards)
        raise CardError(f"GPU {device} is none or more than one of {known}; name one of them")
    return found[0]
