"""Sizes of the measurements, and the memory and time that host and guests need at these sizes."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from bench.coserve.plan import ARMS, BLOCK_OVERHEAD_S, GuestLoad
from bench.gpu.models import shape_of
from rose.errors import ConfigError

MIB = 1 << 20
GUEST_LOAD = GuestLoad(streams=32, prompt_tokens=128, output_tokens=256, token_budget=256)
KV_BACKENDS = ("auto", "cuda", "madvise")


@dataclass(frozen=True, slots=True)
class ServingSizes:
    """Sizes of host and guests.

    host, guest: see `models`. dtype: of both. start_s: time that three engines take to start.
    arm_s: host load of one arm in one round; rounds: at most so many, fewer where time is short.
    idle_s: a guest without host load. window_s: arrivals this close share batches.
    calibration_s, tries, busy_tolerance: search of a rate, and the largest miss allowed.
    azure: a trace in the Azure format, "" for generated bursts. kv_backend: the guest's way to give
    KV pages back.
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
        """Convert from `asdict`."""
        return cls(**{**plain, "guest_load": GuestLoad(**plain["guest_load"])})

    @property
    def trace_digest(self) -> str:
        """Digest of the trace, for a result that names no path."""
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


LEAST_ROUNDS = 3
SERVING = ServingSizes()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all pieces.

    gib: size of each timed tensor, more than any cache. density: share of changed weights.
    check_size: weights of each comparison with numpy. model: see `models`. serving: host, guests.
    """

    gib: float = 4.0
    density: float = 0.02
    rounds: int = 10
    check_size: int = (1 << 22) + 5
    model: str = "8b"
    serving: ServingSizes = SERVING

    def __post_init__(self) -> None:
        if not 0 < self.gib <= 16:
            raise ConfigError("--gib is above 0 and at most 16")
        if not 0 < self.density < 1:
            raise ConfigError("--density is a share between 0 and 1")
        if self.rounds < LEAST_ROUNDS:
            raise ConfigError(f"--rounds is at least {LEAST_ROUNDS}: a median needs them")

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Convert from `asdict`."""
        serving = ServingSizes.of(plain["serving"])
        return cls(**{**plain, "serving": serving})

    def told(self, *, serving: bool) -> dict[str, Any]:
        """Return a record's sizes: those of host and guests, or all others; without paths."""
        plain = asdict(self)
        engines: dict[str, Any] = plain.pop("serving")
        if not serving:
            return plain
        return engines | {"azure": self.serving.trace_digest}

    @property
    def tensor_bytes(self) -> int:
        """Bytes of each timed tensor."""
        return int(self.gib * (1 << 30))


MODULES = (
    *("torch", "vllm", "transformers", "fastapi"),
    *("aiohttp", "msgspec", "numpy", "psutil", "pydantic", "cryptography", "blake3", "zstandard"),
    *("numba", "uvloop"),
)
# Fifteen requests one after another measure the time of one.
PACE_S = 5.0
# Rows and their intervals, after the last round.
ANALYSIS_S = 8.0
# Guesses for each weight: version 0 known to both sides, a version published, one applied.
KNOWN_NS, PUBLISHED_NS, APPLIED_NS = 8.0, 1.5, 4.0
# An engine needs this beside weights and KV cache: contexts, activations, graphs.
BESIDE_BYTES = 3 << 30


def memory_bytes(sizes: ServingSizes) -> int:
    """Return the card's memory for a host, a guest and a stock guest, with weights in 16 bits."""
    weights = shape_of(sizes.host).weights + 2 * shape_of(sizes.guest).weights
    return 2 * weights + sizes.host_kv_bytes + 2 * sizes.guest_kv_bytes + 3 * BESIDE_BYTES


def round_s(sizes: ServingSizes) -> float:
    """Return the time of one round of all arms, and of each guest without host load."""
    arms = len(ARMS) * (sizes.arm_s + 2 * BLOCK_OVERHEAD_S)
    return arms + 2 * (sizes.idle_s + BLOCK_OVERHEAD_S)


def bursts_s(sizes: ServingSizes) -> float:
    """Return the time of one round and the capacity's measurement."""
    return sizes.capacity_s + 2 * BLOCK_OVERHEAD_S + round_s(sizes) + ANALYSIS_S


def updates_s(sizes: ServingSizes) -> float:
    """Return the time of an update without host load and of one under it with its control blocks.

    Before that a guest reads and proves version 0, and two sets of weights are made.
    """
    weights = shape_of(sizes.guest).weights
    found_s = PACE_S + sizes.tries * (sizes.calibration_s + BLOCK_OVERHEAD_S)
    blocks_s = 2 * (weights * APPLIED_NS * 1e-9 + 2 * (sizes.arm_s + 2 * BLOCK_OVERHEAD_S))
    return found_s + weights * (KNOWN_NS + 2 * PUBLISHED_NS + APPLIED_NS) * 1e-9 + blocks_s


def steady_s(sizes: ServingSizes) -> float:
    """Return the time of one round whose rate has to be found first."""
    return PACE_S + sizes.tries * (sizes.calibration_s + BLOCK_OVERHEAD_S) + bursts_s(sizes)
