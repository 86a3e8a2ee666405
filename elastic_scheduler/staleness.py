"""How old the policy behind a token may be."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """At most `max_versions` behind; 0 is synchronous training.

    Batch t is the one that turns version t into version t + 1.
    """

    max_versions: int

    def __post_init__(self) -> None:
        if self.max_versions < 0:
            raise ValueError(f"max_versions is {self.max_versions}; give 0 or more")

    def oldest(self, current: int) -> int:
        """The oldest version whose tokens may still be trained on at `current`."""
        return max(0, current - self.max_versions)

    def may_start(self, batch: int, published: int) -> bool:
        """Whether trajectories of `batch` may start while `published` is the newest version."""
        return published >= batch - self.max_versions

    def admits_token(self, token_version: int, current: int) -> bool:
        """Whether a token of `token_version` may be trained on at `current`."""
        return token_version >= self.oldest(current)
