"""Episodes of training jobs: of environments, of generated sessions, or of a file's sessions.

The ROSE paper trains on FrozenLake and ALFWorld. It says models, cards, batches and groups; it does
not publish the lengths of its turns. The figures here are those of the same environments in the
open (ROLL's and verl-agent's recipes, ALFWorld's expert solutions): `assumptions` says them, and
every table of results prints them.

A file of sessions has one a line: `{"id", "turns": [[start_s, input, output, think_s, api_s], …]}`,
`input` being the whole context that a turn begins with. A turn of its episode observes the tokens
by which the context grew, and tools take the time until the next turn (`think_s`).
"""

import gzip
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from rose.errors import BAD_BYTES, RoseError
from rose.simulation.workloads.amounts import Amount, LogNormal, whole

# A longer pause is a person's and not a tool's: it is cut to this.
MAX_TOOL_S = 300.0
# A context that shrinks by more was summarised by its agent: a new episode begins there.
_SUMMARISED_TOKENS = 1_024
_MAX_LINE_BYTES = 64 << 20
# An episode of a file ends where its context would be longer.
MAX_CONTEXT = 1 << 20
# Share of its turns after which an episode that reaches its goal ends.
SOLVED_TURNS = 0.6


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """Turn of a trajectory: it appends `observed_tokens` to the context, then generates
    `output_tokens`.

    environment_s: seconds that tools or the environment take after it; 0 after the last turn.
    """

    observed_tokens: int
    output_tokens: int
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutEpisode:
    """Episode of several turns; the first turn's observation is its prompt.

    shared_tokens: tokens of the prompt that are the same in all trajectories of its group. score:
    its reward; DAPO-like filters drop groups whose scores are all equal.
    """

    turns: tuple[EpisodeTurn, ...]
    shared_tokens: int = 0
    score: float = 0.0

    @property
    def output_tokens(self) -> int:
        """Number of tokens that all its turns generate."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Number of tokens of its last context: prompt, observations and outputs."""
        return sum(turn.observed_tokens + turn.output_tokens for turn in self.turns)


class RolloutWorkload(Protocol):
    """Protocol of a training job's episodes; a prompt that starts anew plays the same ones."""

    def trajectory(self, seed: int, prompt: int, sample: int) -> RolloutEpisode:
        """Return episode number `sample` of a prompt; the same for the same three numbers, in
        whatever order they are asked.
        """
        ...


@dataclass(frozen=True, slots=True)
class TurnAmounts:
    """Distributions of an episode's turns; an episode ends before its context would exceed
    `max_context` tokens.

    pause_s: seconds of the environment or a tool between two turns.
    """

    observed: Amount
    output: Amount
    pause_s: Amount
    max_context: int

    def turns(self, prompt_tokens: int, count: int, rng: random.Random) -> tuple[EpisodeTurn, ...]:
        """Return at most `count` random turns, of which the first observes the prompt."""
        turns, context = list[EpisodeTurn](), 0
        for number in range(count):
            observed = prompt_tokens if number == 0 else whole(self.observed, rng)
            output = whole(self.output, rng)
            if turns and context + observed + output > self.max_context:
                break
            context += observed + output
            turns.append(EpisodeTurn(observed, output, self.pause_s.sample(rng)))
        return _ended(turns)


@dataclass(frozen=True, slots=True)
class Environment:
    """Workload of episodes of one environment. Samples of a prompt share its difficulty, so long
    ones come in groups, as do groups whose scores are all equal.

    solved: mean share of episodes that reach the goal, which end early. A prompt's share is drawn
    from a beta distribution of that mean.
    """

    name: str
    prompt: Amount
    count: Amount
    each: TurnAmounts
    shared_tokens: int
    solved: float
    assumptions: tuple[str, ...]

    def trajectory(self, seed: int, prompt: int, sample: int) -> RolloutEpisode:
        """Return a random episode, the same for the same three numbers."""
        task = random.Random(f"rose-task/{self.name}/{seed}/{prompt}")  # noqa: S311 - a load
        rng = random.Random(f"rose-episode/{self.name}/{seed}/{prompt}/{sample}")  # noqa: S311
        chance = task.betavariate(self.solved, 1 - self.solved)
        tokens = whole(self.prompt, task)
        solved = rng.random() < chance
        # Geometric mean of two draws, one of the task and one of the episode.
        count = math.sqrt(self.count.sample(task) * self.count.sample(rng))
        count *= SOLVED_TURNS if solved else 1.0
        turns = self.each.turns(tokens, max(1, round(count)), rng)
        return RolloutEpisode(turns, min(self.shared_tokens, tokens), float(solved))


FROZEN_LAKE = Environment(
    name="frozen_lake",
    prompt=LogNormal(620, 0.05, least=400, most=1_000),
    count=LogNormal(7, 0.6, least=1, most=20),
    each=TurnAmounts(
        observed=LogNormal(110, 0.1, least=60, most=200),
        output=LogNormal(420, 0.9, least=24, most=4_096),
        pause_s=LogNormal(0.05, 0.8, least=0.002, most=2.0),
        max_context=32_768,
    ),
    shared_tokens=620,
    solved=0.55,
    assumptions=(
        "FrozenLake: 7 turns at the median and at most 20, 420 output tokens a turn (log-normal, "
        "sigma 0.9, at most 4,096), 110 tokens observed, 50 ms of environment",
    ),
)
ALFWORLD = Environment(
    name="alfworld",
    prompt=LogNormal(1_400, 0.15, least=800, most=2_048),
    count=LogNormal(22, 0.55, least=3, most=50),
    each=TurnAmounts(
        observed=LogNormal(220, 0.4, least=40, most=1_024),
        output=LogNormal(260, 0.8, least=16, most=2_048),
        pause_s=LogNormal(0.8, 0.9, least=0.05, most=30.0),
        max_context=32_768,
    ),
    shared_tokens=900,
    solved=0.5,
    assumptions=(
        "ALFWorld: 22 turns at the median and at most 50, 260 output tokens a turn (log-normal, "
        "sigma 0.8, at most 2,048), 220 tokens observed, 0.8 s of environment (at most 30 s)",
    ),
)


@dataclass(frozen=True, slots=True)
class AgenticSessions:
    """Workload of generated sessions, whose turns, tokens and pauses are log-normal, so a few are
    very long.

    shared_tokens: tokens of the prompt that are the same in all episodes.
    """

    prompt: Amount
    count: Amount
    each: TurnAmounts
    shared_tokens: int

    def trajectory(self, seed: int, prompt: int, sample: int) -> RolloutEpisode:
        """Return a random session as an episode, the same for the same three numbers."""
        task = random.Random(f"rose-agentic/{seed}/{prompt}")  # noqa: S311 - a load
        rng = random.Random(f"rose-agentic/{seed}/{prompt}/{sample}")  # noqa: S311 - as above
        first = min(whole(self.prompt, task), self.each.max_context // 2)
        turns = self.each.turns(first, whole(self.count, rng), rng)
        return RolloutEpisode(turns, min(self.shared_tokens, first))


# Modelled on 355 recorded sessions of coding agents (kv-cache-tester); pauses are cut like those of
# a file, since a rollout has tools and no people.
CODING_SESSIONS = AgenticSessions(
    prompt=LogNormal(24_900, 1.15, least=2_000, most=200_000),
    count=LogNormal(44, 1.12, least=3, most=400),
    each=TurnAmounts(
        observed=LogNormal(355, 1.78, least=1, most=60_000),
        output=LogNormal(217, 0.9, least=2, most=18_000),
        pause_s=LogNormal(10, 1.57, least=0.05, most=MAX_TOOL_S),
        max_context=131_072,
    ),
    shared_tokens=2_000,
)


class _SessionLine(msgspec.Struct):
    id: str
    turns: list[tuple[float, int, int, float, float]]


_LINE = msgspec.json.Decoder(_SessionLine)
_KEYS = ("start_s", "input", "output", "think_s", "api_s")


@dataclass(frozen=True, slots=True)
class SessionFile:
    """Workload of a file's recorded sessions (JSON lines, plain or gzip) as episodes, all kept in
    memory.
    """

    episodes: tuple[RolloutEpisode, ...]

    @classmethod
    def read(cls, path: Path) -> "SessionFile":
        """Return the workload with every episode of every session in a file.

        Raises RoseError, with file, line and key, for a file that does not hold sessions.
        """
        found = [
            episode
            for number, session in _sessions(path)
            for episode in _episodes(f"{path}:{number}", session)
        ]
        if not found:
            raise RoseError(f"{path}:1: turns: no session; give a file that has some")
        return cls(tuple(found))

    def trajectory(self, seed: int, prompt: int, sample: int) -> RolloutEpisode:
        """Return an episode of the file, drawn at random by the three numbers: samples of a prompt
        do not share it.
        """
        rng = random.Random(f"rose-session/{seed}/{prompt}/{sample}")  # noqa: S311 - a load
        return self.episodes[rng.randrange(len(self.episodes))]


def _sessions(path: Path) -> Iterator[tuple[int, _SessionLine]]:
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            lines = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
            while line := lines.readline(_MAX_LINE_BYTES):
                number += 1
                if line.strip():
                    yield number, _LINE.decode(line)
    except (OSError, EOFError) as error:
        raise RoseError(f"{path}:{number + 1}: cannot be read as sessions: {error}") from error
    except BAD_BYTES as error:
        raise RoseError(f"{path}:{number}: no session: {error}") from error


def _episodes(where: str, session: _SessionLine) -> Iterator[RolloutEpisode]:
    _check(where, session.turns)
    turns, context = list[EpisodeTurn](), 0
    pauses = [max(0.0, turn[3]) for turn in session.turns[1:]] + [0.0]
    for (_, tokens, output, _, _), pause_s in zip(session.turns, pauses, strict=True):
        summarised = bool(turns) and tokens + _SUMMARISED_TOKENS < context
        if summarised:
            yield RolloutEpisode(_ended(turns))
            turns, context = [], 0
        observed = max(tokens - context, 0 if turns else 1)
        if context + observed + output > MAX_CONTEXT:
            if turns:
                yield RolloutEpisode(_ended(turns))
            return
        context += observed + output
        turns.append(EpisodeTurn(observed, output, min(pause_s, MAX_TOOL_S)))
    if turns:
        yield RolloutEpisode(_ended(turns))


def _check(where: str, turns: Sequence[tuple[float, int, int, float, float]]) -> None:
    if not turns:
        raise RoseError(f"{where}: turns: a session has at least one")
    before_s = -math.inf
    for number, turn in enumerate(turns):
        for key, value in zip(_KEYS, turn, strict=True):
            least = 1 if key == "output" else 0
            if not (math.isfinite(value) and value >= least):
                raise RoseError(f"{where}: turns[{number}].{key} is {value}; give {least} or more")
        if turn[0] < before_s:
            raise RoseError(
                f"{where}: turns[{number}].start_s is {turn[0]}, before the turn above; sort them"
            )
        before_s = turn[0]


def _ended(turns: Sequence[EpisodeTurn]) -> tuple[EpisodeTurn, ...]:
    """Return the turns with no environment time after the last one."""
    return (*turns[:-1], replace(turns[-1], environment_s=0.0))
