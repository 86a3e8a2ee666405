"""GRPO on a game of several turns: TRL as released, GEM's GuessTheNumber, rollouts through ROSE.

pip install 'rose-rollout[trl]'
pip install reasoning-gym==0.1.23 && pip install --no-deps gem-llm==0.1.0
python examples/trl_grpo.py models/policy 40

The environment says where ROSE is (`ROSE_GATEWAY` and others, see docs/trainers/trl.md, which also
has all that it printed). A policy of random weights, on two CPU cores, 73 s:

    step 10: won -0.10, drift 0.0011
    step 50: won 0.21, drift 0.0029
    step 100: won 0.63, drift 0.0000
    version 100 is served
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import gem
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from rose.client import Sampling
from rose.integrations import TrainerSettings
from rose.integrations.trl import use

ASKED, LOW, HIGH = "guess 1-9: ", " too low: ", " too high: "
TURNS, GAMES, GROUP = 4, 32, 8

settings = TrainerSettings.from_env()
publisher = use(settings)  # from here on `vllm_mode="server"` means ROSE
client = settings.client()


def new_game(seed: str) -> gem.Env:
    """One that is the same for all of a group."""
    game = gem.make("game:GuessTheNumber-v0-easy", max_turns=TURNS)
    game.reset(seed=int(seed))
    return game


def play(tokenizer: PreTrainedTokenizerBase, game: gem.Env) -> tuple[object, ...]:
    """Play it in one session, so that turns go where their prefix is. A token is a move."""
    asked = tokenizer.encode(ASKED)
    said, logprobs, mask, won, over = [], [], [], 0.0, False
    with client.session() as session:
        while not over:
            oldest = publisher.oldest_allowed  # no staler than the job's bound
            turn = session.generate([*asked, *said], Sampling(max_tokens=1), min_version=oldest)
            move = tokenizer.decode(turn.token_ids)
            seen, reward, ended, stopped, _ = game.step(f"\\boxed{{{move}}}")
            won, over = won + reward, ended or stopped
            hint = [] if over else tokenizer.encode(LOW if "higher" in seen else HIGH)
            said += [*turn.token_ids, *hint]
            logprobs += [*turn.logprobs, *[0.0] * len(hint)]
            mask += [1, *[0] * len(hint)]  # what the game says is not trained on
    return asked, said, logprobs, mask, won


def rollout(seeds: list[str], trainer: GRPOTrainer) -> dict[str, list[object]]:
    """Play all games of a step at once."""
    games = [new_game(seed) for seed in seeds]
    with ThreadPoolExecutor(len(games)) as pool:
        rows = pool.map(lambda game: play(trainer.processing_class, game), games)
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "won")
        return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def reward(won: list[float], **_: object) -> list[float]:
    """Return what the games gave."""
    return won


def main(model: str, steps: int) -> None:
    """Train; a version is published after each step, while nothing stops."""
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in range(256)]}),
        args=GRPOConfig(
            output_dir="run/trl",
            use_vllm=True,
            vllm_mode="server",
            max_steps=steps,
            per_device_train_batch_size=GAMES,
            num_generations=GROUP,
            max_completion_length=64,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
    )
    trainer.train()
    for row in trainer.state.log_history:
        if "reward" in row:
            drift = row["sampling/sampling_logp_difference/mean"]
            print(f"step {row['step']}: won {row['reward']:.2f}, drift {drift:.4f}")  # noqa: T201
    print(f"version {publisher.version} is served")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
