"""What a turn asks of a replica."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnNeed:
    """Lengths in tokens; `session` names the trajectory, `group` its prompt, empty where unknown.

    `made_tokens` of a turn that continues are in its prompt already. `request_id` is the name under
    which the choice can be asked about later.
    """

    session: str
    prompt_tokens: int
    budget_tokens: int
    min_version: int | None = None
    exact_version: int | None = None
    request_id: str = ""
    job: str = ""
    group: str = ""
    made_tokens: int = 0

    def accepts(self, version: int) -> bool:
        """Whether tokens of policy `version` may be part of this turn."""
        if self.exact_version is not None:
            return version == self.exact_version
        return self.min_version is None or version >= self.min_version
