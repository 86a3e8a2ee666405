"""Turn source without engines: a policy read greedily with torch in this process, in batches."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from bench.demo.frozen_lake import vocab
from bench.demo.training.forward import reply_bias
from rose.client import Sampling, Turn

GATHER_S = 0.002
NAME = "local"


@dataclass(frozen=True, slots=True)
class _Request:
    request_id: str
    prompt: list[int]
    sampling: Sampling
    turn: "asyncio.Future[Turn]"


class LocalPolicy:
    """Turn source that decodes all waiting requests together; every turn is of version 0."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self._model = model
        self._waiting: list[_Request] = []
        self._decoding: asyncio.Task[None] | None = None

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        min_version: int | None = None,
    ) -> Turn:
        """Generate one turn greedily."""
        assert sampling.temperature == 0.0, "the policy is read greedily"
        turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(request_id, list(token_ids), sampling, turn))
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode_waiting())
        return await turn

    async def _decode_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            requests, self._waiting = self._waiting, []
            try:
                turns = await asyncio.to_thread(self._decode, requests)
            except Exception as error:
                for request in requests:
                    request.turn.set_exception(error)
                raise
            for request, turn in zip(requests, turns, strict=True):
                request.turn.set_result(turn)

    def _decode(self, requests: Sequence[_Request]) -> list[Turn]:
        sampling = requests[0].sampling
        assert all(request.sampling == sampling for request in requests), "one kind of sampling"
        replies: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        with torch.inference_mode():
            decoder = _Decoder(self._model, [request.prompt for request in requests])
            for step in range(sampling.max_tokens):
                logits = decoder.logits + reply_bias()
                if step < sampling.min_tokens:
                    logits[:, vocab.STOP_ID] = float("-inf")
                scores, tokens = torch.log_softmax(logits, dim=-1).max(-1)
                for row, (token, score) in enumerate(
                    zip(tokens.tolist(), scores.tolist(), strict=True)
                ):
                    if vocab.STOP_ID not in replies[row][-1:]:
                        replies[row].append(token)
                        logprobs[row].append(score)
                if all(reply[-1] == vocab.STOP_ID for reply in replies):
                    break
                decoder.feed(tokens[:, None])
        return [
            Turn(
                request_id=request.request_id,
                token_ids=tuple(reply),
                logprobs=tuple(scores),
                versions=((0, 0, len(reply)),),
                segments=((NAME, "dedicated", 0, len(reply)),),
                finish_reason="stop" if reply[-1] == vocab.STOP_ID else "length",
                attempts=1,
            )
            for request, reply, scores in zip(requests, replies, logprobs, strict=True)
        ]


class _Decoder:
    """Batch of left-padded prompts and their KV cache; `logits` [batch, vocabulary]."""

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
        """Append one token to each row, [batch, 1]."""
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
