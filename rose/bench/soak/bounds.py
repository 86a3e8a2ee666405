"""What a soak must not show."""

from dataclasses import dataclass
from statistics import median

from rose.bench.soak.run import Seen

# Over the second half of the turns: from the median of its first part to that of its last.
GROWTH_MIB = 12.0
MEMORY_PARTS = 10
# Connections come and go: of 200,000 turns the medians of thirds differ by 9 with no leak at all
# (one standard deviation, from the samples' spread of 22 and their correlation). This is one
# descriptor that stays in 1,700 turns.
GROWTH_DESCRIPTORS = 40
DESCRIPTOR_PARTS = 3
# Of all turns together, answers that their way does not explain.
WRONG = 0
PAUSE_S = 0.1
STORM_RSS_MIB = 300.0
# With more, others on the machine held the gateway up: how late it was says nothing about it.
QUIET_WAITED = 0.02


@dataclass(frozen=True, slots=True)
class Check:
    """One figure beside its bound; where it is not `judged`, it is told only."""

    name: str
    value: float
    at_most: float
    judged: bool = True

    @property
    def holds(self) -> bool:
        """Whether it is within, or not judged."""
        return not self.judged or self.value <= self.at_most

    def line(self) -> str:
        """For the table."""
        verdict = ("HOLDS" if self.holds else "FAILS") if self.judged else "not judged"
        return f"{self.name:>60}  {self.value:>9.3f}  <= {self.at_most:>7g}  {verdict}"


def checks(mixed: Seen, storm: Seen) -> list[Check]:
    """All bounds."""
    found = [
        Check("turns answered otherwise than provoked", sum(mixed.wrong.values()), WRONG),
        Check(
            "growth of memory over the second half, MiB",
            growth(mixed.rss_mib, MEMORY_PARTS),
            GROWTH_MIB,
        ),
        Check(
            "growth of descriptors",
            growth(mixed.descriptors, DESCRIPTOR_PARTS),
            GROWTH_DESCRIPTORS,
        ),
        *pauses("", mixed),
    ]
    if not storm.turns:
        return found
    rate = f"{storm.turns / storm.took_s:.0f} time-outs/s: "
    return [
        *found,
        Check(f"{rate}answered otherwise", sum(storm.wrong.values()), WRONG),
        *pauses(rate, storm),
        Check(f"{rate}memory, MiB", max(storm.rss_mib), STORM_RSS_MIB),
    ]


def pauses(when: str, seen: Seen) -> list[Check]:
    """For how long the gateway's loop kept all streams waiting, as its own probe saw it.

    What the loop worked for is its own doing on any machine. All of a lag is so only where nobody
    else had the processor meanwhile.
    """
    quiet = seen.waited <= QUIET_WAITED
    return [
        Check(f"{when}longest step of its event loop, s", seen.loop_busy_s, PAUSE_S),
        Check(f"{when}longest pause of its event loop, s", seen.loop_lag_s, PAUSE_S, quiet),
    ]


def growth(samples: list[float] | list[int], parts: int) -> float:
    """How much more in the last of so many parts of the second half than in its first."""
    half = samples[len(samples) // 2 :]
    part = max(1, len(half) // parts)
    return median(half[-part:]) - median(half[:part])
