"""Whether a card can be measured now, found before anything touches it. Pure."""

from rose.nvml import Card, CardError, Usage

# What a driver keeps for itself on a card that nobody uses.
DRIVERS_OWN_BYTES = 2 << 30
GIB = 1 << 30


def chosen(cards: tuple[Card, ...], wanted: int | None) -> Card:
    """The card to measure. Raises CardError when it is not clear which."""
    if not cards:
        raise CardError("the NVIDIA driver sees no GPU; run on a machine with one")
    if wanted is None and len(cards) > 1:
        names = ", ".join(f"{card.index}: {card.name}" for card in cards)
        raise CardError(f"there are {len(cards)} GPUs ({names}); choose one with --gpu INDEX")
    for card in cards:
        if card.index == (wanted or 0):
            return card
    raise CardError(f"there is no GPU {wanted}; give --gpu 0 to {len(cards) - 1}")


def insist_room(card: Card, usage: Usage, needed_bytes: int, needed_by: str) -> None:
    """Raise CardError when a piece would run out of memory."""
    if usage.free_bytes < needed_bytes:
        raise CardError(
            f"{_gib(usage.free_bytes)} of {_gib(card.memory_bytes)} GiB are free on {card.name},"
            f" and {needed_by} needs {_gib(needed_bytes)}; lower --gib or choose pieces with --only"
        )


def insist_alone(card: Card, usage: Usage) -> None:
    """Raise CardError when somebody else computes on the card or holds its memory."""
    if usage.processes:
        pids = ", ".join(map(str, usage.processes))
        raise CardError(
            f"another process is on {card.name} (pid {pids}); measure when it has ended"
        )
    if usage.used_bytes > DRIVERS_OWN_BYTES:
        raise CardError(
            f"{_gib(usage.used_bytes)} GiB of {card.name} are in use by a process that cannot be"
            " seen from here (another container?); measure when it has ended"
        )


def remarks(card: Card, usage: Usage) -> list[str]:
    """What does not stand in the way and should be known when figures are read."""
    found = []
    if card.persistence is False:
        found.append("persistence mode is off: the first use of the card in a process starts it")
    if card.compute_mode.startswith("exclusive"):
        found.append(f"compute mode is {card.compute_mode}: two processes cannot share the card")
    found += [f"clocks are held down now: {why}" for why in usage.slowed]
    return found


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f}"
