"""`python -m bench.demo.training.rehearsal --out DIR`: does the recipe learn? Without engines.

The trainer is the demo's own, staleness included. Only turns come from `LocalPolicy`, which samples
them with torch in this process.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from bench.demo.cli import DEFAULT_STEPS
from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.models import ensure_models, load_policy
from bench.demo.training.forward import reply_bias, values_of
from bench.demo.training.records import Control, TrainConfig
from bench.demo.training.trainer import DemoTrainer
from rose.client import Sampling, Turn
from rose.weight_distribution import Receipt
from weight_transfer import TensorBits

GATHER_S = 0.002
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: list[int]
    how: Sampling
    request_id: str
    answer: "asyncio.Future[Turn]"


class LocalPolicy:
    """A turn source and a publisher in one: turns that wait are sampled together."""

    def __init__(self, model: Qwen2ForCausalLM, seed: int) -> None:
        self._model = model
        self._random = torch.Generator().manual_seed(seed)
        self._version = 0
        self._next: tuple[int, Mapping[str, TensorBits]] | None = None
        self._waiting: list[_Asked] = []
        self._working: asyncio.Task[None] | None = None

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        min_version: int | None = None,
    ) -> Turn:
        """One turn, all of it from one version; `min_version` always holds here."""
        answer: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(list(token_ids), sampling, request_id, answer))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await answer

    async def publish(
        self,
        version: int,
        parent: int,
        old: Mapping[str, TensorBits],
        new: Mapping[str, TensorBits],
    ) -> Receipt:
        """Turns that begin from now on are sampled from `new`."""
        started_s = time.perf_counter()
        self._next = (version, new)
        changed = sum(int((old[name].bits != new[name].bits).sum()) for name in new)
        size = sum(tensor.bits.size for tensor in new.values())
        full = sum(tensor.bits.nbytes for tensor in new.values())
        return Receipt(version, 0, full, changed / size, time.perf_counter() - started_s)

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            asked, self._waiting = self._waiting, []
            if self._next:
                self._version, bits = self._next
                self._next = None
                self._model.load_state_dict(values_of(bits), strict=False)
            try:
                turns = await asyncio.to_thread(self._sample, asked)
            except Exception as error:
                for one in asked:
                    one.answer.set_exception(error)
                raise
            for one, turn in zip(asked, turns, strict=True):
                one.answer.set_result(turn)

    def _sample(self, asked: Sequence[_Asked]) -> list[Turn]:
        assert all(one.how == asked[0].how for one in asked), "one kind of sampling at a time"
        greedy = asked[0].how.temperature == 0.0
        replies: list[list[int]] = [[] for _ in asked]
        logprobs: list[list[float]] = [[] for _ in asked]
        with torch.inference_mode():
            decoder = _Decoder(self._model, [one.prompt for one in asked])
            for step in range(asked[0].how.max_tokens):
                logits = decoder.logits + reply_bias()
                if step < asked[0].how.min_tokens:
                    logits[:, vocab.STOP_ID] = float("-inf")
                scores = torch.log_softmax(logits, dim=-1)
                tokens = (
                    scores.argmax(-1, keepdim=True)
                    if greedy
                    else torch.multinomial(scores.exp(), 1, generator=self._random)
                )
                _append(replies, logprobs, tokens, scores.gather(1, tokens))
                if all(reply[-1] == vocab.STOP_ID for reply in replies):
                    break
                decoder.feed(tokens)
        return [
            self._turn(one, reply, values)
            for one, reply, values in zip(asked, replies, logprobs, strict=True)
        ]

    def _turn(self, asked: _Asked, reply: list[int], logprobs: list[float]) -> Turn:
        return Turn(
            request_id=asked.request_id,
            token_ids=tuple(reply),
            logprobs=tuple(logprobs),
            versions=((self._version, 0, len(reply)),),
            segments=((LOCAL, "dedicated", 0, len(reply)),),
            finish_reason="stop" if reply[-1] == vocab.STOP_ID else "length",
            attempts=1,
        )


def _append(
    replies: list[list[int]], logprobs: list[list[float]], tokens: Tensor, scores: Tensor
) -> None:
    """Add a token to every reply that has not stopped."""
    for reply, values, token, score in zip(
        replies, logprobs, tokens[:, 0].tolist(), scores[:, 0].tolist(), strict=True
    ):
        if not reply or reply[-1] != vocab.STOP_ID:
            reply.append(token)
            values.append(score)


class _Decoder:
    """A batch of left-padded prompts and their KV cache; `logits` [batch, vocabulary]."""

    def __init__(self, model: Qwen2ForCausalLM, prompts: Sequence[list[int]]) -> None:
        longest = max(len(prompt) for prompt in prompts)
        rows = [[vocab.PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._model = model
        self._mask = torch.tensor(mask)
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache = None
        self.logits = self._run(torch.tensor(rows))

    def feed(self, tokens: Tensor) -> None:
        """Go on by one token a row, [batch, 1]."""
        self._mask = torch.cat((self._mask, torch.ones_like(tokens)), dim=1)
        self._positions = self._positions[:, -1:] + 1
        self.logits = self._run(tokens)

    def _run(self, tokens: Tensor) -> Tensor:
        result = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = result.past_key_values
        logits: Tensor = result.logits[:, -1]
        return logits


def main(argv: Sequence[str] | None = None) -> int:
    """Train on seeds and print how success rose."""
    parser = argparse.ArgumentParser(prog="bench.demo.training.rehearsal", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("out/models"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--control", choices=get_args(Control), default="none")
    parser.add_argument("--long-turns", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    models = ensure_models(args.cache, args.long_turns, lambda _label, _share: None)
    config = TrainConfig(
        model_dir=models.policy_dir,
        gateway_url="",
        scheduler="",
        out=args.out,
        publish_root=args.out,
        publish_port=0,
        key=args.out,
        seed=args.seed,
        steps=args.steps,
        decay_steps=args.steps,
        control=args.control,
        long_turns=args.long_turns,
    )
    asyncio.run(_rehearse(config))
    return 0


async def _rehearse(config: TrainConfig) -> None:
    events: list[dict[str, Any]] = []
    policy = LocalPolicy(load_policy(config.model_dir), config.seed)
    started_s = time.monotonic()
    await DemoTrainer(config, policy, policy, events.append).run()
    sys.stdout.write(json.dumps(_summary(events, time.monotonic() - started_s)) + "\n")


def _summary(events: Sequence[dict[str, Any]], elapsed_s: float) -> dict[str, object]:
    steps = [event for event in events if event["event"] == "step"]
    evals = {event["which"]: event["success"] for event in events if event["event"] == "eval"}
    fifth = max(1, len(steps) // 5)
    return {
        "steps": len(steps),
        "elapsed_s": round(elapsed_s, 1),
        "reward_first_fifth": round(_mean(steps[:fifth], "reward_mean"), 3),
        "reward_last_fifth": round(_mean(steps[-fifth:], "reward_mean"), 3),
        "held_out_warm_start": round(evals["warm_start"], 3),
        "held_out_final": round(evals["final"], 3),
        "train_s": round(_mean(steps, "train_s"), 3),
        "tokens": round(_mean(steps, "tokens")),
        "spanning_share": round(_mean(steps, "spanning") / _mean(steps, "trajectories"), 3),
        "clip_fraction": round(_mean(steps, "clip_fraction"), 5),
        "density": round(_mean(steps, "density"), 3),
    }


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(step[name]) for step in steps) / len(steps)


if __name__ == "__main__":
    sys.exit(main())
