"""Agentic sessions with heavy tails: read from a file, or generated with a file's statistics.

A file has one session a line: `{"id", "turns": [[start_s, input, output, think_s, api_s], …]}`,
`input` being the whole context that a turn begins with. Both are played as episodes of a training
job: a turn observes what its context grew by, and tools take what passed before the next one.
"""

import gzip
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose.errors import BAD_BYTES, RoseError
from rose.simulation.workload import Trajectory, Turn
from rose.simulation.workloads.lengths import Amount, LogNormal, whole

# A pause of a person, not of a tool, lasts longer: it is cut to this.
MAX_TOOL_S = 300.0
# A context that shrinks by more was summarised by its agent: an episode begins anew.
_SUMMARISED_TOKENS = 1_024
_MAX_LINE_BYTES = 64 << 20


class _SessionLine(msgspec.Struct):
    id: str
    turns: list[tuple[float, int, int, float, float]]


_LINE = msgspec.json.Decoder(_SessionLine)


@dataclass(frozen=True, slots=True)
class SessionFile:
    """Sessions of a file (JSON lines, plain or gzip) as episodes, all read at once.

    max_context: episodes end where their context would be longer; max_tool_s: longer pauses are
    cut to it. Raises RoseError, with file, line and key, for a file that is no such sessions.
    """

    episodes: tuple[Trajectory, ...]

    @classmethod
    def read(
        cls, path: Path, max_context: int = 1 << 20, max_tool_s: float = MAX_TOOL_S
    ) -> "SessionFile":
        """Every episode of every session."""
        found = [
            episode
            for number, session in _sessions(path)
            for episode in _episodes(f"{path}:{number}", session, max_context, max_tool_s)
        ]
        if not found:
            raise RoseError(f"{path}:1: turns: no session; give a file that has some")
        return cls(tuple(found))

    def trajectory(self, seed: int, prompt: int, sample: int) -> Trajectory:
        """One of the file's, drawn for each sample: no two sessions of a file share a prompt."""
        rng = random.Random(f"rose-session/{seed}/{prompt}/{sample}")  # noqa: S311 - a load
        return self.episodes[rng.randrange(len(self.episodes))]


@dataclass(frozen=True, slots=True)
class AgenticSessions:
    """Generated sessions: turns, tokens and pauses are log-normal, so a few are very long.

    max_context: an episode ends where its context would be longer. shared_tokens: of its prompt,
    the same in all episodes.
    """

    turns: Amount
    prompt: Amount
    observed: Amount
    output: Amount
    tool_s: Amount
    shared_tokens: int = 2_000
    max_context: int = 131_072

    def trajectory(self, seed: int, prompt: int, sample: int) -> Trajectory:
        """The same session for the same three numbers."""
        task = random.Random(f"rose-agentic/{seed}/{prompt}")  # noqa: S311 - a load
        rng = random.Random(f"rose-agentic/{seed}/{prompt}/{sample}")  # noqa: S311 - as above
        first = min(whole(self.prompt, task), self.max_context // 2)
        turns, context = list[Turn](), 0
        for number in range(whole(self.turns, rng)):
            observed = first if number == 0 else whole(self.observed, rng)
            output = whole(self.output, rng)
            if context + observed + output > self.max_context and turns:
                break
            context += observed + output
            turns.append(Turn(observed, output, self.tool_s.sample(rng)))
        turns[-1] = Turn(turns[-1].observed_tokens, turns[-1].output_tokens)
        return Trajectory(tuple(turns), shared_tokens=min(self.shared_tokens, first))


# Modelled on 355 recorded sessions of coding agents (kv-cache-tester); pauses are cut like those of
# a
# file, since a rollout has tools and no people.
CODING_SESSIONS = AgenticSessions(
    turns=LogNormal(44, 1.12, least=3, most=400),
    prompt=LogNormal(24_900, 1.15, least=2_000, most=200_000),
    observed=LogNormal(355, 1.78, least=1, most=60_000),
    output=LogNormal(217, 0.9, least=2, most=18_000),
    tool_s=LogNormal(10, 1.57, least=0.05, most=MAX_TOOL_S),
)


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


def _episodes(
    where: str, session: _SessionLine, max_context: int, max_tool_s: float
) -> Iterator[Trajectory]:
    _check(where, session.turns)
    turns, context = list[Turn](), 0
    pauses = [max(0.0, turn[3]) for turn in session.turns[1:]] + [0.0]
    for (_, tokens, output, _, _), pause_s in zip(session.turns, pauses, strict=True):
        summarised = bool(turns) and tokens + _SUMMARISED_TOKENS < context
        if summarised:
            yield _ended(turns)
            turns, context = [], 0
        observed = max(tokens - context, 0 if turns else 1)
        if context + observed + output > max_context:
            if turns:
                yield _ended(turns)
            return
        context += observed + output
        turns.append(Turn(observed, output, min(pause_s, max_tool_s)))
    if turns:
        yield _ended(turns)


def _ended(turns: Sequence[Turn]) -> Trajectory:
    last = turns[-1]
    return Trajectory((*turns[:-1], Turn(last.observed_tokens, last.output_tokens)))


_KEYS = ("start_s", "input", "output", "think_s", "api_s")


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
