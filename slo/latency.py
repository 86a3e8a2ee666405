"""What one request experienced."""

from dataclasses import dataclass
from typing import NamedTuple

from slo.spec import SloSpec


class Met(NamedTuple):
    """Which targets one request met; a target that nobody promised is met."""

    ttft: bool
    tpot: bool
    itl: bool
    e2e: bool


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Measured times of a finished request; `tpot_s` is 0 with fewer than two tokens.

    `itl_max_s` is the longest gap between two tokens, None where gaps were not measured.
    """

    request_id: str
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    itl_max_s: float | None = None

    def met(self, spec: SloSpec) -> Met:
        """Each target for itself; raises ValueError for an ITL target without measured gaps."""
        if spec.itl_s is not None and self.itl_max_s is None:
            raise ValueError(
                f"request {self.request_id!r} has no itl_max_s, but {spec.model!r} has an ITL "
                "target; measure token gaps or drop itl_s"
            )
        return Met(
            ttft=self.ttft_s <= spec.ttft_s,
            tpot=self.tpot_s <= spec.tpot_s,
            itl=spec.itl_s is None or self.itl_max_s is None or self.itl_max_s <= spec.itl_s,
            e2e=spec.e2e_s is None or self.e2e_s <= spec.e2e_s,
        )

    def meets(self, spec: SloSpec) -> bool:
        """Whether every target holds for this request; raises as `met` does."""
        return all(self.met(spec))
