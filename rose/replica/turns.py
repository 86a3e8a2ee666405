"""Runs turns on the engine and knows which are running."""

from collections.abc import AsyncIterator
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rose.replica.versions import VersionStamps, split_spans
from rose.replica.wire import Chunk, Finish, GenerateBody, Sampling


class TurnRunner:
    """Turns of this replica, each an async iterator of chunks and one finish."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
        self._engine = engine
        self._running: set[str] = set()
        self._revoked: set[str] = set()
        self._serial = 0
        self.tokens_total = 0

    @property
    def running(self) -> int:
        """Turns that have not ended."""
        return len(self._running)

    async def revoke_all(self) -> int:
        """End every turn; each stream first delivers the tokens it has. Returns how many."""
        ids = list(self._running)
        self._revoked.update(ids)
        if ids:
            await self._engine.abort(ids)
        return len(ids)

    async def run(self, body: GenerateBody) -> AsyncIterator[Chunk | Finish]:
        """Generate one turn; never raises for what the engine refuses, it says so in the finish."""
        # The engine's id is ours: a turn that comes back after a revocation keeps its request id.
        self._serial += 1
        engine_id = f"{body.request_id}#{self._serial}"
        self._running.add(engine_id)
        try:
            async for record in self._generate(body, engine_id):
                yield record
        except ValueError as error:
            yield Finish("error", str(error))
        finally:
            self._running.discard(engine_id)
            self._revoked.discard(engine_id)

    async def _generate(self, body: GenerateBody, engine_id: str) -> AsyncIterator[Chunk | Finish]:
        prompt: dict[str, Any] = {"prompt_token_ids": body.token_ids}
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        stream = self._engine.generate(
            prompt, _parameters(body.sampling), engine_id, priority=body.priority
        )
        stamps: VersionStamps | None = None
        sent = 0
        async for output in stream:
            completion = output.outputs[0]
            if stamps is None or not stamps.known:
                stamps = VersionStamps(self._engine.output_processor, engine_id)
            tokens = list(completion.token_ids)
            if tokens:
                for chunk in _chunks(tokens, completion, stamps, sent):
                    yield chunk
                sent += len(tokens)
                self.tokens_total += len(tokens)
            if completion.finish_reason is not None:
                yield Finish(self._reason(engine_id, completion.finish_reason))
                return

    def _reason(self, engine_id: str, reason: str) -> str:
        return "revoked" if engine_id in self._revoked and reason == "abort" else reason


def _chunks(
    tokens: list[int],
    completion: Any,  # noqa: ANN401 - vLLM's CompletionOutput
    stamps: VersionStamps,
    first: int,
) -> list[Chunk]:
    logprobs = [
        position[token].logprob for token, position in zip(tokens, completion.logprobs, strict=True)
    ]
    spans = _finished_spans(completion, first, len(tokens)) or stamps.split(first, len(tokens))
    return [Chunk(tokens[a:b], logprobs[a:b], version) for version, a, b in spans]


def _finished_spans(
    completion: Any,  # noqa: ANN401 - vLLM's CompletionOutput
    first: int,
    count: int,
) -> list[tuple[int, int, int]]:
    """The engine's own spans, which a finished request carries with it."""
    spans = completion.weight_versions
    if not spans:
        return []
    return split_spans([(span.version, span.start) for span in spans], first, count)


def _parameters(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        allowed_token_ids=sampling.allowed_token_ids,
        seed=sampling.seed,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
