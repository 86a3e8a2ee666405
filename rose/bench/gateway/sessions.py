"""Agentic sessions, replayed small: turns whose prompts grow from turn to turn.

A file, gzip or plain, has one session a line: `{"turns": [[start_s, input_tokens, output_tokens,
think_s, api_s], …]}`; without one, sessions of the same shape are made up. Prompts are cut to
`max_prompt` tokens by one factor for all, think times to `think_s` in the middle by another.
"""

import asyncio
import gzip
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ConfigError

VOCABULARY = 96
OUTPUT_TOKENS = 4

Ask = Callable[[str, int, list[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A prompt's length in tokens, and the pause before it in seconds."""

    prompt_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One trajectory."""

    id: str
    turns: tuple[SessionTurn, ...]

    def prompt(self, turn: int) -> list[int]:
        """The session's own tokens as far as this turn has got: the next turn's begin with them."""
        dice = random.Random(self.id)  # noqa: S311 - the same tokens whoever asks
        return [dice.randrange(VOCABULARY) for _ in range(self.turns[turn].prompt_tokens)]


@dataclass(frozen=True, slots=True)
class Scale:
    """How small the replay is."""

    sessions: int = 24
    turns: int = 12
    max_prompt: int = 400
    think_s: float = 0.05


def read_sessions(path: Path, scale: Scale) -> list[AgentSession]:
    """The first sessions of a file with at least three turns. Raises ConfigError."""
    opened = gzip.open if path.suffix == ".gz" else open
    rows: list[list[tuple[int, float]]] = []
    try:
        with opened(path, "rt") as lines:
            for line in lines:
                turns = [(int(turn[1]), float(turn[3])) for turn in json.loads(line)["turns"]]
                if len(turns) >= 3:
                    rows.append(turns[: scale.turns])
                if len(rows) == scale.sessions:
                    break
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path} holds no sessions: {error}") from error
    return _scaled(rows, scale)


def made_up_sessions(scale: Scale, seed: int = 0) -> list[AgentSession]:
    """A long first prompt, then turns that each add a little, and think times with a long tail."""
    dice = random.Random(seed)  # noqa: S311 - repeatable
    rows = []
    for _ in range(scale.sessions):
        length, turns = dice.randint(15_000, 60_000), []
        for _ in range(dice.randint(3, scale.turns)):
            turns.append((length, dice.lognormvariate(2.3, 0.8)))
            length += dice.randint(300, 8_000)
        rows.append(turns)
    return _scaled(rows, scale)


def _scaled(rows: Sequence[Sequence[tuple[int, float]]], scale: Scale) -> list[AgentSession]:
    longest = max(tokens for turns in rows for tokens, _ in turns)
    thinks = sorted(think for turns in rows for _, think in turns)
    middle_s = max(thinks[len(thinks) // 2], 1e-3)
    return [
        AgentSession(
            f"agent-{number}",
            tuple(
                SessionTurn(
                    max(8, tokens * scale.max_prompt // longest),
                    min(4.0, think / middle_s) * scale.think_s,
                )
                for tokens, think in turns
            ),
        )
        for number, turns in enumerate(rows)
    ]


async def replay(sessions: Sequence[AgentSession], ask: Ask) -> int:
    """All sessions side by side, each turn after its think time; how many turns that were."""

    async def one(session: AgentSession) -> int:
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think_s)
            await ask(session.id, number, session.prompt(number))
        return len(session.turns)

    return sum(await asyncio.gather(*map(one, sessions)))
