"""Stand-ins for what ROSE touches inside SGLang: allocator, prefix cache, batch, scheduler.

They keep SGLang's books of blocks: what is free, what the prefix cache has, what requests have. The
functions of SGLang's that are called by name are `modules()`, to be put into `sys.modules`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROW = 64


class StandInPool:
    """Keys and values of layers, one block a slot; of two, in float32, unless they are given."""

    start_layer = 0

    def __init__(
        self, slots: int = 0, width: int = 16, *, keys: Any = None, values: Any = None
    ) -> None:
        self.k_buffer = keys or [torch.zeros(slots, 2, width) for _ in range(2)]
        self.v_buffer = values or [torch.zeros(slots, 2, width) for _ in range(2)]
        self.layer_num = len(self.k_buffer)

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.v_buffer[layer_id]


class TokenToKVPoolAllocator:
    """SGLang's own for one token a page, as far as its free slots go: two tensors of numbers."""

    def __init__(self, size: int, pool: Any = None) -> None:
        self.size, self.page_size, self.need_sort = size, 1, False
        self._pool = pool or StandInPool(size + 1)
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.size + 1, dtype=torch.int64)
        self.release_pages = torch.empty(0, dtype=torch.int64)

    def get_kvcache(self) -> Any:
        return self._pool

    def available_size(self) -> int:
        return len(self.free_pages) + len(self.release_pages)

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((self.free_pages, self.release_pages))

    def alloc(self, need_size: int) -> Any:
        """Return slots, None if there are too few."""
        if self.need_sort and need_size > len(self.free_pages):
            self.free_pages = torch.sort(self.get_all_free_pages()).values
            self.release_pages = self.release_pages[:0]
        if need_size > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:need_size], self.free_pages[need_size:]
        return taken

    def free(self, slots: torch.Tensor) -> None:
        self.release_pages = torch.cat((self.release_pages, slots))


class StandInTree:
    """A prefix cache that has runs of slots, the oldest first; requests hold none of them."""

    def __init__(self, allocator: TokenToKVPoolAllocator) -> None:
        self._allocator = allocator
        self.runs: list[torch.Tensor] = []

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def evictable_size(self) -> int:
        return sum(len(run) for run in self.runs)

    def keep(self, slots: torch.Tensor) -> None:
        self.runs.append(slots)

    def evict(self, asked: Any) -> None:
        freed = 0
        while self.runs and freed < asked.num_tokens:
            run = self.runs.pop(0)
            freed += len(run)
            self._allocator.free(run)


@dataclass(eq=False)
class StandInRequest:
    """SGLang's Req."""

    rid: str
    origin_input_ids: list[int] = field(default_factory=lambda: [1] * 10)
    output_ids: list[int] = field(default_factory=list)
    to_finish: Any = None
    finished_reason: Any = None
    retractions: int = 0
    kv: Any = field(default_factory=lambda: SimpleNamespace(holds_kv=False))
    time_stats: Any = field(default_factory=lambda: SimpleNamespace(has_timing_data=False))

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return self.finished_reason is not None

    def reset_for_retract(self) -> None:
        assert not self.kv.holds_kv
        self.retractions += 1


class StandInBatch:
    """SGLang's ScheduleBatch of requests that decode, or of a prefill of these lengths."""

    def __init__(
        self, requests: Iterable[StandInRequest] = (), prefill: list[int] | None = None
    ) -> None:
        self.reqs = list(requests)
        self.batch_is_full = True
        self.extend_lens = prefill
        self.extend_num_tokens = sum(prefill or ())
        self.decoding_reqs: list[StandInRequest] | None = None
        self.forward_mode = SimpleNamespace(
            is_extend=lambda: prefill is not None, is_decode=lambda: prefill is None
        )

    def filter_batch(self, keep_indices: list[int] | None = None) -> None:
        if keep_indices is None:
            keep_indices = [n for n, r in enumerate(self.reqs) if not r.finished()]
        self.reqs = [self.reqs[n] for n in keep_indices]


class StandInScheduler:
    """SGLang's Scheduler; `stalled`: it has work that is in none of its queues."""

    def __init__(self, slots: int = 100, pool: Any = None, **arguments: object) -> None:
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(slots, pool)
        self.tree_cache = StandInTree(self.token_to_kv_pool_allocator)
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros(ROW, slots + 1, dtype=torch.int32)
        )
        self.max_total_num_tokens = slots
        self.invariant_checker = SimpleNamespace(max_total_num_tokens=slots)
        self.tp_group = SimpleNamespace(ranks=[0], rank_in_group=0, cpu_group=None)
        self.running_batch = StandInBatch()
        self.waiting_queue: list[StandInRequest] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.chunked_req: StandInRequest | None = None
        self.chunked_prefill_size: int | None = 32
        self.max_prefill_tokens = 64
        self.result_queue: deque[Any] = deque()
        self.stalled = False
        self.server_args = SimpleNamespace(
            **{"model_path": "m", "served_model_name": "policy", "tp_size": 1} | arguments
        )
        self.told: list[tuple[str, Any]] = []
        self._rows = 0

    def is_fully_idle(self) -> bool:
        return not (self.waiting_queue or self.running_batch.reqs or self.stalled)

    def collect_inflight_reqs(self) -> set[StandInRequest]:
        return set(self.running_batch.reqs)

    def run(self, rid: str, tokens: int, outputs: int = 1) -> StandInRequest:
        """A request that has KV for so many tokens."""
        request = StandInRequest(rid, [1] * tokens, [2] * outputs)
        slots = self.token_to_kv_pool_allocator.alloc(tokens)
        row, self._rows = self._rows, self._rows + 1
        self.req_to_token_pool.req_to_token[row, :tokens] = slots.to(torch.int32)
        request.kv = SimpleNamespace(
            holds_kv=True, req_pool_idx=row, kv_allocated_len=tokens, kv_committed_len=tokens
        )
        self.running_batch.reqs.append(request)
        return request

    def slots_of(self, request: StandInRequest) -> torch.Tensor:
        kv = request.kv
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
        return row.to(torch.int64)

    def release(self, request: StandInRequest, *, checkpoint: bool) -> None:
        slots = self.slots_of(request)
        request.kv.holds_kv = False
        if checkpoint:
            self.tree_cache.keep(slots)
        else:
            self.token_to_kv_pool_allocator.free(slots)

    def _add_request_to_queue(self, request: StandInRequest, is_retracted: bool = False) -> None:
        assert is_retracted
        self.waiting_queue.append(request)

    def _release_aborted_request(self, request: StandInRequest) -> None:
        assert not request.kv.holds_kv

    def send_abort_output(self, said: Any, request: StandInRequest) -> None:
        self.told.append((request.rid, said.finished_reason))

    def modules(self, *others: StandInScheduler) -> dict[str, ModuleType]:
        """SGLang's modules that a guest imports, with these schedulers behind their functions."""
        by_tree = {id(each.tree_cache): each for each in (self, *others)}

        def release(request: StandInRequest, tree: Any, *, checkpoint: bool) -> None:
            by_tree[id(tree)].release(request, checkpoint=checkpoint)

        return {
            "sglang.srt.mem_cache.common": _module(release_kv_cache=release),
            "sglang.srt.mem_cache.base_prefix_cache": _module(EvictParams=SimpleNamespace),
            "sglang.srt.managers.scheduler": _module(
                _make_abort_req=lambda _, finished_reason: SimpleNamespace(
                    finished_reason=finished_reason
                )
            ),
        }


def _module(**members: Any) -> ModuleType:
    made = ModuleType("standin")
    vars(made).update(members)
    return made
