"""vLLM's own scheduler and block pool without an engine, over memory that a stand-in model uses."""

import os
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import executor.guest.plugin
from bench.common.tiny_models import TinyModel
from executor import ControlPage, Grant, GrantMode, GuestState, HostState
from executor.guest.gate_client import GateClient
from executor.guest.kv_balloon import GuestKv
from executor.kv.backing import Range, resident_bytes
from executor.vllm.guest.scheduler import GatedScheduler
from executor.vllm.host.scheduler import ObservedScheduler
from executor.vllm.kv_backing import packed
from tests.harness.seated_host import SeatedHost

VOCABULARY = 96
Views = dict[str, torch.Tensor]
Configure = Callable[[VllmConfig], None]
"""Change of vLLM's configuration before its scheduler is made."""
BLOCK_TOKENS = 16
# K and V of 16 tokens, 32 heads of 128 in fp32: half a MiB, so that a granule is one block …
WIDE = FullAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=32, head_size=128, dtype=torch.float32
)
# … and 16 KiB, so that it is 16 blocks.
NARROW = FullAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=128, dtype=torch.float32
)


def save_config(folder: Path) -> Path:
    model = TinyModel(hidden=64, layers=2, heads=1, mlp=64, vocabulary=VOCABULARY, tied=False)
    model.config().save_pretrained(folder)
    return folder


def vllm_config(model: Path, *, asynchronous: bool = False, caching: bool = True) -> VllmConfig:
    model_config = ModelConfig(
        model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=512
    )
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=512,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=caching),
    )
    # vLLM switches it off on a CPU.
    config.scheduler_config.async_scheduling = asynchronous
    return config


def kv_config(
    blocks: int, spec: FullAttentionSpec, layers: int = 2, *, on_gpu: bool = False
) -> KVCacheConfig:
    """Layer-outermost, as this vLLM lays it out on CPU: in one allocation, or one for a layer.

    `on_gpu`: block-outermost, as `ReservedKvWorker` has it.
    """
    page = spec.page_size_bytes
    names = [f"layers.{layer}" for layer in range(layers)]
    if "layers" in KVCacheTensor.__dataclass_fields__:
        tensors = [
            KVCacheTensor(
                size=page * blocks * layers,
                layers=names,
                layer_stride=page if on_gpu else page * blocks,
                block_stride=page * layers if on_gpu else page,
            )
        ]
    else:
        tensors = [KVCacheTensor(size=page * blocks, shared_by=[name]) for name in names]
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )
    return packed(config) if on_gpu else config


def manager_of(config: KVCacheConfig, *, caching: bool = False, most_tokens: int = 512) -> Any:
    return KVCacheManager(
        kv_cache_config=config,
        max_model_len=most_tokens,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        enable_caching=caching,
    )


def engine_of(caches: Mapping[str, Any]) -> Any:
    """vLLM's configuration, as far as its layers' KV tensors are in it."""
    layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def kv_views(config: KVCacheConfig, allocate: Callable[[int], torch.Tensor]) -> Views:
    """By layer, bytes `[blocks, page]` over what `allocate` gives for each allocation."""
    page = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    shape = config.num_blocks, page
    views: Views = {}
    memory: torch.Tensor | None = None
    for tensor in config.kv_cache_tensors:
        if memory is None or not tensor.block_stride:
            memory = allocate(tensor.size)
        stride, between = tensor.block_stride or page, getattr(tensor, "layer_stride", 0)
        names = tensor.layers if hasattr(tensor, "layers") else tensor.shared_by
        for number, name in enumerate(names):
            first = tensor.offset + number * between
            views[name] = memory.as_strided(shape, (stride, 1), first)
    return views


def next_token(tokens: npt.ArrayLike) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCABULARY


def prompt_of(rng: random.Random | int, tokens: int) -> list[int]:
    """rng: or its seed."""
    rng = random.Random(rng) if isinstance(rng, int) else rng
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def undisturbed(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class StandInRunner:
    """A model whose next token follows from every token it finds in KV memory, and from no other.

    It writes and reads the first and the last layer, so that pages lost in either show.
    """

    def __init__(self, views: Views) -> None:
        ends = list(views.values())
        # By block and place in it: the first four bytes that a token has in a block's page.
        cells = [layer.numpy()[:, : BLOCK_TOKENS * 4].view(np.int32) for layer in ends]
        self._first, self._last = cells[0], cells[-1]
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}

    def execute(self, output: Any) -> ModelRunnerOutput:
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        computed = self._update(output)
        ids = list(output.num_scheduled_tokens)
        sampled = [self._step(i, computed[i], output.num_scheduled_tokens[i]) for i in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def _update(self, output: Any) -> dict[str, int]:
        computed = {}
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            self._blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._tokens[request_id] = list(cached.all_token_ids[request_id])
                self._blocks[request_id] = []
            self._blocks[request_id] += blocks[0] if blocks else []
            computed[request_id] = cached.num_computed_tokens[index]
        return computed

    def _step(self, request_id: str, computed: int, count: int) -> list[int]:
        tokens = self._tokens[request_id]
        blocks = np.array(self._blocks[request_id])
        end = computed + count
        for cells in (self._first, self._last):
            at = np.arange(computed, end)
            cells[blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = tokens[computed:end]
        if end < len(tokens):
            return []
        first, last = (cells[blocks].ravel()[:end] for cells in (self._first, self._last))
        assert np.array_equal(first, last), "both layers hold the same tokens"
        tokens.append(next_token(first))
        return [tokens[-1]]


class NoWatchdog:
    """Tests end their own process."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        pass


class TickingClock:
    """A monotonic clock that runs as it is looked at, so that no busy machine ages a grant."""

    def __init__(self) -> None:
        self._now_ns = time.monotonic_ns()

    def __call__(self) -> int:
        self._now_ns += 10_000
        return self._now_ns


@dataclass
class GuestRig:
    """A gated scheduler and its stand-in model, `depth` steps in flight at most."""

    scheduler: Any
    runner: StandInRunner
    page: ControlPage
    buffers: list[torch.Tensor]
    depth: int
    clock_ns: Callable[[], int] = time.monotonic_ns
    grant: Grant = field(
        default_factory=lambda: Grant(GrantMode.RUN, token_budget=512, max_sequences=16)
    )
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    in_flight: deque[Any] = field(default_factory=deque)
    host: SeatedHost | None = None
    hasher: Any = None

    def allow(self, **change: Any) -> None:
        """Change the grant and keep it alive."""
        self.grant = replace(self.grant, **change)
        now_ns = self.clock_ns()
        if self.host is None:
            self.host = SeatedHost(self.page, self.clock_ns)
        self.host.tell()
        live = {"heartbeat_ns": now_ns, "expiry_ns": now_ns + 4_000_000_000}
        self.page.grant.write(replace(self.grant, **live))

    @property
    def published(self) -> GuestState:
        state = self.page.guest.read()
        assert state is not None
        return state

    @property
    def blocks(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def balloon(self) -> Any:
        return self.scheduler._kv._pool

    @property
    def held_resident(self) -> int:
        """Bytes in memory under blocks that are held, where nothing may be."""
        pool = self.balloon
        return sum(
            resident_bytes(piece.whole_pages())
            for granule in pool.held
            for extent in pool.pages.extents
            for piece in extent.ranges(pool.granules.blocks_of(granule))
        )

    @property
    def kv_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def resident(self) -> int:
        """Bytes of KV memory that have pages."""
        starts = [(buffer.data_ptr(), buffer.nbytes) for buffer in self.buffers]
        return sum(resident_bytes(Range(at, at + size).whole_pages()) for at, size in starts)

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **sampling: Any) -> None:
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling
        )
        parameters.update_from_generation_config({}, 1)
        request = Request(
            request_id, prompt, parameters, pooling_params=None, block_hasher=self.hasher
        )
        self.scheduler.add_request(request)
        self.outputs[request_id] = []

    def turn(self) -> None:
        """Run one turn of the engine core's loop."""
        if self.scheduler.has_requests():
            self.in_flight.append(self.scheduler.schedule())
        if self.in_flight and (
            len(self.in_flight) == self.depth or not self.scheduler.has_requests()
        ):
            self.land()

    def land(self) -> None:
        """The oldest step in flight ends."""
        output = self.in_flight.popleft()
        result = self.scheduler.update_from_output(output, self.runner.execute(output))
        for client in result.values():
            for part in client.outputs:
                self.outputs[part.request_id] += part.new_token_ids
                if part.finish_reason is not None:
                    assert part.request_id not in self.ends
                    self.ends[part.request_id] = str(part.finish_reason)

    def turns(self, count: int) -> None:
        """Run turns under a live grant."""
        for _ in range(count):
            self.allow()
            self.turn()

    def schedule(self) -> int:
        """Schedule a step under a live grant, and return its tokens."""
        self.allow()
        self.in_flight.append(self.scheduler.schedule())
        tokens: int = self.in_flight[-1].total_num_scheduled_tokens
        return tokens

    def run_until_idle(self, turns: int = 5_000) -> None:
        for _ in range(turns):
            self.allow()
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.turn()
        raise AssertionError(f"not idle after {turns} turns")


def guest_rig(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    blocks: int = 65,
    spec: FullAttentionSpec = WIDE,
    depth: int = 1,
) -> GuestRig:
    """A guest whose KV memory is `buffers`, resident from the start as vLLM's is."""
    page = ControlPage.create(folder / "page")
    environ = {"ROSE_ROLE": "guest", "ROSE_CONTROL_PAGE": str(page.path), "ROSE_ORPHAN_S": "3600"}
    for name, value in environ.items():
        monkeypatch.setitem(os.environ, name, value)
    clock_ns = TickingClock()
    module = executor.guest.plugin
    monkeypatch.setattr(module, "Watchdog", NoWatchdog)
    monkeypatch.setattr(module, "GateClient", partial(GateClient, clock_ns=clock_ns))
    monkeypatch.setattr(module, "GuestKv", partial(GuestKv, clock_ns=clock_ns))
    scheduler, views, memory = _scheduler(GatedScheduler, folder, blocks, spec, depth, caching=True)
    rig = GuestRig(scheduler, StandInRunner(views), page, memory, depth, clock_ns)
    rig.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    rig.allow()
    return rig


class HostRig(GuestRig):
    """A host's scheduler; nobody grants it anything."""

    def allow(self, **change: Any) -> None:
        pass

    @property
    def published(self) -> HostState:  # type: ignore[override]
        state = self.page.host.read()
        assert state is not None
        return state

    @property
    def lender(self) -> Any:
        return self.scheduler.lender

    @property
    def balloon(self) -> Any:
        return self.lender.pool


def host_rig(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    level: str = "lend",
    blocks: int = 65,
    spec: FullAttentionSpec = WIDE,
    depth: int = 1,
    caching: bool = True,
    configure: Configure = lambda _: None,
) -> HostRig:
    """A host over `buffers`; level "stock" is vLLM's own scheduler."""
    page = ControlPage.ensure(folder / "page")
    environ = {"ROSE_ROLE": "host", "ROSE_CONTROL_PAGE": str(page.path), "ROSE_HOST_LEVEL": level}
    for name, value in environ.items():
        monkeypatch.setitem(os.environ, name, value)
    kind = AsyncScheduler if level == "stock" else ObservedScheduler
    scheduler, views, memory = _scheduler(
        kind, folder, blocks, spec, depth, caching=caching, configure=configure
    )
    rig = HostRig(scheduler, StandInRunner(views), page, memory, depth)
    rig.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256) if caching else None
    return rig


def _scheduler(
    kind: Any,
    folder: Path,
    blocks: int,
    spec: FullAttentionSpec,
    depth: int,
    *,
    caching: bool,
    configure: Configure = lambda _: None,
) -> tuple[Any, Views, list[torch.Tensor]]:
    kv = kv_config(blocks, spec)
    memory: list[torch.Tensor] = []

    def allocate(size: int) -> torch.Tensor:
        memory.append(torch.zeros(size, dtype=torch.int8).fill_(1))
        return memory[-1]

    views = kv_views(kv, allocate)
    scheduler = make_scheduler(kind, folder, kv, views, depth, caching=caching, configure=configure)
    return scheduler, views, memory


def make_scheduler(
    kind: Any,
    folder: Path,
    kv: KVCacheConfig,
    caches: Mapping[str, Any],
    depth: int,
    *,
    caching: bool,
    configure: Configure = lambda _: None,
) -> Any:
    """`caches`: the KV tensor of each layer."""
    init_none_hash(sha256)
    model = save_config(folder / "model")
    config = vllm_config(model, asynchronous=depth > 1, caching=caching)
    config.cache_config.num_gpu_blocks = kv.num_blocks
    configure(config)
    layers = config.compilation_config.static_forward_context
    layers.update({name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()})
    return kind(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
    )


@pytest.fixture
def guest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GuestRig]:
    return partial(guest_rig, tmp_path, monkeypatch)


@pytest.fixture
def host_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostRig]:
    return partial(host_rig, tmp_path, monkeypatch)
