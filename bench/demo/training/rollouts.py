"""Rollouts of the demo's trainer: agent loops that play trajectories in strict order of groups.

As many run at a time as there are streams. Update t trains on batch t, the groups
[t x groups, (t + 1) x groups). A group of batch t may start once version t - max_staleness is
published, so the next batch runs while the trainer works and versions change in mid-trajectory.

Each delivered `Trajectory` carries the origin of every token, which training, gap and records read.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.task import (
    LONG_REPLY_TOKENS,
    LONG_TURN_TOKENS,
    REPLY_TOKENS,
    Episode,
    Lake,
)
from rose.client import RolloutClient, RolloutError, Sampling, Turn

CONTINUED = "continued"


@dataclass(frozen=True, slots=True)
class TakenTurn:
    """One turn. `offset`: where its reply begins in the conversation (= its prompt's tokens)."""

    offset: int
    turn: Turn
    start_s: float
    end_s: float

    def positions(self) -> range:
        """Return the positions of the reply's tokens in the conversation."""
        return range(self.offset, self.offset + len(self.turn.token_ids))

    def stamps(self) -> list[int | None]:
        """Policy version of each token, None where no span covers it."""
        stamps: list[int | None] = [None] * len(self.turn.token_ids)
        for version, start, end in self.turn.versions:
            stamps[start:end] = [version] * (end - start)
        return stamps

    def segments(self) -> list[tuple[str, str, int, int]]:
        """(replica, kind, start, end): every segment after the first is `continued`."""
        return [
            (replica, CONTINUED if index else kind, start, end)
            for index, (replica, kind, start, end) in enumerate(self.turn.segments)
        ]

    def kinds(self) -> list[str]:
        """Kind of the segment that each token came from."""
        kinds = ["unknown"] * len(self.turn.token_ids)
        for _, kind, start, end in self.segments():
            kinds[start:end] = [kind] * (end - start)
        return kinds


@dataclass(slots=True)
class Trajectory:
    """One episode of a group; `batch` is the update it belongs to. Times are monotonic seconds."""

    name: str
    group: int
    batch: int
    start_s: float
    end_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    turns: list[TakenTurn] = field(default_factory=list)
    reward: float = 0.0
    lost: bool = False

    def positions(self) -> list[int]:
        """Return the positions of sampled tokens in `tokens`, rising."""
        return [at for taken in self.turns for at in taken.positions()]

    def logprobs(self) -> list[float]:
        """The engine's log-probability of each sampled token."""
        return [value for taken in self.turns for value in taken.turn.logprobs]

    def stamps(self) -> list[int | None]:
        """Policy version of each sampled token."""
        return [stamp for taken in self.turns for stamp in taken.stamps()]

    def versions(self) -> list[int]:
        """Policy versions that sampled it, rising."""
        return sorted({version for taken in self.turns for version, _, _ in taken.turn.versions})

    def revoked_mid_turn(self) -> bool:
        """Return True if a turn moved to another replica after it had begun."""
        return any(len(taken.turn.segments) > 1 for taken in self.turns)


logger = logging.getLogger(__name__)


def sampling(*, long_turns: bool, greedy: bool = False) -> Sampling:
    """Return the sampling of replies: from the words of a reply only, until the stop."""
    return Sampling(
        temperature=0.0 if greedy else 1.0,
        max_tokens=LONG_REPLY_TOKENS if long_turns else REPLY_TOKENS,
        min_tokens=LONG_TURN_TOKENS if long_turns else 0,
        stop_token_ids=(vocab.STOP_ID,),
        allowed_token_ids=vocab.REPLY_IDS,
    )


async def play(
    source: RolloutClient, lake: Lake, how: Sampling, trajectory: Trajectory, min_version: int
) -> None:
    """Play an episode into `trajectory`; one that cannot go on is marked as lost."""
    episode = Episode(lake)
    try:
        while not episode.done:
            start_s = time.monotonic()
            turn = await source.generate(
                episode.tokens,
                how,
                request_id=f"{trajectory.name}-{episode.turns}",
                session_id=trajectory.name,
                min_version=min_version,
            )
            taken = TakenTurn(len(episode.tokens), turn, start_s, time.monotonic())
            trajectory.turns.append(taken)
            episode.reply(list(turn.token_ids))
    except RolloutError as error:
        logger.warning("trajectory %s is lost: %s", trajectory.name, error)
        trajectory.lost = True
    trajectory.tokens = episode.tokens
    trajectory.reward = episode.reward
    trajectory.end_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Plan of the rollouts: `batches` of `groups` x `group_size` trajectories.

    `first`: the version that batch 0 trains.
    """

    batches: int
    groups: int
    group_size: int
    streams: int
    max_staleness: int
    how: Sampling
    lake_of: Callable[[int], Lake]
    first: int = 0

    def first_version(self, batch: int) -> int:
        """The version that must be published before a group of `batch` may start."""
        return self.first + max(0, batch - self.max_staleness)


class Rollouts:
    """Plays a plan; batches come out in order, each once and complete."""

    def __init__(self, source: RolloutClient, plan: RolloutPlan) -> None:
        self._source = source
        self._plan = plan
        self._batches = plan.batches
        self._version = plan.first
        self._moved = asyncio.Condition()
        self._stopped = False
        self._streams = asyncio.Semaphore(plan.streams)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: dict[int, dict[str, Trajectory]] = {}
        self.started = 0
        self.lost = 0
        self.duplicated = 0

    async def run(self) -> None:
        """Start everything in order; returns when the last trajectory has ended.

        Raises what an agent loop raised other than RolloutError, in an ExceptionGroup: a batch
        that waits for that trajectory would wait for ever.
        """
        async with asyncio.TaskGroup() as playing:
            for group in range(self._plan.batches * self._plan.groups):
                batch = self._batch_of(group)
                async with self._moved:
                    await self._moved.wait_for(partial(self._may_start, batch))
                lake = self._plan.lake_of(group)
                for member in range(self._plan.group_size):
                    await self._streams.acquire()
                    if self._stopped or batch >= self._batches:
                        return
                    self._start(playing, lake, group, member)

    async def batch(self, batch: int) -> list[Trajectory]:
        """All trajectories of a batch, in order; empty when `finish` was called before."""
        size = self._plan.groups * self._plan.group_size
        async with self._moved:
            await self._moved.wait_for(
                lambda: self._stopped or len(self._ended.get(batch, ())) == size
            )
        return [] if self._stopped else self._taken(batch)

    async def published(self, version: int) -> None:
        """A new version may be sampled from."""
        async with self._moved:
            self._version = version
            self._moved.notify_all()

    def end_with(self, batch: int) -> None:
        """Start nothing of a later batch: no update would train on it."""
        self._batches = min(self._batches, batch + 1)

    async def finish(self) -> list[Trajectory]:
        """Start no more, wait for those in flight; returns what no update has trained on."""
        async with self._moved:
            self._stopped = True
            self._moved.notify_all()
        await asyncio.gather(*self._tasks)
        return [one for batch in sorted(self._ended) for one in self._taken(batch)]

    def _batch_of(self, group: int) -> int:
        return group // self._plan.groups

    def _start(self, playing: asyncio.TaskGroup, lake: Lake, group: int, member: int) -> None:
        self.started += 1
        name, batch = f"{group}.{member}", self._batch_of(group)
        trajectory = Trajectory(name, group, batch, time.monotonic())
        task = playing.create_task(self._play(lake, trajectory))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _may_start(self, batch: int) -> bool:
        return self._stopped or self._version >= self._plan.first_version(batch)

    def _taken(self, batch: int) -> list[Trajectory]:
        ended = self._ended.pop(batch)
        return sorted(ended.values(), key=lambda one: (one.group, one.name))

    async def _play(self, lake: Lake, trajectory: Trajectory) -> None:
        try:
            oldest = self._plan.first_version(trajectory.batch)
            await play(self._source, lake, self._plan.how, trajectory, oldest)
        finally:
            self._streams.release()
        async with self._moved:
            ended = self._ended.setdefault(trajectory.batch, {})
            self.duplicated += trajectory.name in ended
            self.lost += trajectory.lost
            ended[trajectory.name] = trajectory
            self._moved.notify_all()
