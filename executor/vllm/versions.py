"""The vLLM versions that ROSE is tested with, and where their schedulers differ.

A difference is asked of the object at hand. The version says only whether anybody has tried: the
surfaces under the plugins are not public, and another version may misbehave without an error.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from executor.errors import ExecutorError

TESTED: Final = ("0.25.0", "0.32.0")


def check_version(version: str | None = None) -> None:
    """Raise ExecutorError unless ROSE is tested with this vLLM (None: the one installed here)."""
    if version is None:
        from vllm.version import __version__

        return check_version(__version__)
    # What follows a plus says for which device it was built.
    if version.partition("+")[0] not in TESTED:
        raise ExecutorError(
            f"ROSE is not tested with vLLM {version}; install one of {', '.join(TESTED)}"
        )
    return None


@contextmanager
def capped(
    scheduler: Any,  # noqa: ANN401 -- vLLM's scheduler
    tokens: int,
    sequences: int,
) -> Iterator[None]:
    """Within it schedule() takes at most `tokens`, and admits nobody beside `sequences` requests.

    Whoever runs already runs on, in every version.
    """
    attribute, most = "max_num_active_reqs", sequences
    if not hasattr(scheduler, attribute):
        # 0.25 has one number for admission and for the slots of its runner, and asserts that no
        # more run than that.
        attribute, most = "max_num_running_reqs", max(sequences, len(scheduler.running))
    full = scheduler.max_num_scheduled_tokens, getattr(scheduler, attribute)
    scheduler.max_num_scheduled_tokens = min(full[0], tokens)
    setattr(scheduler, attribute, min(full[1], most))
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = full[0]
        setattr(scheduler, attribute, full[1])


def waiting_requests(scheduler: Any) -> list[Any]:  # noqa: ANN401 -- vLLM's scheduler and requests
    """Requests that wait, in both of the queues that every version has, under its own name."""
    beside = getattr(scheduler, "kv_holding_waiting", None)
    if beside is None:
        beside = scheduler.skipped_waiting
    return [*beside, *scheduler.waiting]


def ended_requests(ended: Iterable[Any]) -> list[tuple[int, str]]:
    """(client index, request id) of what finish_requests() returned: pairs on 0.25, else
    requests."""
    return [
        (item[1], item[0]) if isinstance(item, tuple) else (item.client_index, item.request_id)
        for item in ended
    ]
