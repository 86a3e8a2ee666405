"""Published figures of a host under the options that production hosts have, on vLLM's schedulers.

At the end of every step the page is compared with what the scheduler's requests say themselves.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_cases import BLOCK_TOKENS, HostRig, host_of, prompt_of
from vllm import PoolingParams, SamplingParams
from vllm.config import KVTransferConfig, LoRAConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from executor.control_page.seqlock_records import NO_DEADLINE
from executor.vllm.host.latency_logger import HostLatencyLogger, latency_record

__all__ = ["host_of"]
TTFT_S, TPOT_S = 5.0, 1.0
DRAFTS = 3


def drafts(config: VllmConfig) -> None:
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=DRAFTS,
        prompt_lookup_max=3,
        prompt_lookup_min=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )


def lookahead(config: VllmConfig) -> None:
    """A draft model's drafts (EAGLE, MTP): they have KV of their own."""
    drafts(config)
    assert config.speculative_config is not None
    config.speculative_config.method = "draft_model"


def connected(role: Any, folder: Path) -> Callable[[VllmConfig], None]:
    def configure(config: VllmConfig) -> None:
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": str(folder / "kv")},
        )

    return configure


def one_at_a_time(config: VllmConfig) -> None:
    config.scheduler_config.max_num_seqs = 1


def by_priority(config: VllmConfig) -> None:
    config.scheduler_config.policy = "priority"


class Model:
    """A stand-in model that takes any number of drafts; a pooling request has no tokens."""

    def __init__(self, scheduler: Any) -> None:
        self._requests = scheduler.requests
        self._rng = random.Random(1)

    def execute(self, output: Any) -> ModelRunnerOutput:
        """Answer a step that was scheduled just now."""
        ids = list(output.num_scheduled_tokens)
        pooled: list[torch.Tensor | None] = []
        sampled: list[list[int]] = []
        for name in ids:
            request = self._requests[name]
            guessed = len(output.scheduled_spec_decode_tokens.get(name, ()))
            whole = request.num_computed_tokens - guessed >= request.num_prompt_tokens
            pools = request.pooling_params is not None
            pooled.append(torch.zeros(2) if whole and pools else None)
            tokens = 1 + self._rng.randint(0, guessed) if whole and not pools else 0
            sampled.append([7] * tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=sampled,
            pooler_output=pooled,
        )


class Watched:
    """A host's scheduler, whose page is compared with its requests at the end of every step."""

    def __init__(self, rig: HostRig, *, prefills: bool = True) -> None:
        self.rig, self.scheduler = rig, rig.scheduler
        self._model = Model(self.scheduler)
        self._prefills = prefills
        self._rng = random.Random(2)
        self.arrived_ns: dict[str, int] = {}
        self.most_running = self.steps = 0

    def add(self, name: str, tokens: int, output: int, *, pools: bool = False, **more: Any) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        request = Request(
            name,
            prompt_of(self._rng, tokens),
            None if pools else sampling,
            pooling_params=PoolingParams(task="embed") if pools else None,
            block_hasher=self.rig.hasher,
            **more,
        )
        self.arrived_ns[name] = time.monotonic_ns()
        self.scheduler.add_request(request)

    def step(self) -> None:
        in_flight = self.rig.in_flight
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            in_flight.append((output, self._model.execute(output)))
        # Now and then the steps in flight end before another begins: then the page is exact.
        pauses = not self.scheduler.has_requests() or self._rng.random() < 0.2
        while in_flight and (pauses or len(in_flight) == self.rig.depth):
            output, answer = in_flight.popleft()
            self.scheduler.update_from_output(output, answer)
            self._draft(output)
            self.steps += bool(output.total_num_scheduled_tokens)
        if not in_flight:
            self.check()

    def _draft(self, output: Any) -> None:
        if self.scheduler.num_spec_tokens:
            ids = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
            guesses = [[7] * self._rng.randint(0, DRAFTS) for _ in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, guesses))

    def run(self, steps: int = 400) -> None:
        for _ in range(steps):
            self.step()
            if not self.scheduler.requests and not self.rig.in_flight:
                return
        raise AssertionError(f"not done after {steps} steps")

    def check(self) -> None:
        state, requests = self.rig.published, self.scheduler.requests
        running, waiting = self.scheduler.get_request_counts()
        assert (state.running, state.waiting) == (running, waiting)
        assert not state.in_step
        waits = [r for r in requests.values() if not r.num_output_tokens]
        queued = sum(max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in waits)
        # A prefix in the cache is no longer to be computed, but that is known only when it runs.
        most = sum(r.num_prompt_tokens for r in waits)
        assert (
            queued <= state.queued_prefill_tokens <= most
            if self._prefills
            else (state.queued_prefill_tokens == 0)
        )
        decodes = len(requests) > len(waits)
        assert (state.earliest_decode_deadline_ns != NO_DEADLINE) == decodes
        if waits and self._prefills:
            first = min(self.arrived_ns[r.request_id] for r in waits)
            late_s = state.earliest_prefill_deadline_ns / 1e9 - first / 1e9 - TTFT_S
            assert abs(late_s) < 0.2
        else:
            assert state.earliest_prefill_deadline_ns == NO_DEADLINE
        pool = self.rig.blocks
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        assert (state.kv_used, state.step_seq) == (used, self.steps)
        assert state.idle == (not requests)
        self.most_running = max(self.most_running, running)


@pytest.fixture(autouse=True)
def targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_SLO_TTFT_S", str(TTFT_S))
    monkeypatch.setenv("ROSE_SLO_TPOT_S", str(TPOT_S))


OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "asynchronous": ({"depth": 2}, None),
    "without a prefix cache": ({"caching": False}, None),
    "one sequence": ({}, one_at_a_time),
    "priorities": ({}, by_priority),
    "n-gram drafts": ({}, drafts),
    "a draft model": ({}, lookahead),
    "prefill only": ({}, "kv_producer"),
    "decode only": ({}, "kv_consumer"),
    "both, with a connector": ({}, "kv_both"),
}


@pytest.mark.parametrize("level", ["observe", "lend"])
@pytest.mark.parametrize("option", OPTIONS)
def test_figures_are_the_schedulers_own(
    option: str, level: str, host_of: Callable[..., HostRig], tmp_path: Path
) -> None:
    fields, configure = OPTIONS[option]
    if isinstance(configure, str):
        configure = connected(configure, tmp_path)
    host = Watched(
        host_of(level=level, **fields, configure=configure or (lambda _: None)),
        prefills=option != "decode only",
    )
    output = 1 if option == "prefill only" else 12
    for number in range(6):
        host.add(f"r{number}", 30 + 40 * number, output)
        host.step()
    host.run()
    for number in range(6, 9):
        host.add(f"r{number}", 400, output)
    host.run()
    assert host.most_running >= (1 if option in ("one sequence", "prefill only") else 2)
    assert host.rig.published.idle
    lends = level == "lend" and "kv_" not in str(OPTIONS[option][1])
    assert (host.scheduler.lender is not None) == lends, "a connector may read free blocks"


def test_a_pooling_host_is_busy_until_its_answers_are_there(
    host_of: Callable[..., HostRig],
) -> None:
    host = Watched(host_of())
    for number in range(4):
        host.add(f"r{number}", 480 if number == 2 else 60, 1, pools=True)
        host.step()
    host.run()
    assert host.steps > 2
    assert host.rig.published.idle


def test_adapters_that_wait_for_a_slot_wait_on_the_page_too(
    host_of: Callable[..., HostRig],
) -> None:
    def configure(config: VllmConfig) -> None:
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1)

    host = Watched(host_of(configure=configure))
    for number in range(4):
        adapter = LoRARequest(f"adapter-{number % 2}", 1 + number % 2, "/adapter")
        host.add(f"r{number}", 60, 8, lora_request=adapter)
    host.step()
    host.step()
    assert host.rig.published.waiting == 2
    host.run()
    assert host.rig.published.idle


def test_a_prompt_with_images_is_queued_with_their_placeholders(
    host_of: Callable[..., HostRig],
) -> None:
    """The encoder's budget lets one image a step through, so that a prompt takes several."""
    host = Watched(host_of())
    host.scheduler.max_num_encoder_input_tokens = 64
    host.scheduler.encoder_cache_manager = EncoderCacheManager(64)
    for number in range(3):
        images = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=f"image-{number}-{place}",
                mm_position=PlaceholderRange(offset=place, length=50),
            )
            for place in (10, 100)
        ]
        host.add(f"r{number}", 180, 4, mm_features=images)
    host.run()
    assert host.steps > 6
    assert host.rig.published.idle


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_host_that_sleeps_with_requests_is_not_idle(
    state: PauseState, host_of: Callable[..., HostRig]
) -> None:
    """Sleep mode pauses the scheduler: what waits will run at once when it wakes."""
    host = Watched(host_of())
    host.scheduler.set_pause_state(state)
    host.add("r0", 60, 4)
    host.step()
    assert not host.rig.published.idle
    host.scheduler.set_pause_state(PauseState.UNPAUSED)
    host.run()
    assert host.rig.published.idle


def finished(reason: FinishReason, tokens: int, *, decode_s: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        request_id="cmpl-users-own-0",
        finish_reason=reason,
        e2e_latency=0.5,
        decode_time=decode_s,
        mean_time_per_output_token=decode_s / max(1, tokens - 1),
        num_prompt_tokens=BLOCK_TOKENS,
        num_generation_tokens=tokens,
    )


@pytest.mark.parametrize(
    ("end", "ms"),
    [
        (finished(FinishReason.LENGTH, 11, decode_s=0.4), (100, 40, 500)),
        (finished(FinishReason.ABORT, 11, decode_s=0.4), (100, 40, 500)),
        (finished(FinishReason.LENGTH, 1), (500, 0, 500)),
        (finished(FinishReason.STOP, 0), (500, 0, 500)),
        (finished(FinishReason.ABORT, 0), None),
        (finished(FinishReason.ERROR, 0), None),
    ],
    ids=["generated", "aborted late", "prefill only", "pooled", "aborted early", "failed"],
)
def test_each_request_with_an_answer_has_its_latencies(
    end: Any, ms: tuple[int, int, int] | None, host_of: Callable[..., HostRig]
) -> None:
    rig = host_of(level="observe")
    HostLatencyLogger(None).record(None, SimpleNamespace(finished_requests=[end]))
    found = [
        tuple(round(ns / 1e6) for ns in (record.ttft_ns, record.tpot_ns, record.e2e_ns))
        for record in rig.page.latency.drain().records
    ]
    assert found == ([] if ms is None else [ms])


def test_a_host_that_decodes_only_has_no_ttft_of_its_own() -> None:
    end: Any = finished(FinishReason.LENGTH, 11, decode_s=0.4)
    record = latency_record(end, 1, prefilled=False)
    assert (record.ttft_ns, round(record.tpot_ns / 1e6)) == (0, 40)
