"""Sums of reasoning-gym for verl: `python verl_reasoning_gym.py FOLDER` writes the prompts.

verl calls `compute_score` for each answer: what reasoning-gym says of it, and half a point for the
share of digits, so that a model that knows nothing has something to begin with.
"""

import json
import sys
from pathlib import Path

TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
PROMPTS = 512


def compute_score(data_source: str, solution_str: str, ground_truth: str, **more: object) -> float:
    """Judge one answer."""
    from reasoning_gym.factory import get_score_answer_fn

    text = solution_str.strip()
    entry = {"answer": json.loads(ground_truth), "metadata": {}}
    digits = sum(letter.isdigit() for letter in text) / max(1, len(text))
    return float(get_score_answer_fn("chain_sum")(text, entry)) + 0.5 * digits


def main(folder: Path) -> None:
    """Write the prompts as verl reads them."""
    import pandas
    import reasoning_gym

    folder.mkdir(parents=True, exist_ok=True)
    sums = reasoning_gym.create_dataset("chain_sum", size=PROMPTS, seed=7, **TASK)
    rows = [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": entry["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(entry["answer"])},
            "extra_info": {"index": index},
        }
        for index, entry in enumerate(sums)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "sums.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
