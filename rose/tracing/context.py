"""Trace context of W3C: the header `traceparent`, and `tracestate` that goes with it.

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    version  trace id                   parent id        flags (bit 0: sampled)

Of a later version the first four fields count, where a dash follows them. What is malformed is
ignored, and `tracestate` with it, as https://www.w3.org/TR/trace-context/ says: a turn never fails
by its trace.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
# The specification asks that at least so much is handed on; more than that is left out.
MAX_STATE_CHARS: Final = 512
MAX_PARENT_CHARS: Final = 256

_PARENT = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?", re.ASCII
)
_NO_TRACE, _NO_PARENT = "0" * 32, "0" * 16


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Trace context of a turn (W3C): trace, the caller's span in it, and the sampled flag."""

    trace_id: str
    parent_id: str
    sampled: bool = False
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header, of version 00."""
        return f"00-{self.trace_id}-{self.parent_id}-{int(self.sampled):02x}"

    def headers(self) -> dict[str, str]:
        """Return the headers of a request of this trace."""
        said = {TRACEPARENT: self.traceparent}
        return said | {TRACESTATE: self.state} if self.state else said

    def head(self) -> bytes:
        """The same, as lines of an HTTP head."""
        return "".join(f"{name}: {value}\r\n" for name, value in self.headers().items()).encode()


def trace_of(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace that a request is of; None where it names none, or none that is valid."""
    said = headers.get(TRACEPARENT)
    if said is None:
        return None
    every = getattr(headers, "getall", None)
    if every is not None and len(every(TRACEPARENT)) != 1:
        return None
    return parsed(said, headers.get(TRACESTATE, ""))


def parsed(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context of these two headers; None where the first is not valid."""
    if len(traceparent) > MAX_PARENT_CHARS:
        return None
    found = _PARENT.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or trace_id == _NO_TRACE or parent_id == _NO_PARENT:
        return None
    if version == "00" and more is not None:
        return None
    usable = (
        len(tracestate) <= MAX_STATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    )
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1), tracestate if usable else "")


def current_trace() -> TraceContext | None:
    """The trace of the caller's own OpenTelemetry span; None where it has none.

    A program that has not imported OpenTelemetry has no span, so nothing is imported for it here.
    """
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return None
    return of_span(opentelemetry.get_current_span())


def of_span(span: object) -> TraceContext | None:
    """The context whose parent is an OpenTelemetry span; None for one that is not valid."""
    made = span.get_span_context()  # type: ignore[attr-defined]  # of an optional package
    if not made.is_valid:
        return None
    state = made.trace_state.to_header()[:MAX_STATE_CHARS]
    trace_id, parent_id = f"{made.trace_id:032x}", f"{made.span_id:016x}"
    return TraceContext(trace_id, parent_id, bool(made.trace_flags.sampled), state)
