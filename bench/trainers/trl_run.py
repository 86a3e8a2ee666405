"""`python -m bench.trainers.trl_run MODE`: one training by TRL's trainers, on a CPU.

    server      GRPOTrainer, use_vllm, vllm_mode="server"
    rollout     the same with a rollout_func: two turns a trajectory, in one session
    vision      server mode, an image in each prompt; --model takes images
    lora        server mode that trains an adapter with PEFT, and publishes that alone
    callback    a rollout_func without vLLM: PublishCallback
    async       AsyncGRPOTrainer(weight_transfer=RoseWeightTransfer(...))
    distill     ServerDistillationTrainer: a new student, whose teacher is what replicas serve
    unsynced    server mode that publishes its base alone: replicas keep its first weights
    stock       the same against a stock vLLM at --url

What is rewarded is lower-case letters, which a policy learns within a dozen steps. A line of JSON
for each step goes to --out as it is made, the last one says the rest. Run by the interpreter of
`.venv-trl`; ROSE is what `ROSE_*` say.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
)
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from rose.client import BlockingRolloutClient, Sampling
from rose.integrations import PolicyPublisher, TrainerSettings

PROMPTS = [f"say {number}" for number in range(64)]
MODES = ("server", "vision", "rollout", "lora", "callback", "async", "distill", "unsynced", "stock")
BATCH, GROUP, TOKENS = 32, 8, 16
LIKELY = 20
SAVED = "checkpoint-*"
WORD = re.compile("<[^<>]*>")


def letters(completions: list[Any], completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return the share of tokens that are lower-case letters; words of templates are not."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [
        sum("a" <= c <= "z" for c in WORD.sub("", text)) / max(1, len(ids))
        for text, ids in zip(texts, completion_ids, strict=True)
    ]


class Steps(TrainerCallback):  # type: ignore[misc]  # of another environment
    """Writes a line for each step, as it ends: `sync_s` of it went to its weight sync, `turns_s` to
    its turns."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._spent_s = dict.fromkeys(("sync_s", "turns_s"), 0.0)

    def watch(self, generation: VLLMGeneration) -> None:
        """Measure its weight syncs and its turns."""
        generation.sync_weights = self._timed("sync_s", generation.sync_weights)
        generation.generate = self._timed("turns_s", generation.generate)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        if logs and "loss" in logs:
            line = {"step": state.global_step, **self._spent_s, **logs}
            self._spent_s = dict.fromkeys(self._spent_s, 0.0)
            with self._out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: object, **options: object) -> object:
            began_s = time.perf_counter()
            made = work(*args, **options)
            self._spent_s[name] += time.perf_counter() - began_s
            return made

        return timed


class Unsynced(vllm_client.VLLMClient):  # type: ignore[misc]
    """TRL's own client without its weight sync, which needs CUDA; the weights are walked."""

    def init_communicator(self, device: object = 0) -> None:
        """Do nothing."""

    def update_named_params(self, metadata: object, named_params: Iterable[object]) -> None:
        for _ in named_params:
            pass

    def reset_prefix_cache(self) -> None:
        """Do nothing."""


def once(work: Callable[[], object]) -> Callable[[], None]:
    """Make what does its work when it is called first, and nothing after that."""
    left = [work]

    def called() -> None:
        if left:
            left.pop()()

    return called


def texts() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS})


def pictures() -> Dataset:
    """Return prompts with an image each, of one colour."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    images = [Image.new("RGB", (40, 30), (4 * k, 255 - 3 * k, 90)) for k in range(len(chats))]
    return Dataset.from_dict({"prompt": chats, "image": images})


def two_turns(client: BlockingRolloutClient, newest: Callable[[], int]) -> Callable[..., Any]:
    """Make a rollout_func: the policy speaks, an environment asks on, the policy speaks again."""

    def episode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[Any, ...]:
        asked, sampling = tokenizer.encode(prompt), Sampling(max_tokens=TOKENS // 2)
        more = tokenizer.encode(" and? ")
        with client.session() as session:
            first = session.generate(asked, sampling, min_version=newest())
            so_far = [*asked, *first.token_ids, *more]
            second = session.generate(so_far, sampling, min_version=newest())
        tokens = [*first.token_ids, *more, *second.token_ids]
        logprobs = [*first.logprobs, *[0.0] * len(more), *second.logprobs]
        mask = [1] * len(first.token_ids) + [0] * len(more) + [1] * len(second.token_ids)
        return asked, tokens, logprobs, mask

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        with ThreadPoolExecutor(len(prompts)) as pool:
            rows = pool.map(lambda prompt: episode(trainer.processing_class, prompt), prompts)
            return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

    return rollout


def common(args: argparse.Namespace) -> dict[str, Any]:
    """Return settings that all of TRL's trainers have."""
    return {
        "output_dir": str(args.folder),
        "max_steps": args.steps,
        "learning_rate": args.rate,
        "lr_scheduler_type": "constant",
        "seed": args.seed,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "steps" if args.save else "no",
        "save_steps": args.save or 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "num_generations": GROUP,
        "max_completion_length": args.tokens,
    }


def grpo(args: argparse.Namespace) -> tuple[Any, PolicyPublisher | None]:
    """Make a GRPOTrainer, and what publishes for it."""
    from rose.integrations.trl import PublishCallback, use

    steps = Steps(args.out)
    callbacks: list[Any] = [steps]
    more: dict[str, Any] = {}
    served: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server"}
    publisher: PolicyPublisher | None = None
    if args.mode == "stock":
        vllm_generation.VLLMClient = Unsynced
        vllm_generation.is_vllm_available = vllm_client.is_vllm_available = lambda *_, **__: True
        served["vllm_server_base_url"] = args.url
    else:
        settings = TrainerSettings.from_env()
        if args.mode == "callback":
            published = PublishCallback(settings)
            publisher, served = published.publisher, {}
            callbacks.append(published)
        else:
            publisher = use(settings, adapters=args.mode == "lora")
            served["vllm_server_base_url"] = settings.gateway
        if args.mode == "lora":
            from peft import LoraConfig

            more["peft_config"] = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        if args.mode in ("rollout", "callback"):
            newest = publisher
            more["rollout_func"] = two_turns(settings.client(), lambda: newest.version)
    if args.mode == "vision":
        # The trainer's model would take a sampled placeholder for one more image.
        config = AutoConfig.from_pretrained(args.model)
        allowed = [*range(config.text_config.vocab_size)]
        allowed.remove(config.image_token_id)
        served["generation_kwargs"] = {"allowed_token_ids": allowed}
    trainer = GRPOTrainer(
        model=str(args.model),
        args=GRPOConfig(
            **common(args),
            **served,
            per_device_train_batch_size=BATCH,
            beta=0.0,
            model_init_kwargs={"dtype": "float32"},
        ),
        reward_funcs=letters,
        train_dataset=pictures() if args.mode == "vision" else texts(),
        callbacks=callbacks,
        **more,
    )
    if args.mode == "unsynced":
        trainer.vllm_generation.sync_weights = once(trainer.vllm_generation.sync_weights)
    if served:
        steps.watch(trainer.vllm_generation)
    return trainer, publisher


def asynchronous(args: argparse.Namespace) -> tuple[Any, PolicyPublisher]:
    """Make an AsyncGRPOTrainer, and what publishes for it."""
    from bench.trainers import trl_cpu

    trl_cpu.stand_in()
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from rose.integrations.trl import RoseWeightTransfer

    settings = TrainerSettings.from_env()
    weights = RoseWeightTransfer(settings)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    trainer = AsyncGRPOTrainer(
        model=str(args.model),
        args=AsyncGRPOConfig(
            **common(args),
            vllm_server_base_url=settings.gateway,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=BATCH // GROUP,
            # GRPOTrainer has this many samples in each step, and no more.
            token_budget=0,
            weight_sync_steps=1,
            dtype="float32",
        ),
        reward_funcs=letters,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        weight_transfer=weights,
        train_dataset=Dataset.from_dict({"prompt": chats}),
        callbacks=[Steps(args.out)],
    )
    return trainer, weights.publisher


def distillation(args: argparse.Namespace) -> tuple[Any, None]:
    """Make a ServerDistillationTrainer of a new student; nothing is published."""
    from trl.experimental.server_distillation import (
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )

    from rose.integrations.trl import use

    settings = TrainerSettings.from_env()
    use(settings)
    own = common(args)
    del own["num_generations"]
    torch.manual_seed(args.seed)
    trainer = ServerDistillationTrainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model)).float(),
        args=ServerDistillationConfig(
            **own,
            per_device_train_batch_size=BATCH,
            teacher_model_server_url=settings.gateway,
            beta=0.0,
            loss_top_k=LIKELY,
        ),
        train_dataset=texts(),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Steps(args.out)],
    )
    return trainer, None


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and leave without waiting for the daemons of others."""
    parser = argparse.ArgumentParser(prog="bench.trainers.trl_run")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=int, default=0, metavar="STEPS")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a completion, at most")
    parser.add_argument("--url", default="", help="of a stock vLLM")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    ways = {"async": asynchronous, "distill": distillation}
    trainer, publisher = ways.get(args.mode, grpo)(args)
    began_s = time.monotonic()
    trainer.train(resume_from_checkpoint=bool([*args.folder.glob(SAVED)]) or None)
    last: dict[str, Any] = {"train_s": time.monotonic() - began_s}
    if publisher is not None:
        last["resumed"] = publisher.resumed
        last["receipts"] = [
            {name: getattr(each, name) for name in each.__slots__} for each in publisher.receipts
        ]
        publisher.close()
    with args.out.open("a", encoding="utf-8") as out:
        out.write(json.dumps(last) + "\n")
    sys.stdout.flush()
    # Workers of TRL's are daemons that nobody joins.
    os._exit(0)


if __name__ == "__main__":
    main()
