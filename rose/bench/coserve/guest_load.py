"""How a guest is kept busy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GuestLoad:
    """What keeps the guest of an arm busy, and the largest step that its grant allows.

    streams: rollouts at a time, each with the same lengths.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    token_budget: int
