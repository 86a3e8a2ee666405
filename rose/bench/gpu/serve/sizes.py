"""How large engines, loads and arms are."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rose.bench.coserve.guest_load import GuestLoad
from rose.errors import ConfigError

MIB = 1 << 20
GUEST_LOAD = GuestLoad(streams=32, prompt_tokens=128, output_tokens=256, token_budget=256)
KV_BACKENDS = ("auto", "cuda", "madvise")


@dataclass(frozen=True, slots=True)
class ServingSizes:
    """host, guest: see `models`. dtype: of both. start_s: what three engines take to start.

    arm_s: host load of one arm in one round; rounds: at most so many, fewer where time is short.
    idle_s: a guest without host load. window_s: arrivals this close share batches.
    calibration_s, tries, busy_tolerance: how rates are found, and how near they have to come.
    azure: a trace in the Azure format, "" for generated bursts. kv_backend: how the guest gives KV
    pages back.
    """

    host: str = "7b"
    guest: str = "8b"
    dtype: str = "bfloat16"
    start_s: float = 180.0
    arm_s: float = 10.0
    rounds: int = 6
    idle_s: float = 4.0
    window_s: float = 1.0
    capacity_s: float = 6.0
    calibration_s: float = 8.0
    tries: int = 4
    busy_tolerance: float = 0.15
    seed: int = 0
    azure: str = ""
    kv_backend: str = "auto"
    host_sequences: int = 128
    host_kv_bytes: int = 2048 * MIB
    guest_kv_bytes: int = 4096 * MIB
    max_prompt_tokens: int = 1024
    max_output_tokens: int = 64
    guest_load: GuestLoad = GUEST_LOAD
    ttft_target_s: float = 0.5
    tpot_target_s: float = 0.15

    def __post_init__(self) -> None:
        if not 1.0 <= self.arm_s <= 60:
            raise ConfigError("--arm-s is 1 to 60 seconds")
        if not 1 <= self.rounds <= 100:
            raise ConfigError("--arm-rounds is 1 to 100")
        if self.azure and not Path(self.azure).is_file():
            raise ConfigError(f"{self.azure} is no file; name a trace in the Azure format")
        if self.kv_backend not in KV_BACKENDS:
            raise ConfigError(f"--kv-backend is one of {', '.join(KV_BACKENDS)}")

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """From what `asdict` makes of it."""
        return cls(**{**plain, "guest_load": GuestLoad(**plain["guest_load"])})

    @property
    def trace_digest(self) -> str:
        """Which trace the bursts are of, in a result that names no path."""
        if not self.azure:
            return "generated"
        return hashlib.sha256(Path(self.azure).read_bytes()).hexdigest()[:16]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request of either model."""
        guest = self.guest_load
        longest = max(
            self.max_prompt_tokens + self.max_output_tokens,
            guest.prompt_tokens + guest.output_tokens,
        )
        return 64 * -(-longest // 64)


REHEARSAL = ServingSizes(
    host="tiny-host",
    guest="tiny-guest",
    start_s=90.0,
    arm_s=1.5,
    rounds=1,
    idle_s=1.0,
    window_s=0.25,
    capacity_s=1.5,
    calibration_s=1.5,
    tries=2,
    busy_tolerance=1.0,
    host_sequences=32,
    host_kv_bytes=64 * MIB,
    guest_kv_bytes=16 * MIB,
    max_prompt_tokens=96,
    max_output_tokens=16,
    guest_load=GuestLoad(streams=8, prompt_tokens=32, output_tokens=64, token_budget=64),
)
