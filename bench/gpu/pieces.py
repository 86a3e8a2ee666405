"""The pieces in the order in which they run: sizes, needs, time and limits of each.

RoseError
├── CardError     (rose.nvml) this card cannot be measured now: nothing was touched
└── PieceError    one piece could not be measured, the others may
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from bench.common.checks import FAILS, INCONCLUSIVE, Check, at_least, at_most
from bench.coserve.plan import ARMS, BLOCK_OVERHEAD_S, GuestLoad
from bench.gpu.models import shape_of
from rose.errors import ConfigError, RoseError
from rose.nvml import CardError

GIB, MIB = 1 << 30, 1 << 20
# Commands on a lent machine are cut off after ten minutes.
MOST_S = 570.0
KV_BACKENDS = ("auto", "cuda", "madvise")
LEAST_ROUNDS = 3
GUEST_LOAD = GuestLoad(32, prompt_tokens=128, output_tokens=256, token_budget=256)
SHARE_OF_COPY = 0.6
GIB_MOVED_S = 0.050
UPDATE_S = 0.050
UPDATE_RATIO = 1.05
REQUESTS_FOR_P90 = 1_000
# The kernels that read or write weights by the gigabyte are timed against the card's copy.
AGAINST_COPY = ("diff", "overwrite_and_read_back")
# Fifteen requests one after another measure the time of one.
PACE_S = 5.0
# Rows and their intervals, after the last round.
ANALYSIS_S = 8.0
# Guesses for each weight: version 0 known to both sides, a version published, one applied.
KNOWN_NS, PUBLISHED_NS, APPLIED_NS = 8.0, 1.5, 4.0
# An engine needs this beside weights and KV cache: contexts, activations, graphs.
BESIDE_BYTES = 3 * GIB
TORCH = ("numpy", "torch")
KERNELS = (*TORCH, "triton")
SERVING_MODULES = (
    *("torch", "vllm", "transformers", "fastapi"),
    *("aiohttp", "msgspec", "numpy", "psutil", "pydantic", "cryptography", "blake3", "zstandard"),
    *("numba", "uvloop"),
)


class PieceError(RoseError):
    """One piece could not be measured."""


Measured = dict[str, Any]


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
_USUAL = ServingSizes()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all pieces.

    gib: size of each timed tensor, more than any cache. density: share of changed weights.
    model: see `models`. serving: host, guests.
    """

    gib: float = 4.0
    density: float = 0.02
    rounds: int = 10
    model: str = "8b"
    serving: ServingSizes = _USUAL

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
        serving = plain["serving"]
        load = GuestLoad(**serving["guest_load"])
        return cls(**{**plain, "serving": ServingSizes(**{**serving, "guest_load": load})})

    def told(self, *, serving: bool) -> dict[str, Any]:
        """Return a record's sizes: those of host and guests, or all others; without paths."""
        plain = asdict(self)
        engines: dict[str, Any] = plain.pop("serving")
        return engines | {"azure": self.serving.trace_digest} if serving else plain

    @property
    def tensor_bytes(self) -> int:
        """Bytes of each timed tensor."""
        return int(self.gib * GIB)


# ---- limits of a card's figures ----


def kernel_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge diff and scatter against the copy of the same run."""
    return [
        at_least(f"{name}: share of copy", measured["speed"][name]["share_of_copy"], SHARE_OF_COPY)
        for name in AGAINST_COPY
    ]


def update_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge the overwrite, a part of the pause: too long it fails, short it proves nothing."""
    check = at_most("overwrite within the pause: s", measured["overwrite_s"]["p50"], UPDATE_S)
    return [check if check.verdict == FAILS else replace(check, verdict=INCONCLUSIVE)]


def updating_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge the pause of an update under serving, and the host's latencies meanwhile.

    A ratio of few requests above its limit decides nothing.
    """
    pause, host = measured["pause_s"], measured["host"]
    few = min(host[name]["requests"] for name in ("during", "control")) < REQUESTS_FOR_P90
    checks = [at_most(f"pause {which}: s", pause[which], UPDATE_S) for which in ("p50", "most")]
    for name in ("ttft_p90_s", "tpot_p90_s"):
        if name in host["ratio"]:
            check = at_most(f"host {name[:-2]} over control", host["ratio"][name], UPDATE_RATIO)
            undecided = few and check.verdict == FAILS
            checks.append(replace(check, verdict=INCONCLUSIVE) if undecided else check)
    return checks


def served_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Return the decisive checks of every arm with a ROSE guest, as the piece judged them."""
    return [
        Check(**check | {"name": f"{row['policy']} {row['slack_share']:g} {check['name']}"})
        for row in measured["rows"]
        if row["policy"] is not None
        for check in row["checks"]
        if check["decisive"]
    ]


def page_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge one gibibyte from a guest's process to a host's by handles."""
    moved_s = measured["by_handle"]["moved_s"]["p50"]
    return [at_most("1 GiB from guest to host: s", moved_s, GIB_MOVED_S)]


# ---- time and memory of host and guests ----


def serving_bytes(sizes: Sizes) -> int:
    """Return the card's memory for a host, a guest and a stock guest, with weights in 16 bits."""
    serving = sizes.serving
    weights = shape_of(serving.host).weights + 2 * shape_of(serving.guest).weights
    return 2 * weights + serving.host_kv_bytes + 2 * serving.guest_kv_bytes + 3 * BESIDE_BYTES


def bursts_s(sizes: ServingSizes) -> float:
    """Return the time of one round of all arms, and of the capacity's measurement."""
    arms = len(ARMS) * (sizes.arm_s + 2 * BLOCK_OVERHEAD_S)
    round_s = arms + 2 * (sizes.idle_s + BLOCK_OVERHEAD_S)
    return sizes.capacity_s + 2 * BLOCK_OVERHEAD_S + round_s + ANALYSIS_S


def steady_s(sizes: ServingSizes) -> float:
    """Return the time of one round whose rate has to be found first."""
    return PACE_S + sizes.tries * (sizes.calibration_s + BLOCK_OVERHEAD_S) + bursts_s(sizes)


def updates_s(sizes: ServingSizes) -> float:
    """Return the time of an update without host load and of one under it with its control blocks.

    Before that a guest reads and proves version 0, and two sets of weights are made.
    """
    weights = shape_of(sizes.guest).weights
    found_s = PACE_S + sizes.tries * (sizes.calibration_s + BLOCK_OVERHEAD_S)
    blocks_s = 2 * (weights * APPLIED_NS * 1e-9 + 2 * (sizes.arm_s + 2 * BLOCK_OVERHEAD_S))
    return found_s + weights * (KNOWN_NS + 2 * PUBLISHED_NS + APPLIED_NS) * 1e-9 + blocks_s


def kernel_bytes(sizes: Sizes) -> int:
    # Old, new, a copy and a target; while changes are drawn a float and a bit for each weight.
    return 9 * sizes.tensor_bytes + 2 * GIB


def update_bytes(sizes: Sizes) -> int:
    # A place, an index and a value of each change, there and back; a float while they are drawn.
    shape = shape_of(sizes.model)
    changes = int(shape.weights * sizes.density)
    return 2 * shape.weights + 2 * 18 * changes + 12 * shape.vocabulary * shape.hidden + 2 * GIB


# ---- the pieces ----


def absent(names: Iterable[str]) -> list[str]:
    """Return those of `names` that cannot be imported."""

    def importable(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # its parent package is absent
            return False

    return [name for name in names if not importable(name)]


@dataclass(frozen=True, slots=True)
class GpuPiece:
    """One piece.

    work: `module:function` that the piece's process imports and calls, with (Sizes, place), or
    with (ServingSession, seconds) when the piece is served.
    estimate_s: time on a card of 2024, alone. limit_s: longest time; then the process is ended.
    memory: bytes of the card. modules: packages that must be importable.
    least: shortest time of a served piece once the engines are up: host and guests are started for
    it, once for all served pieces of a process. None for a piece without engines.
    known_weights: its guest gets new weights, so version 0 is written to a file first.
    """

    name: str
    what: str
    work: str
    estimate_s: float
    limit_s: float
    memory: Callable[[Sizes], int]
    modules: tuple[str, ...] = ()
    checks: Callable[[Mapping[str, Any]], list[Check]] = lambda measured: []
    least: Callable[[ServingSizes], float] | None = None
    known_weights: bool = False

    def __post_init__(self) -> None:
        if not self.estimate_s <= self.limit_s <= MOST_S:
            raise ValueError(f"piece {self.name} is not below {MOST_S:.0f} s")

    @property
    def served(self) -> bool:
        return self.least is not None

    def least_s(self, sizes: Sizes) -> float:
        """Return the shortest time of the piece; of a served one, once the engines are up."""
        return self.estimate_s if self.least is None else self.least(sizes.serving)

    def takes_s(self, sizes: Sizes) -> float:
        """Return the expected time of the piece in a process of its own."""
        return self.least_s(sizes) + (sizes.serving.start_s if self.served else 0.0)

    def told(self, sizes: Sizes) -> dict[str, Any]:
        """Return the sizes that this piece depends on, as its record holds them."""
        return sizes.told(serving=self.served)

    def missing(self) -> str:
        """Return the reason why it cannot run in this environment, empty when it can."""
        missing = absent(self.modules)
        return f"needs {', '.join(missing)}, which this Python does not have" if missing else ""


def _served(
    name: str,
    what: str,
    work: str,
    least: Callable[[ServingSizes], float],
    **more: Any,  # noqa: ANN401 -- fields of a piece
) -> GpuPiece:
    """Return a piece that needs host and guests."""
    return GpuPiece(
        name, what, f"bench.gpu.{work}", _USUAL.start_s + least(_USUAL), MOST_S, serving_bytes,
        SERVING_MODULES, least=least, **{"checks": served_checks, **more},
    )  # fmt: skip


_alone = partial(GpuPiece, memory=lambda sizes: 4 * GIB)
PIECES = (
    _alone(
        "tests", "the tests that want a device, on it", "bench.gpu.device_tests:run", 240, 570,
        modules=(*TORCH, "pytest", "hypothesis"),
    ),
    _alone(
        "copy", "what the card's own copies move", "bench.gpu.kernels:copy_speeds", 20, 120,
        memory=lambda sizes: 2 * sizes.tensor_bytes + 4 * GIB, modules=TORCH,
    ),
    _alone(
        "pages", "create, map, access and unmap a page; 1 GiB from guest to host",
        "bench.gpu.pages:run", 60, 300, memory=lambda sizes: 6 * GIB,
        modules=("cuda.bindings",), checks=page_checks,
    ),
    _alone(
        "kernels", "weight kernels against the copy", "bench.gpu.kernels:run", 180, 570,
        memory=kernel_bytes, modules=KERNELS, checks=kernel_checks,
    ),
    _alone(
        "update", "a sparse update written over an 8B model's weights", "bench.gpu.kernels:update",
        120, 480, memory=update_bytes, modules=KERNELS, checks=update_checks,
    ),
    _served(
        "serve60", "host and guests in all arms, the host busy for 0.6", "loads:busy_60", steady_s
    ),
    _served("bursts", "the same under bursts of the Azure trace", "loads:bursts", bursts_s),
    _served(
        "update-serving", "2% of the guest's weights anew while host and guest serve",
        "updating:updates", updates_s, checks=updating_checks, known_weights=True,
    ),
    _served("serve30", "as serve60, the host busy for 0.3", "loads:busy_30", steady_s),
    _served("serve90", "the same, the host busy for 0.9", "loads:busy_90", steady_s),
)  # fmt: skip


def pieces_of(names: tuple[str, ...]) -> tuple[GpuPiece, ...]:
    """Return the named pieces in the order in which they run, or all. Raises CardError."""
    known = {piece.name for piece in PIECES}
    for name in names:
        if name not in known:
            raise CardError(f"no piece {name!r}; --list shows {', '.join(sorted(known))}")
    return tuple(piece for piece in PIECES if not names or piece.name in names)
