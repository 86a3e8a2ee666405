"""AsyncLLM without an engine core: vLLM's own output processing, steps scripted by the test."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists


def logprob_of(token: int) -> float:
    return -token / 4


class FakeAsyncLLM:
    """Every step gives each request its next token: 0, 1, 2, … with logprob -token / 4; the most
    likely ones are 99, 100, … with logprobs -9, -10, … With `rank` the next token is one of them.
    """

    rank = 0

    def __init__(self, stream_interval: int = 1) -> None:
        self.output_processor = OutputProcessor(
            None, log_stats=False, stream_interval=stream_interval
        )
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=4, block_size=32),
            scheduler_config=SimpleNamespace(max_num_seqs=6, max_num_batched_tokens=64),
            aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
            model_config=SimpleNamespace(
                model="/nowhere",
                max_model_len=100,
                get_vocab_size=lambda: 96,
                hf_config=SimpleNamespace(eos_token_id=None),
            ),
        )
        self.renderer = SimpleNamespace(get_eos_token_id=lambda: None)
        self.model_config = self.vllm_config.model_config
        self.weight_version: str | None = "default"
        self.prompts: list[Mapping[str, Any]] = []
        self.parameters: list[SamplingParams] = []
        self._routes_from: dict[str, int] = {}
        self.core_aborts: list[str] = []
        self.traces: list[dict[str, str] | None] = []
        self.resets, self.resets_after = 0, 1
        self.refuse_with: Exception | None = None
        self.adding = asyncio.Event()
        self.adding.set()

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        trace_headers: dict[str, str] | None = None,
    ) -> RequestOutputCollector:
        await self.adding.wait()
        self.traces.append(trace_headers)
        if self.refuse_with is not None:
            raise self.refuse_with
        self.prompts.append(prompt)
        self.parameters.append(params)
        name = f"{request_id}-internal-{len(self.prompts)}"
        self._routes_from[name] = params.routed_experts_prompt_start
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=prompt.get("cache_salt"),
            data_parallel_rank=None,
            priority=priority,
            external_req_id=request_id,
        )
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        self.output_processor.add_request(request, None, None, 0, queue)
        return queue

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.resets_after <= self.resets and not self.live

    async def abort(self, request_ids: list[str], internal: bool = False) -> None:
        self.core_aborts += self.output_processor.abort_requests(request_ids, internal)

    @property
    def live(self) -> int:
        return len(self.output_processor.request_states)

    def step(self, finish: FinishReason | None = None) -> None:
        outputs = []
        for name, state in self.output_processor.request_states.items():
            token = state.detokenizer.num_output_tokens()
            likely = range(max(1, state.logprobs_processor.num_logprobs))
            ids = np.array([[token, *[99 + each for each in likely]]])
            values = np.array([[logprob_of(token), *[-9.0 - each for each in likely]]])
            if self.rank <= len(likely):
                ids[0, self.rank], values[0, self.rank] = token, logprob_of(token)
            logprobs = LogprobsLists(ids, values, np.array([self.rank or 1]))
            outputs.append(
                EngineCoreOutput(
                    name,
                    [token],
                    new_logprobs=logprobs,
                    finish_reason=finish,
                    routed_experts=self._routes(name, state.prompt_len + token, token == 0),
                )
            )
        self.output_processor.process_outputs(outputs, weight_version=self.weight_version)

    def _routes(self, name: str, length: int, first: bool) -> np.ndarray | None:
        """Return the experts of the positions that are new before a token: of position p those are
        [[p, p + 1], [p + 2, p + 3]].
        """
        if not self.vllm_config.aux_output_config.enable_return_routed_experts:
            return None
        start = min(self._routes_from[name], length) if first else length - 1
        places = np.arange(start, length, dtype=np.uint8).reshape(-1, 1, 1)
        return places + np.array([[0, 1], [2, 3]], dtype=np.uint8)
