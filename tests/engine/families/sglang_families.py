"""Program: tries each named family on a real SGLang, its weights and its KV memory.

`python -m tests.engine.families.sglang_families FOLDER NAME…` by an interpreter that has SGLang
writes FOLDER/NAME.sglang.json and NAME.sglang.kv.json, see `UpdateOutcome` and `KvOutcome`. A
scheduler runs in a process forked from this one, which has imported SGLang once.
"""

import os
import sys
import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from executor.engine_settings import EngineSettings
from executor.kv import backing
from executor.sglang.compat import stand_around
from executor.sglang.guest.plugin import GuestHooks
from executor.sglang.host.plugin import HostHooks
from executor.sglang.kv_pool import kv_tensors
from tests.engine.families import family_kv, family_updates
from tests.engine.families.family_kv import GUEST, FamilyEngine, KvOutcome
from tests.engine.families.family_updates import (
    PROMPTS,
    FamilyReplica,
    UpdateOutcome,
    try_each,
    warm,
)
from weight_transfer.sglang import SglangWeightWorker

ENGINE = "SGLang"
KV_TOKENS = 16384
RUN_BYTES = 32 << 10
"""Memory of a granule in each tensor: less than a turn's, so that some do not fit the guest."""
IDLE_S = 0.1
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ROSE_POLICY_VERSION": "0",
    "SGLANG_PLUGINS": "none",
    # Its CPU kernels are vLLM's, which ask for their platform.
    "VLLM_TARGET_DEVICE": "cpu",
}


class Outputs(list[Any]):
    """Messages of a scheduler, in the place of its sockets."""

    def send_output(self, output: Any, *_: object) -> None:
        self.append(output)


class SteppedScheduler:
    """An SGLang scheduler in this process, which turns its loop as it is asked."""

    def __init__(self, model: Path, dtype: str) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        arguments = ServerArgs(
            model_path=str(model),
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            skip_tokenizer_init=True,
            dtype=dtype,
            disable_overlap_schedule=True,
            incremental_streaming_output=True,
            mem_fraction_static=0.1,
            context_length=384,
            max_running_requests=8,
            max_total_tokens=KV_TOKENS,
            chunked_prefill_size=512,
            random_seed=0,
        )
        arguments.resolve_once()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self.scheduler: Any = Scheduler(arguments, PortArgs.init_new(arguments))
        self.outputs = Outputs()
        self.scheduler.output_streamer.send_to_detokenizer = self.outputs
        channels = replace(self.scheduler.ipc_channels, send_to_tokenizer=self.outputs)
        self.scheduler.ipc_channels = channels
        # In the place of its requests; the loop ends after this turn.
        self.scheduler.ingest_requests = partial(setattr, self.scheduler, "gracefully_exit", True)

    def step(self) -> list[Any]:
        """Turn the loop once; return what it sent."""
        self.scheduler.gracefully_exit = False
        self.scheduler.event_loop_normal()
        sent = list(self.outputs)
        self.outputs.clear()
        return sent

    def flush(self) -> None:
        """Drop all prefixes, once the requests that have ended are out of the running batch."""
        self.step()
        assert self.scheduler.flush_cache()

    def add(self, id_: str, prompt: list[int], tokens: int, *, pooling: bool = False) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        common = {"rid": id_, "input_text": None, "mm_inputs": None, "token_type_ids": None}
        common |= {"input_ids": array("q", prompt), "sampling_params": sampling}
        request = (
            io_struct.TokenizedEmbeddingReqInput(**common)
            if pooling
            else io_struct.TokenizedGenerateReqInput(
                **common,
                input_embeds=None,
                return_logprob=True,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=True,
            )
        )
        self.scheduler.process_input_requests([request])

    def close(self) -> None:
        """End it, so that this process may start another."""
        from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory
        from sglang.srt.eplb.expert_location import set_global_expert_location_metadata

        cleanup_dist_env_and_memory()
        set_global_expert_location_metadata(None, allow_overwrite=True)


def results_of(sent: Iterable[Any]) -> Iterable[tuple[str, list[Any], list[float], str]]:
    """Yield of each request in a scheduler's messages its id, new output, logprobs and reason."""
    for message in sent:
        if hasattr(message, "embeddings"):
            for id_, scores in zip(message.rids, message.embeddings, strict=True):
                yield id_, list(scores), [], "length"
        elif hasattr(message, "output_ids"):
            for number, id_ in enumerate(message.rids):
                reason = message.finished_reasons[number] or {}
                logprobs = message.output_token_logprobs_val[number]
                yield id_, list(message.output_ids[number]), list(logprobs), reason.get("type", "")
        else:
            yield message.rid, [], [], "abort"


class SglangReplica(FamilyReplica):
    """An SGLang scheduler in this process, and its weight methods."""

    drafts = False

    def __init__(self, folder: Path, family: str, ranks: int = 1, *, updatable: bool) -> None:
        del ranks, updatable
        self._pooling = family == "reward"
        self._stepped = SteppedScheduler(folder, "bfloat16")
        self._worker = SglangWeightWorker(self._stepped.scheduler)

    def call(self, method: str, *args: object) -> list[Any]:
        return [getattr(self._worker, f"rose_weights_{method}")(*args)]

    def answers(self) -> list[Any]:
        self._stepped.flush()
        answers: dict[str, list[Any]] = {}
        for number, prompt in enumerate(PROMPTS):
            answers[str(number)] = []
            self._stepped.add(str(number), prompt, 24, pooling=self._pooling)
        left = len(answers)
        while left:
            for id_, output, logprobs, reason in results_of(self._stepped.step()):
                answers[id_] += [output] if self._pooling else zip(output, logprobs, strict=True)
                left -= bool(reason)
        return list(answers.values())

    def close(self) -> None:
        self._stepped.close()


@cache
def guest_hooks() -> GuestHooks:
    hooks = GuestHooks(EngineSettings.from_environ(os.environ))
    stand_around(hooks.hooks)
    return hooks


@cache
def host_hooks() -> HostHooks:
    hooks = HostHooks(lends=True)
    stand_around(hooks.hooks)
    return hooks


class SglangFamilyEngine(FamilyEngine):
    """An SGLang scheduler in this process as a guest or as a host."""

    groups = 1

    def start(self, model: Path, family: str, role: str) -> None:
        self.stepped = SteppedScheduler(model, "float32")
        self.scheduler = self.stepped.scheduler
        self.blocks = self.scheduler.token_to_kv_pool_allocator
        if role == GUEST:
            guest_hooks().run_event_loop(lambda _: None, self.scheduler)

    def lend(self) -> None:
        self.stepped.flush()
        os.environ.update(ROSE_ROLE="host", ROSE_HOST_LEVEL="lend")
        host_hooks().made(lambda _: None, self.scheduler)

    @property
    def pool(self) -> Any:
        guest = guest_hooks()._guest
        assert guest is not None
        return guest._pool

    @property
    def lender(self) -> Any:
        host = host_hooks().host
        assert host is not None
        return host.lender

    def step(self) -> Iterable[tuple[str, list[Any], str]]:
        for id_, output, _, reason in results_of(self.stepped.step()):
            yield id_, output, reason

    def empty_step(self) -> None:
        self.stepped.step()

    def add(self, number: int, prompt: list[int], tokens: int, suffix: str = "") -> None:
        self.stepped.add(f"{number}{suffix}", prompt, tokens, pooling=self.pooling)

    def idle(self) -> None:
        """Turn the idle loop for some time, in which a host lends."""
        ends_s = time.monotonic() + IDLE_S
        while time.monotonic() < ends_s:
            assert not self.stepped.step()
            time.sleep(0.001)

    def filled(self) -> list[int]:
        # Block 0 takes padding.
        free = set(self.blocks.get_all_free_pages().tolist())
        return [block for block in range(1, self.blocks.size + 1) if block not in free]

    def bytes_of(self, blocks: list[int]) -> Iterable[Any]:
        for tensor in kv_tensors(self.blocks.get_kvcache()):
            yield tensor[blocks].clone()

    def close(self) -> None:
        self.stepped.close()


def main(folder: Path, families: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    import torch
    from sglang.srt.managers import scheduler

    assert scheduler.Scheduler
    torch.set_num_threads(1)
    warm()
    patch.object(backing, "GRANULE_RUN_BYTES", RUN_BYTES).start()
    update = partial(family_updates.outcome, start=SglangReplica, engine=ENGINE)
    kv = partial(family_kv.outcome, start=SglangFamilyEngine, engine=ENGINE)
    try_each(
        families,
        folder,
        ".sglang.json",
        update,
        lambda f, line: UpdateOutcome(f, refused=line, engine=ENGINE),
    )
    try_each(
        families,
        folder,
        ".sglang.kv.json",
        kv,
        lambda f, line: KvOutcome(f, host=line, engine=ENGINE),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
