"""Hook around the outputs on SGLang's tokenizer side: latencies of finished requests."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from executor.control_page.seqlock_records import LatencyRecord
from executor.host.latency_writer import LatencyWriter
from executor.sglang.compat import client_request_id

TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager"
HANDLE_OUTPUT: Final = f"{TOKENIZER}.TokenizerManager._handle_batch_output"
HEALTH_CHECK: Final = "HEALTH_CHECK"
"""Prefix of the ids of SGLang's own health checks, whose latencies do not count."""

logger = logging.getLogger("rose.sglang")


def latency_record(
    request_id: str,
    stats: Any,  # noqa: ANN401 -- SGLang's APIServerReqTimeStats
    prompt_tokens: int,
    output_tokens: int,
    now_s: float,
    now_ns: int,
) -> LatencyRecord:
    """Return the record of a finished request; `now_s` is SGLang's clock at the page's `now_ns`."""
    finished_s = stats.finished_time or now_s
    first_s = stats.first_token_time or finished_s
    gaps = output_tokens - 1
    return LatencyRecord(
        request_id=client_request_id(request_id),
        finished_ns=now_ns - max(0, round((now_s - finished_s) * 1e9)),
        ttft_ns=max(0, round((first_s - stats.created_time) * 1e9)),
        tpot_ns=max(0, round((finished_s - first_s) / gaps * 1e9)) if gaps > 0 else 0,
        e2e_ns=max(0, round((finished_s - stats.created_time) * 1e9)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


class LatencyHook:
    """Hook around TokenizerManager._handle_batch_output; each API process has one."""

    def __init__(self) -> None:
        self._writer: LatencyWriter | None = None

    async def __call__(
        self,
        original: Callable[[Any, Any], Awaitable[Any]],
        manager: Any,  # noqa: ANN401 -- SGLang's
        received: Any,  # noqa: ANN401 -- a batch of outputs
    ) -> Any:  # noqa: ANN401
        """Handle the outputs as SGLang does, then publish the finished requests."""
        ended = _ending(manager, received)
        found = await original(manager, received)
        if ended:
            if self._writer is None:
                self._writer = LatencyWriter(logger)
            self._writer.append(lambda: _records(received, ended))
        return found


def _ending(manager: Any, received: Any) -> list[tuple[int, Any]]:  # noqa: ANN401 -- SGLang's
    """Return place and state of each request that ends with this batch; SGLang drops them."""
    try:
        states = manager.rid_to_state
        reasons = zip(received.rids, received.finished_reasons, strict=True)
        return [
            (at, states[id_])
            for at, (id_, reason) in enumerate(reasons)
            if reason is not None and id_ in states and not id_.startswith(HEALTH_CHECK)
        ]
    except Exception:
        logger.exception("the host serves on; latencies of a batch are not published")
        return []


def _records(received: Any, ended: list[tuple[int, Any]]) -> Iterator[LatencyRecord]:  # noqa: ANN401
    """Yield the records; a request that ended before its first token has no latency."""
    now_s, now_ns = time.perf_counter(), time.monotonic_ns()
    tokens = getattr(received, "completion_tokens", None) or [0] * len(received.rids)
    for at, state in ended:
        if tokens[at] > 0:
            yield latency_record(
                received.rids[at],
                state.time_stats,
                received.prompt_tokens[at],
                tokens[at],
                now_s,
                now_ns,
            )
