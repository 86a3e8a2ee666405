"""A quest of many turns with tools: TextWorld, whose commands are the tools that the policy calls.

    pip install 'rose-rollout[trainer]' textworld==1.7.0
    tw-make tw-simple --rewards dense --goal detailed --seed 7 --output run/quest.z8
    python examples/textworld_tools.py run/quest.z8 run/quests.jsonl 32

The game says which commands it has in each place. A turn's output has to be a call of one of them,
so even a policy that knows nothing acts; which call, the policy decides. Games run in processes of
their own, on CPUs; each quest's tokens, logprobs, mask and reward are appended to the file.
Where ROSE is says the environment (`ROSE_*`, docs/trainers/environments.md).
"""

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import textworld
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rose.client import BlockingRolloutClient, Sampling, StructuredOutputs
from rose.integrations import PolicyPublisher, TrainerSettings

TURNS, AT_ONCE = 6, 4
# Characters that are read of a text of the game; its last words count.
READ = 160
CALL, END = '<tool_call>{"command": "', '"}</tool_call>'
INFOS = textworld.EnvInfos(admissible_commands=True, max_score=True, objective=True)


def calls(commands: list[str]) -> tuple[str, ...]:
    """The tool calls that the game would understand now."""
    return tuple(f"{CALL}{command}{END}" for command in commands)


def command_of(call: str) -> str:
    """Return the command of a call."""
    return call.strip().removeprefix(CALL).removesuffix(END)


def quest(
    client: BlockingRolloutClient,
    tokenizer: PreTrainedTokenizerBase,
    game: str,
    number: int,
    oldest: int = 0,
) -> dict[str, Any]:
    """Play it once, in one session; a row for the trainer."""
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []

    def hear(text: str) -> None:
        # The text of the game is not trained on; below its prompt is a line of status.
        words = " ".join(text.partition("\n>")[0].split())
        heard = tokenizer.encode(f"\n{words[-READ:]}\n", add_special_tokens=False)
        tokens.extend(heard)
        logprobs.extend([0.0] * len(heard))
        mask.extend([0] * len(heard))

    world = textworld.start(game, INFOS)
    began_s = time.monotonic()
    try:
        state, done, turns = world.reset(), False, 0
        hear(state.objective)
        with client.session() as session:
            while not done and turns < TURNS:
                outputs = StructuredOutputs(choice=calls(state.admissible_commands))
                sampling = Sampling(max_tokens=120, structured_outputs=outputs)
                turn = session.generate(tokens, sampling, min_version=oldest)
                tokens += turn.token_ids
                logprobs += turn.logprobs
                mask += [1] * len(turn.token_ids)
                turns += 1
                called = tokenizer.decode(turn.token_ids, skip_special_tokens=True)
                state, _, done = world.step(command_of(called))
                hear(state.feedback)
        reward = state.score / state.max_score
    finally:
        world.close()
    row = {"quest": number, "reward": reward, "turns": turns, "done": bool(done)}
    row["seconds"] = time.monotonic() - began_s
    return row | {"tokens": tokens, "logprobs": logprobs, "mask": mask}


def _quest(settings: TrainerSettings, game: str, number: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint)
    with settings.client() as client:
        return quest(client, tokenizer, game, number)


def main(game: str, path: Path, quests: int) -> None:
    """Play it so many times, and say how far the policy came."""
    settings = TrainerSettings.from_env()
    rows = []
    # Registers the job; a trainer would publish a version with it after each step.
    with (
        PolicyPublisher(settings),
        ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as pool,
        path.open("a", encoding="utf-8") as file,
    ):
        for row in pool.map(partial(_quest, settings, game), range(quests)):
            file.write(json.dumps(row) + "\n")
            rows.append(row)
    mean = sum(row["reward"] for row in rows) / quests
    turns, spoken = (sum(row["turns"] for row in rows), sum(sum(row["mask"]) for row in rows))
    print(  # noqa: T201
        f"{quests} quests, {turns} tool calls of {spoken} tokens, mean score {mean:.3f}"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
