"""What the guest got out of the host's idle time and spare capacity."""

from collections.abc import Sequence
from dataclasses import dataclass

from rose.bench.coserve.plan import IDLE_NAIVE, IDLE_ROSE
from rose.bench.coserve.records import BlockRecord, Records
from rose.stats import Estimate, ratio_of_rates


@dataclass(frozen=True, slots=True)
class Harvest:
    """Guest tokens/s, against the guest alone × idle, and × spare. None: not to be had."""

    guest_tok_s: float
    guest_alone_tok_s: float | None
    idle_efficiency: Estimate | None
    spare_efficiency: Estimate | None


def alone_tok_s(records: Records, guest: str) -> float | None:
    """Tokens/s of a guest over all its blocks without host load."""
    arm = (IDLE_NAIVE if guest == "naive" else IDLE_ROSE).name
    blocks = [block for block in records.blocks if block.arm == arm]
    seconds = sum(block.duration_s for block in blocks)
    tokens = sum(block.guest_tokens for block in blocks)
    return tokens / seconds if tokens else None


BlockPair = tuple[BlockRecord, BlockRecord]


def harvest(records: Records, pairs: Sequence[BlockPair], guest: str, spare: float) -> Harvest:
    """Of (arm, alone) blocks with the same arrivals."""
    seconds = sum(arm.duration_s for arm, _ in pairs)
    tokens = sum(arm.guest_tokens for arm, _ in pairs)
    rate = alone_tok_s(records, guest)
    if guest == "none" or rate is None or not seconds:
        return Harvest(tokens / seconds if seconds else 0.0, rate, None, None)
    windows = [window for pair in pairs for window in _windows(records, pair, guest, rate)]
    above = [(tokens_, seconds_) for tokens_, seconds_, _ in windows]
    idle = [(ideal, seconds_) for _, seconds_, ideal in windows]
    whole = [(rate * spare * seconds_, seconds_) for _, seconds_, _ in windows]
    return Harvest(
        guest_tok_s=tokens / seconds,
        guest_alone_tok_s=rate,
        idle_efficiency=ratio_of_rates(above, idle, records.run.seed),
        spare_efficiency=ratio_of_rates(above, whole, records.run.seed) if spare > 0 else None,
    )


def _windows(
    records: Records, pair: BlockPair, guest: str, rate_tok_s: float
) -> list[tuple[float, float, float]]:
    """(tokens, seconds, tokens of the guest alone × idle) of each window of a pair of blocks.

    A stock guest keeps no step log: its block is one window, of its own counter.
    """
    arm, alone = pair
    length_s = min(arm.duration_s, alone.duration_s)
    if guest == "naive":
        spans = [(0.0, length_s)]
    else:
        width_s = float(records.run.settings["window_s"])
        # A rest shorter than a window says little and would weigh as much.
        spans = [(k * width_s, (k + 1) * width_s) for k in range(int(length_s / width_s))]
    found = []
    for begin_s, end_s in spans:
        seconds = end_s - begin_s
        host = (alone.start_s + begin_s, alone.start_s + end_s)
        idle = 1 - records.steps["host"].busy_s(host) / seconds
        tokens = arm.guest_tokens * length_s / arm.duration_s
        if guest != "naive":
            span = (arm.start_s + begin_s, arm.start_s + end_s)
            tokens = records.steps["guest"].sampled_in(span)
        found.append((float(tokens), seconds, rate_tok_s * max(0.0, idle) * seconds))
    return found
