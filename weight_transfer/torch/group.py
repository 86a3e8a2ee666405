"""Bytes between ranks: all to the first, the first to all. No pickle.

every rank works ── + bytes or − what went wrong ──► the first merges
all return or raise ◄── + bytes or − what went wrong ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from weight_transfer.errors import ShardError, WeightError

_GOOD, _BAD = b"+", b"-"


class Ranks:
    """A group of ranks on host memory; of one, where torch.distributed is not in use."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 600.0) -> None:
        """Without `group` all ranks make one: gloo, whatever backend the trainer trains with.

        `timeout_s`: how long a rank is waited for.
        """
        self._group = group
        if group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.size = 1 if self._group is None else dist.get_world_size(self._group)

    def agree(self, work: Callable[[], bytes], merge: Callable[[list[bytes]], bytes]) -> bytes:
        """Collective: return, on every rank, what the first makes of what all have made.

        Where one fails all raise ShardError, and nobody waits for it.
        """
        gathered = self._gather(_attempt(work))

        def merged() -> bytes:
            for rank, raw in enumerate(gathered):
                if not raw.startswith(_GOOD):
                    said = raw[len(_BAD) :].decode()
                    raise ShardError(f"rank {rank} could not take part: {said}")
            return merge([raw[len(_GOOD) :] for raw in gathered])

        answer = self._broadcast(_attempt(merged) if self.rank == 0 else b"")
        if not answer.startswith(_GOOD):
            raise ShardError(answer[len(_BAD) :].decode())
        return answer[len(_GOOD) :]

    def _gather(self, raw: bytes) -> list[bytes]:
        """Return what each rank sent, on the first; nothing on the others."""
        if self._group is None:
            return [raw]
        with _alive():
            size = torch.tensor([len(raw)])
            sizes = [torch.zeros_like(size) for _ in range(self.size)]
            dist.all_gather(sizes, size, group=self._group)
            lengths = [int(length) for length in sizes]
            padded = _tensor(raw.ljust(max(lengths), b"\0"))
            found = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 else None
            dist.gather(padded, found, group=self._group, group_dst=0)
        received = zip(found or (), lengths, strict=False)
        return [bytes(sent.numpy())[:length] for sent, length in received]

    def _broadcast(self, raw: bytes) -> bytes:
        """Return what the first rank sent."""
        if self._group is None:
            return raw
        with _alive():
            size = torch.tensor([len(raw)])
            dist.broadcast(size, group=self._group, group_src=0)
            sent = _tensor(raw if self.rank == 0 else bytes(int(size)))
            dist.broadcast(sent, group=self._group, group_src=0)
        return bytes(sent.numpy())


def _attempt(work: Callable[[], bytes]) -> bytes:
    try:
        return _GOOD + work()
    except (WeightError, OSError) as error:
        return _BAD + str(error).encode()


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = str(error).strip().splitlines()
        raise ShardError(
            f"a rank is gone or late ({said[-1] if said else error!r:.200}); restart the ranks "
            "from the newest version"
        ) from error
