"""Self-play: both seats of textarena's Nim are one policy's, and each is a trajectory of its own.

    pip install 'rose-rollout[trainer]' textarena==0.7.4
    python examples/textarena_self_play.py run/games.jsonl 64

Games and their rewards are on the CPU; each seat's tokens, logprobs, versions and reward are
appended to the file, as a trainer wants them. Where ROSE is says the environment (`ROSE_*`,
docs/trainers/environments.md).
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import textarena
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rose.client import BlockingRolloutClient, BlockingSession, Sampling, StructuredOutputs
from rose.integrations import PolicyPublisher, TrainerSettings

GAME, AT_ONCE = "Nim-v0", 32
# A game that gets longer is given up: replicas have no room for more.
MOST_TOKENS = 1_900
# A move is a tool call with two arguments: which pile, and how many of it.
MOVE = Sampling(max_tokens=8, structured_outputs=StructuredOutputs(regex=r"\[[0-2] [1-5]\]"))


@dataclass
class Seat:
    """One player's side of a game; `mask` is 1 where the policy spoke."""

    session: BlockingSession
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    read: int = 0
    moves: int = 0

    def hear(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Take in what the game has said since this seat's last turn."""
        heard = tokenizer.encode(text[self.read :], add_special_tokens=False)
        self.read = len(text)
        self._add(heard, [0.0] * len(heard), 0)

    def move(self, tokenizer: PreTrainedTokenizerBase, oldest: int) -> str:
        """Let the policy move."""
        turn = self.session.generate(self.tokens, MOVE, min_version=oldest)
        self._add(turn.token_ids, turn.logprobs, 1)
        self.versions.update(version for version, *_ in turn.versions)
        self.moves += 1
        return str(tokenizer.decode(turn.token_ids, skip_special_tokens=True))

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [mask] * len(tokens)


def play(
    client: BlockingRolloutClient, tokenizer: PreTrainedTokenizerBase, number: int, oldest: int = 0
) -> list[dict[str, Any]]:
    """Play a game; a row for each seat, which has a session: its turns go where its prefix is."""
    game = textarena.make(GAME)
    game.reset(num_players=2, seed=number)
    with ExitStack() as sessions:
        seats = [Seat(sessions.enter_context(client.session())) for _ in range(2)]
        over = False
        while not over:
            player, text = game.get_observation()
            seats[player].hear(tokenizer, text)
            if len(seats[player].tokens) > MOST_TOKENS:
                break
            over, _ = game.step(seats[player].move(tokenizer, oldest))
    rewards = game.close()[0] if over else {0: 0, 1: 0}
    return [
        {
            "game": number,
            "seat": player,
            "reward": rewards[player],
            "moves": seat.moves,
            "versions": sorted(seat.versions),
            "tokens": seat.tokens,
            "logprobs": seat.logprobs,
            "mask": seat.mask,
        }
        for player, seat in enumerate(seats)
    ]


def main(path: Path, games: int) -> None:
    """Play them, and say who won."""
    settings = TrainerSettings.from_env()
    tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint)
    # Registers the job; a trainer would publish a version with it after each step.
    with (
        PolicyPublisher(settings),
        settings.client() as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
        path.open("a", encoding="utf-8") as file,
    ):
        rows = []
        for seats in pool.map(lambda number: play(client, tokenizer, number), range(games)):
            file.writelines(json.dumps(seat) + "\n" for seat in seats)
            rows += seats
    for player in range(2):
        mine = [row for row in rows if row["seat"] == player]
        won = sum(row["reward"] > 0 for row in mine)
        moves = sum(row["moves"] for row in mine)
        print(f"seat {player}: won {won} of {games} games, {moves} moves")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
