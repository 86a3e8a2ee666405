"""Evaluation, or data generation: a job without a trainer, on replicas that no trainer needs now.

    python examples/batch_inference.py run/answers.jsonl 200

Asks tasks of reasoning-gym, scores the answers, and appends each task's to the file as soon as it
is done. Started again after whatever ended it, it asks for what is missing: nothing is asked twice
that was written, and nothing is in the file twice.

Where ROSE is says the environment (`ROSE_*`, docs/trainers/front.md).
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import reasoning_gym
from transformers import AutoTokenizer

from rose.client import RolloutClient, Sampling
from rose.integrations import PolicyPublisher, TrainerSettings

TASK, SEED = "basic_arithmetic", 7
SAMPLES = 2
AT_ONCE = 32
SAMPLING = Sampling(max_tokens=16, temperature=1.0)


def answered(path: Path) -> set[int]:
    """Numbers of the tasks that are in the file; half a line, of a run that was killed, goes."""
    if not path.exists():
        return set()
    whole, _, half = path.read_bytes().rpartition(b"\n")
    if half:
        os.truncate(path, len(whole) + (1 if whole else 0))
    return {json.loads(line)["task"] for line in whole.splitlines()}


async def run(settings: TrainerSettings, path: Path, tasks: int) -> None:
    """Ask for all that is missing."""
    dataset = reasoning_gym.create_dataset(
        TASK, seed=SEED, size=tasks, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint)
    missing = sorted(set(range(tasks)) - answered(path))
    print(f"{tasks - len(missing)} of {tasks} tasks are answered already", flush=True)  # noqa: T201
    free = asyncio.Semaphore(AT_ONCE)

    async with RolloutClient(
        settings.gateway, settings.timeout_s, credentials=settings.credentials(), job=settings.job
    ) as client:

        async def one(number: int) -> None:
            entry = dataset[number]
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": entry["question"]}],
                add_generation_prompt=True,
                return_dict=False,
            )
            samples = []
            async with free, client.gather_group(prompt, SAMPLING, SAMPLES) as group:
                async for member in group:
                    if member.turn is None:
                        raise member.error or RuntimeError("a sample without a turn")
                    text = tokenizer.decode(member.turn.token_ids, skip_special_tokens=True)
                    score = dataset.score_answer(text.strip(), entry)
                    samples.append({"text": text, "score": score})
            line = json.dumps({"task": number, "question": entry["question"], "samples": samples})
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

        async with asyncio.TaskGroup() as group:
            for number in missing:
                group.create_task(one(number))


def main() -> None:
    """Ask, then say how good the answers were."""
    path, tasks = Path(sys.argv[1]), int(sys.argv[2])
    settings = TrainerSettings.from_env()
    # Registers the job and publishes nothing: replicas serve the checkpoint, version 0.
    with PolicyPublisher(settings):
        asyncio.run(run(settings, path, tasks))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    scores = [sample["score"] for row in rows for sample in row["samples"]]
    print(f"{TASK}: {len(rows)} tasks, mean score {sum(scores) / len(scores):.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
