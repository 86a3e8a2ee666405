"""What pieces with host and guests need: modules, memory of the card, time."""

from rose.bench.coserve.plan import ARMS, BLOCK_OVERHEAD_S
from rose.bench.gpu.models import shape_of
from rose.bench.gpu.serve.sizes import ServingSizes

MODULES = (
    *("torch", "vllm", "transformers", "fastapi"),
    *("aiohttp", "msgspec", "numpy", "psutil", "pydantic", "cryptography", "blake3", "zstandard"),
    *("numba", "uvloop"),
)
# Fifteen requests one after another, which tell how long one takes.
PACE_S = 5.0
# Rows and their intervals, after the last round.
ANALYSIS_S = 8.0
# Of each weight, guessed: version 0 known to both sides, a version published, one applied.
KNOWN_NS, PUBLISHED_NS, APPLIED_NS = 8.0, 1.5, 4.0
# What an engine takes beside weights and KV cache: contexts, activations, graphs.
BESIDE_BYTES = 3 << 30


def memory_bytes(sizes: ServingSizes) -> int:
    """Of a card: a host, a guest and a stock guest, with weights in 16 bits."""
    weights = shape_of(sizes.host).weights + 2 * shape_of(sizes.guest).weights
    return 2 * weights + sizes.host_kv_bytes + 2 * sizes.guest_kv_bytes + 3 * BESIDE_BYTES


def round_s(sizes: ServingSizes) -> float:
    """One round of all arms, and of each guest without host load."""
    arms = len(ARMS) * (sizes.arm_s + 2 * BLOCK_OVERHEAD_S)
    return arms + 2 * (sizes.idle_s + BLOCK_OVERHEAD_S)


def bursts_s(sizes: ServingSizes) -> float:
    """One round, with what the host can do."""
    return sizes.capacity_s + 2 * BLOCK_OVERHEAD_S + round_s(sizes) + ANALYSIS_S


def updates_s(sizes: ServingSizes) -> float:
    """An update without host load and one under it, with the blocks beside it and its control.

    Before that a guest reads and proves version 0, and two sets of weights are made.
    """
    weights = shape_of(sizes.guest).weights
    found_s = PACE_S + sizes.tries * (sizes.calibration_s + BLOCK_OVERHEAD_S)
    blocks_s = 2 * (weights * APPLIED_NS * 1e-9 + 2 * (sizes.arm_s + 2 * BLOCK_OVERHEAD_S))
    return found_s + weights * (KNOWN_NS + 2 * PUBLISHED_NS + APPLIED_NS) * 1e-9 + blocks_s


def steady_s(sizes: ServingSizes) -> float:
    """One round, with a rate that has to be found first."""
    return PACE_S + sizes.tries * (sizes.calibration_s + BLOCK_OVERHEAD_S) + bursts_s(sizes)
