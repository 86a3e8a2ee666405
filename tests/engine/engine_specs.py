"""The engines of the pool, as modules name them in `pytest.mark.engines`."""

from pool import QWEN_VISION, VISION, PoolSpec
from sglang_python import PYTHON

from rose.engines import EngineKind, EngineRole
from rose.engines.spec import LoraSlots

MIB = 1 << 20
TOKENS_ONLY = "--skip-tokenizer-init"
# One that finds a stand-in for a GPU's pages: small enough that rollouts fill granules.
STANDIN_PAGE = 128 << 10

LEFT, RIGHT = (
    PoolSpec(name, EngineRole.DEDICATED, stream_interval=4, args=(TOKENS_ONLY,))
    for name in ("left", "right")
)
"""Two dedicated replicas."""

WORDED = PoolSpec("worded", EngineRole.DEDICATED, tokenizer="bytes")
"""A dedicated replica that has its tokenizer, as structured output needs it."""

SEEING = PoolSpec("seeing", EngineRole.DEDICATED, tokenizer=VISION, weights=True)
STOCK_SEEING = PoolSpec("stock-seeing", EngineRole.STOCK, tokenizer=VISION)
"""A dedicated replica of a model that takes images, and the same model without ROSE."""

SEEING_GUEST = PoolSpec(
    "seeing-guest",
    EngineRole.GUEST,
    page="seeing",
    tokenizer=QWEN_VISION,
    weights=True,
    args=("--image-processor-backend=pil",),
    engine=EngineKind.SGLANG,
    python=PYTHON,
)
"""A guest on SGLang of a model that takes images; it resizes them as transformers does here."""

REWARD = PoolSpec(
    "reward", EngineRole.DEDICATED, tokenizer="bytes", args=("--runner=pooling", "--convert=embed")
)
"""A dedicated replica of a model that is not generative."""

HOST = PoolSpec("host", EngineRole.HOST, page="shared", args=(TOKENS_ONLY,))
GUEST = PoolSpec(
    "guest",
    EngineRole.GUEST,
    page="shared",
    # More than the gibibyte that it is to return.
    kv_bytes=1280 * MIB,
    stream_interval=4,
    weights=True,
    args=(TOKENS_ONLY, "--generation-config=vllm"),
)
"""A host and its guest, on one page."""

ADAPTED = PoolSpec(
    "adapted",
    EngineRole.GUEST,
    page="adapted",
    weights=True,
    lora=LoraSlots(max_rank=8, max_adapters=2),
    args=(TOKENS_ONLY, "--generation-config=vllm"),
)
"""A guest whose versions are LoRA adapters; a stand-in is its host."""

RANKS = ("--tensor-parallel-size=2", "--distributed-executor-backend=mp")
RANKED_GUEST = PoolSpec(
    "ranked",
    EngineRole.GUEST,
    page="ranked",
    # Each rank has as much, and one returns a gibibyte.
    kv_bytes=1280 * MIB,
    stream_interval=4,
    args=(
        *(TOKENS_ONLY, "--generation-config=vllm", *RANKS),
        "--worker-cls=tests.engine.guest.gated_cpu_worker.GatedCpuWorker",
    ),
    environ=(("ROSE_GATED_START", "1"),),
)
RANKED_HOST = PoolSpec(
    "ranked-host",
    EngineRole.HOST,
    page="ranked",
    args=(
        *(TOKENS_ONLY, "--no-enable-prefix-caching", *RANKS),
        "--worker-cls=executor.vllm.cpu_worker.CpuKvWorker",
    ),
    environ=(("ROSE_HOST_LEVEL", "lend"),),
)
"""A guest and a host over two ranks, whose KV memory is in processes of their own."""

SWAPPED = PoolSpec(
    "swapped",
    EngineRole.GUEST,
    page="swapped",
    kv_bytes=48 * MIB,
    kv_backend="cuda",
    standin_cuda=True,
    args=(TOKENS_ONLY, "--worker-cls=standin_gpu_worker.StandInGpuWorker"),
    environ=(("STANDIN_CUDA_PAGE", str(STANDIN_PAGE)),),
)
"""A guest whose KV cache is pages of a GPU's driver, as far as it can tell."""

# One can be asked for tokens and logprobs as the gateway is, to compare with.
ONE = PoolSpec("one", EngineRole.STOCK, served="policy", args=("--enable-scale-out",))
TWO = PoolSpec("two", EngineRole.STOCK, served="policy")
"""Two engines without ROSE."""

PARALLEL = PoolSpec(
    "parallel",
    EngineRole.HOST,
    page="parallel",
    args=(TOKENS_ONLY, "--data-parallel-size=2"),
    environ=(("ROSE_HOST_LEVEL", "lend"),),
)
BESIDE_PARALLEL = PoolSpec("beside", EngineRole.GUEST, page="parallel", args=(TOKENS_ONLY,))
"""A host of two engine cores, which lend, and a guest on their page."""
