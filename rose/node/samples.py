"""`guest.jsonl`: what host and guest were doing, ten times a second."""

from typing import Final

import msgspec

GUEST_SAMPLES: Final = "guest.jsonl"


class GuestSample(msgspec.Struct, frozen=True):
    """One look at the control page; times are CLOCK_MONOTONIC.

    reason: why the guest does not run, "ok" while it may. kv_bytes: KV memory that the guest has
    not given back. host_kv: share of the host's KV blocks in use. Counters only grow.
    """

    t_s: float
    mode: str
    reason: str
    running: int
    kv_bytes: int
    tokens_total: int
    step_seq: int
    yielded_ns: int
    host_busy_ns: int
    host_running: int
    host_kv: float
