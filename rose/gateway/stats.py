"""Counters of one gateway, for `/rose/v1/stats` and `/metrics`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rose.gateway.loop_lag import LoopLag


@dataclass(slots=True)
class GatewayStats:
    """Since start. `tokens` counts journaled tokens by replica; `turns` delivered ones.

    `hedges` are second copies of turns; `hedge_wins` those of them that answered first.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    failed: int = 0
    continuations: int = 0
    attempts: int = 0
    repeated: int = 0
    slow_readers: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    loop_lag: LoopLag = field(default_factory=LoopLag)


@dataclass(frozen=True, slots=True)
class Health:
    """What the process itself lacks: troubles now, log records lost, restarts by task."""

    troubles: Sequence[str] = ()
    log_dropped: int = 0
    restarted: Mapping[str, int] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`ok`, or `degraded`: turns are served, and an operator should look."""
        return "degraded" if self.troubles else "ok"


def snapshot(stats: GatewayStats, live: dict[str, int], waiting: int) -> dict[str, object]:
    """Body of `/rose/v1/stats`."""
    return {
        "tokens": dict(stats.tokens),
        "live_turns": live,
        "turns": stats.turns,
        "failed": stats.failed,
        "continuations": stats.continuations,
        "attempts": stats.attempts,
        "repeated": stats.repeated,
        "slow_readers": stats.slow_readers,
        "hedges": stats.hedges,
        "hedge_wins": stats.hedge_wins,
        "waiting": waiting,
        "loop_lag_max_s": stats.loop_lag.max_s,
        "loop_busy_max_s": stats.loop_lag.busy_max_s,
    }


def exposition(stats: GatewayStats, live: dict[str, int], waiting: int, health: Health) -> str:
    """Body of `/metrics`, in Prometheus' text format; replica ids are the operator's own."""
    lines = [
        *_family("rose_gateway_tokens_total", "counter", _by("replica", stats.tokens)),
        *_family("rose_gateway_attempt_ends_total", "counter", _by("end", stats.ends)),
        *_family("rose_gateway_live_turns", "gauge", _by("replica", live)),
        *_family("rose_gateway_turns_total", "counter", {"": stats.turns}),
        *_family("rose_gateway_failed_turns_total", "counter", {"": stats.failed}),
        *_family("rose_gateway_continuations_total", "counter", {"": stats.continuations}),
        *_family("rose_gateway_attempts_total", "counter", {"": stats.attempts}),
        *_family("rose_gateway_repeated_requests_total", "counter", {"": stats.repeated}),
        *_family("rose_gateway_slow_readers_total", "counter", {"": stats.slow_readers}),
        *_family("rose_gateway_hedges_total", "counter", {"": stats.hedges}),
        *_family("rose_gateway_hedge_wins_total", "counter", {"": stats.hedge_wins}),
        *_family("rose_gateway_waiting_turns", "gauge", {"": waiting}),
        *stats.loop_lag.exposition(),
        *_family("rose_gateway_log_dropped_total", "counter", {"": health.log_dropped}),
        *_family("rose_gateway_task_restarts_total", "counter", _by("task", health.restarted)),
    ]
    return "\n".join(lines) + "\n"


def _by(label: str, values: Mapping[str, int]) -> dict[str, int]:
    return {f'{{{label}="{_escaped(name)}"}}': count for name, count in values.items()}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _family(name: str, kind: str, values: dict[str, int]) -> list[str]:
    return [f"# TYPE {name} {kind}", *(f"{name}{label} {value}" for label, value in values.items())]
