"""Stand-ins for SGLang's scheduler and its parts, as far as ROSE's host asks them."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(eq=False)
class FakeReq:
    rid: str
    origin_input_ids: list[int] = field(default_factory=lambda: [1] * 10)
    output_ids: list[int] = field(default_factory=list)
    finished_reason: object = None
    time_stats: Any = field(default_factory=lambda: SimpleNamespace(has_timing_data=False))

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)


@dataclass
class FakeMode:
    decode: bool

    def is_decode(self) -> bool:
        return self.decode


@dataclass
class FakeBatch:
    reqs: list[FakeReq]
    forward_mode: FakeMode
    extend_lens: list[int] | None = None
    decoding_reqs: list[FakeReq] | None = None


class TokenToKVPoolAllocator:
    """SGLang's own for one token a page, word for word in what matters."""

    def __init__(self, size: int, kvcache: object = None) -> None:
        self.size, self.page_size, self.need_sort = size, 1, False
        self._kvcache = kvcache
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.size + 1)
        self.release_pages = torch.empty((0,), dtype=torch.int64)

    def get_kvcache(self) -> object:
        return self._kvcache

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((self.free_pages, self.release_pages))

    def available_size(self) -> int:
        return len(self.free_pages) + len(self.release_pages)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if self.need_sort and need_size > len(self.free_pages):
            self.free_pages = torch.sort(self.get_all_free_pages()).values
            self.release_pages = self.free_pages[:0]
        if need_size > len(self.free_pages):
            return None
        found, self.free_pages = self.free_pages[:need_size], self.free_pages[need_size:]
        return found

    def free(self, pages: torch.Tensor) -> None:
        self.release_pages = torch.cat((self.release_pages, pages))


class FakeTree:
    """A prefix cache that holds numbers of tokens, and frees the pages it is given."""

    def __init__(self, allocator: TokenToKVPoolAllocator) -> None:
        self._allocator = allocator
        self.cached: deque[torch.Tensor] = deque()

    def evictable_size(self) -> int:
        return sum(len(pages) for pages in self.cached)

    def evict(self, tokens: int) -> None:
        while tokens > 0 and self.cached:
            pages = self.cached.popleft()
            self._allocator.free(pages)
            tokens -= len(pages)


class FakeScheduler:
    """Its queue and books; `is_fully_idle` says what SGLang's own would."""

    def __init__(self, tokens: int = 100, kvcache: object = None, **arguments: object) -> None:
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(tokens, kvcache)
        self.tree_cache = FakeTree(self.token_to_kv_pool_allocator)
        self.waiting_queue: list[FakeReq] = []
        self.running_batch = SimpleNamespace(reqs=[])
        self.chunked_req: FakeReq | None = None
        self.result_queue: deque[Any] = deque()
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.stalled = False
        self.server_args = SimpleNamespace(
            **{"model_path": "m", "served_model_name": "policy", "tp_size": 1} | arguments
        )

    def is_fully_idle(self) -> bool:
        return not (self.waiting_queue or self.running_batch.reqs or self.stalled)

    def collect_inflight_reqs(self) -> set[FakeReq]:
        return set(self.running_batch.reqs)
