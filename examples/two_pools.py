"""Two pools: turns that read much and turns that write much, each on the cards that suit them.

    pip install 'rose-rollout[trainer]' reasoning-gym==0.1.23
    python examples/two_pools.py 32

A task has two turns: the policy solves it, which is a short prompt and a long answer, and then says
of a whole transcript whether it is right, which is a long prompt and a short answer. Nobody says
where a turn goes: nodes say how fast their cards read and write (`prefill_tok_s` and `decode_tok_s`
of a replica), and the gateway sends each turn where it takes least time. Tasks and rewards are on
CPUs, in processes of their own. Where ROSE is says the environment (`ROSE_*`,
docs/trainers/environments.md).
"""

import asyncio
import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import reasoning_gym
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rose.client import RolloutClient, Sampling, Turn
from rose.integrations import PolicyPublisher, TrainerSettings

TASK, SEED, SIZE = "chain_sum", 7, 1_000
SOLVE, JUDGE = Sampling(max_tokens=96, ignore_eos=True), Sampling(max_tokens=2)
# Characters of a transcript, which in practice holds tools' answers, files and screens.
TRANSCRIPT = 1_200
AT_ONCE, PROCESSES = 8, 2

Placed = dict[str, Counter[str]]


def question(number: int) -> str:
    """One task."""
    return str(reasoning_gym.create_dataset(TASK, seed=SEED, size=SIZE)[number]["question"])


def reward(number: int, answer: str) -> float:
    """Return an answer's score by the environment: no GPU, and no process of the trainer's."""
    tasks = reasoning_gym.create_dataset(TASK, seed=SEED, size=SIZE)
    return float(tasks.score_answer(answer.strip(), tasks[number]))


def note(placed: Placed, kind: str, turn: Turn) -> None:
    """Count the tokens that each replica wrote."""
    for replica, _, start, end in turn.segments:
        placed[kind][replica] += end - start


async def task(
    client: RolloutClient,
    tokenizer: PreTrainedTokenizerBase,
    pool: ProcessPoolExecutor,
    number: int,
    placed: Placed,
) -> float:
    """Solve and judge one; its reward."""
    loop = asyncio.get_running_loop()
    asked = tokenizer.encode(await loop.run_in_executor(pool, question, number))
    # Apart, and no session: they have no prefix in common that would keep them together.
    solved = await client.generate(asked, SOLVE)
    note(placed, "solve", solved)
    rewarded = loop.run_in_executor(pool, reward, number, tokenizer.decode(solved.token_ids))
    transcript = [*asked, *solved.token_ids] * (TRANSCRIPT // (len(asked) + SOLVE.max_tokens) + 1)
    note(placed, "judge", await client.generate(transcript[:TRANSCRIPT], JUDGE))
    return await rewarded


async def run(settings: TrainerSettings, tasks: int) -> tuple[Placed, list[float]]:
    """Do all of them, so many at once."""
    tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint)
    placed: Placed = {"solve": Counter(), "judge": Counter()}
    free = asyncio.Semaphore(AT_ONCE)
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, processes) as pool:
        async with RolloutClient(
            settings.gateway,
            settings.timeout_s,
            credentials=settings.credentials(),
            job=settings.job,
        ) as client:

            async def one(number: int) -> float:
                async with free:
                    return await task(client, tokenizer, pool, number, placed)

            return placed, await asyncio.gather(*map(one, range(tasks)))


def main() -> None:
    """Do them, and say which replicas wrote the tokens of which turns."""
    settings = TrainerSettings.from_env()
    # Registers the job; a trainer would publish a version with it after each step.
    with PolicyPublisher(settings):
        placed, rewards = asyncio.run(run(settings, int(sys.argv[1])))
    for kind, tokens in placed.items():
        of = sum(tokens.values())
        shares = ", ".join(f"{name} {100 * n / of:.0f}%" for name, n in sorted(tokens.items()))
        print(f"{kind}: {of} tokens by {shares}")  # noqa: T201
    print(f"{len(rewards)} tasks, mean reward {sum(rewards) / len(rewards):.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
