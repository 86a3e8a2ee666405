"""Work that all ranks of a trainer do together; one process without a group is its first rank."""

from collections.abc import Callable
from typing import Any, TypeVar

from rose.errors import RefusedError
from weight_transfer import WeightError

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank in torch.distributed's default group, 0 without a group."""
    import torch.distributed as dist

    return dist.get_rank() if _grouped() else 0


def from_first(work: Callable[[], T], otherwise: str = "the first rank could not go on") -> T:
    """Run `work` on the first rank alone, and return its result on all ranks. If it fails, all
    ranks raise.

    The first rank raises its own error, the others a RefusedError that begins with `otherwise`.
    """
    import torch.distributed as dist

    said: list[Any] = [None, None]
    failed: Exception | None = None
    if rank() == 0:
        try:
            said[0] = work()
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failed, said[1] = error, str(error) or repr(error)
    if _grouped():
        dist.broadcast_object_list(said, src=0)
    if failed is not None:
        raise failed
    if said[1] is not None:
        raise RefusedError(f"{otherwise}: {said[1]}")
    found: T = said[0]
    return found


def everywhere(work: Callable[[], T]) -> T:
    """Run `work` on every rank, and return this rank's result.

    If it fails on any rank, all ranks raise: the failed one its error (of WeightError and OSError a
    RefusedError), the others a RefusedError that names it.
    """
    import torch.distributed as dist

    failed: Exception | None = None
    made: T | None = None
    try:
        made = work()
    except Exception as error:  # noqa: BLE001 - raised below, once the others know
        failed = error
    if _grouped():
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if failed is None else str(failed) or repr(failed))
        others = [f"rank {at}: {what}" for at, what in enumerate(said) if what is not None]
        if failed is None and others:
            raise RefusedError(f"nothing is published, {others[0]}")
    if isinstance(failed, WeightError | OSError):
        raise RefusedError(f"nothing is published: {failed}") from failed
    if failed is not None:
        raise failed
    return made  # type: ignore[return-value]


def _grouped() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
