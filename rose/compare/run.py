"""A comparison as it runs: switches, waits and readings, and the way back.

    begin ──► [switch ──► settle ──► read ──► block_s ──► read] for each block ──► as it was
                 │ somebody else changed a switch: theirs stays, and the comparison ends

Blocks come in pairs of one with lending and one without, each in a drawn order: traffic changes
over a day, so a block is compared with its neighbour in time alone, and neither arm always comes
first.

The earlier modes are restored however the run ends. An operator's change meanwhile is never undone:
lending that an operator stopped is not begun again for a measurement.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rose.compare.node_metrics import CountersRestartedError, HostReading, between
from rose.compare.verdict import PairRead
from rose.errors import ConfigError, RefusedError, UnavailableError

Mode = int
"""Number of a `HarvestMode` in the protocol with the scheduler."""

# Time for the last leases of a guest to end, and for a scheduler to change leaders.
DRAIN_S = 60.0
BACK_S = 30.0
LOOK_S = 1.0
MOST_PAIRS = 500
# A shorter block has too few requests, and is mostly settling.
LEAST_BLOCK_S, LONGEST_BLOCK_S = 10.0, 3_600.0
LEAST_SETTLE_S, LONGEST_SETTLE_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Times of a comparison: number of pairs of blocks, measured seconds of each block, and seconds
    after each switch that are not measured.
    """

    pairs: int = 12
    block_s: float = 120.0
    settle_s: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--pairs", self.pairs, 2, MOST_PAIRS),
            ("--block-s", self.block_s, LEAST_BLOCK_S, LONGEST_BLOCK_S),
            ("--settle-s", self.settle_s, LEAST_SETTLE_S, LONGEST_SETTLE_S),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{option} {value:g}: give {least:g} to {most:g}")

    @property
    def seconds(self) -> float:
        """Duration of the whole comparison in seconds: all blocks and their settling."""
        return 2 * self.pairs * (self.settle_s + self.block_s)


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block of a plan.

    lends: True if the guests may work in it. begins_s: start of its measurement, in seconds from
    the plan's start.
    """

    pair: int
    lends: bool
    begins_s: float


def blocks_of(plan: Plan) -> list[PlannedBlock]:
    """Return all blocks of a comparison's plan in their order; the order within each pair is drawn
    from the plan's seed.
    """
    drawn = random.Random(plan.seed)  # noqa: S311 -- an order, no secret
    blocks: list[PlannedBlock] = []
    for pair in range(plan.pairs):
        first = drawn.random() < 0.5
        for lends in (first, not first):
            began_s = len(blocks) * (plan.settle_s + plan.block_s)
            blocks.append(PlannedBlock(pair, lends, began_s + plan.settle_s))
    return blocks


def shown_plan(plan: Plan) -> list[str]:
    """Return the plan's schedule as lines of text: a total, then a line for each block."""
    lines = [
        f"{2 * plan.pairs} blocks of {plan.block_s:g} s, {plan.settle_s:g} s to settle before"
        f" each: {plan.seconds / 60:.0f} min"
    ]
    lines += [
        f"{block.begins_s / 60:7.1f} min  pair {block.pair + 1:3d}  lending"
        f" {'on' if block.lends else 'off'}"
        for block in blocks_of(plan)
    ]
    return lines


@dataclass(frozen=True, slots=True)
class Switches:
    """Harvest modes that are set now.

    cluster: the operator's for all guests. guests: each guest's own. leased: guests that have a
    lease.
    """

    cluster: Mode
    guests: Mapping[str, Mode]
    leased: frozenset[str] = frozenset()


class Lending(Protocol):
    """Protocol of the scheduler's switches, as a comparison uses them."""

    def switches(self) -> Switches:
        """Return the harvest modes that are set now. Raises RoseError."""
        ...

    def switch(self, guest: str, mode: Mode) -> None:
        """Set the harvest mode of one guest. Raises RoseError."""
        ...


class Clock(Protocol):
    """Protocol of a clock; the module `time` is one."""

    def monotonic(self) -> float:
        """Return the clock's time in seconds, which never goes back."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Block the caller for so many seconds."""
        ...


@dataclass(slots=True)
class ComparisonRun:
    """One comparison of a node's guests.

    read: reads the host's counters. on, off: harvest modes of the two arms.
    """

    plan: Plan
    lending: Lending
    read: Callable[[], HostReading]
    say: Callable[[str], None]
    on: Mode
    off: Mode
    clock: Clock = time
    _set: dict[str, Mode] = field(default_factory=dict)
    _before: Switches | None = None

    def measure(self) -> list[PairRead]:
        """Carry out the plan of a comparison, and return the readings of each pair whose two blocks
        were measured. Raises RoseError.

        Guests' modes are restored before it ends, in whatever way it ends.
        """
        self._before = before = self.lending.switches()
        self._check(before)
        self.read()  # A page that cannot be read is to be known before anything is switched.
        self._set = dict(before.guests)
        try:
            return self._all_blocks()
        finally:
            self._put_back()

    def _check(self, before: Switches) -> None:
        if not before.guests:
            raise RefusedError("the node offers no guest; is it attached? `rose status` lists them")
        if before.cluster != self.on:
            raise RefusedError("a stop is in force, so nothing is lent; `rose resume` ends it")
        stopped = sorted(guest for guest, mode in before.guests.items() if mode != self.on)
        if stopped:
            raise RefusedError(
                f"{stopped[0]} is stopped by itself; `rose resume --replica {stopped[0]}` ends it"
            )

    def _all_blocks(self) -> list[PairRead]:
        found: dict[tuple[int, bool], HostReading] = {}
        blocks = blocks_of(self.plan)
        for number, block in enumerate(blocks):
            arm = "on" if block.lends else "off"
            self.say(f"block {number + 1} of {len(blocks)}: lending {arm}")
            try:
                found[block.pair, block.lends] = self._measured(block)
            except CountersRestartedError as error:
                self.say(f"block {number + 1} does not count: {error}")
        whole = [n for n in range(self.plan.pairs) if (n, True) in found and (n, False) in found]
        return [PairRead(found[n, True], found[n, False]) for n in whole]

    def _measured(self, block: PlannedBlock) -> HostReading:
        self._switch(self.on if block.lends else self.off)
        self.clock.sleep(self.plan.settle_s)
        if not block.lends:
            self._wait_until_free()
        earlier = self.read()
        self.clock.sleep(self.plan.block_s)
        later = self.read()
        self._ours(self.lending.switches())
        return between(earlier, later)

    def _switch(self, mode: Mode) -> None:
        self._ours(self.lending.switches())
        for guest in list(self._set):
            if self._set[guest] != mode:
                # Record it first: a call without an answer may have been carried out.
                self._set[guest] = mode
                self.lending.switch(guest, mode)

    def _wait_until_free(self) -> None:
        until_s = self.clock.monotonic() + DRAIN_S
        while leased := self.lending.switches().leased & self._set.keys():
            if self.clock.monotonic() >= until_s:
                raise UnavailableError(
                    f"{min(leased)} still has its lease {DRAIN_S:g} s after it was drained; see"
                    " `rose status`"
                )
            self.clock.sleep(LOOK_S)

    def _ours(self, now: Switches) -> None:
        """Raise RefusedError if somebody else has changed a mode that this run has set."""
        if now.cluster != self.on:
            raise RefusedError("somebody stopped lending meanwhile: the comparison ends")
        for guest, mode in self._set.items():
            # A new leader may not know all guests yet.
            if now.guests.get(guest, mode) != mode:
                raise RefusedError(
                    f"somebody changed the switch of {guest} meanwhile: the comparison ends"
                )

    def _put_back(self) -> None:
        """Restore the earlier modes, except where someone else has set one since; report it through
        `say` if that fails.
        """
        assert self._before is not None
        until_s = self.clock.monotonic() + BACK_S
        left = {g: self._before.guests[g] for g, mode in self._set.items() if mode != self.on}
        while left:
            try:
                self._put_back_once(left)
            except UnavailableError as error:
                if self.clock.monotonic() >= until_s:
                    self.say(f"NOT PUT BACK: {error}")
                    for guest in sorted(left):
                        self.say(f"  run `rose resume --replica {guest}`")
                    return
                self.clock.sleep(LOOK_S)
        self.say("lending is as it was before")

    def _put_back_once(self, left: dict[str, Mode]) -> None:
        now = self.lending.switches().guests
        for guest in list(left):
            # After a call without an answer either mode may be set.
            if now.get(guest, left[guest]) in (self.off, left[guest]):
                self.lending.switch(guest, left[guest])
            else:
                self.say(f"somebody changed the switch of {guest} meanwhile: left as it is")
            del left[guest]
