"""SGLang's command line and environment for an engine.

SGLang takes the size of its KV cache in tokens, computed here from the model's configuration. An
engine runs the plugins of its role; a stock one runs none.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rose.engines.spec import Device, EngineRole, EngineSpec
from rose.errors import ConfigError

MODULE = "sglang.launch_server"
NAME = "SGLang"
HOST_GROUP = PLUGINS_GROUP = "sglang.srt.plugins"
# Options that every role, and that replicas, must not have, each with its meaning.
REFUSED = {
    "--speculative-algorithm": "speculative decoding",
    "--speculative-draft-model-path": "speculative decoding",
    "--disaggregation-mode": "disaggregated prefill and decode",
    "--dllm-algorithm": "diffusion models",
}
REFUSED_IN_REPLICAS = {
    "--enable-custom-logit-processor": "custom samplers",
    "--enable-lora": "LoRA adapters",
    "--enable-hierarchical-cache": "the hierarchical cache",
    "--enable-lmcache": "LMCache",
    "--language-only": "encoders in other engines",
}
# Options that a node does not give to its replicas.
REFUSED_BY_NODE = {
    "--pp-size": "pipeline stages, of which the last alone proves an update",
    "--pipeline-parallel-size": "pipeline stages, of which the last alone proves an update",
    "--tokenizer-worker-num": "several API processes",
    "--nnodes": "several machines",
    "--config": "options in a file",
    "--api-key": "a key of its own",
    "--admin-api-key": "a key of its own",
}
# Options that a node's file has a field of its own for.
FIELDS = {
    "--tp-size": "tensor_parallel",
    "--tensor-parallel-size": "tensor_parallel",
    "--dp-size": "data_parallel",
    "--data-parallel-size": "data_parallel",
    "--ep-size": "expert_parallel",
    "--expert-parallel-size": "expert_parallel",
}
_PLUGINS: Final = {
    EngineRole.HOST: "rose_host",
    EngineRole.GUEST: "rose_guest,rose_replica",
    EngineRole.DEDICATED: "rose_replica",
    EngineRole.STOCK: "none",
}
_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
# SGLang needs these to run without a GPU.
_CPU_ARGS: Final = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--mem-fraction-static=0.1",
)
_REPLICA_ARGS: Final = (
    # Each part of a stream holds only new tokens, so that each is reported with its version.
    "--incremental-streaming-output",
    # The convention of all engines: lower first. Running requests stay, as in vLLM.
    "--enable-priority-scheduling",
    "--schedule-low-priority-values-first",
    "--disable-priority-preemption",
)
# A frozen engine generates nothing, and is healthy.
_REPLICA_ENV: Final = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
_CPU_ENV: Final = {
    "OMP_NUM_THREADS": "1",
    # Its CPU kernels are vLLM's, which ask for their platform.
    "VLLM_TARGET_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}


def arguments(spec: EngineSpec) -> list[str]:
    """Return SGLang's command-line options for an engine, to follow the module's name."""
    return _arguments(spec, kv_tokens(spec))


def _arguments(spec: EngineSpec, tokens: int) -> list[str]:
    made = [
        f"--model-path={spec.model_dir}",
        f"--served-model-name={spec.name}",
        "--host=127.0.0.1",
        f"--port={spec.port}",
        f"--dtype={spec.dtype}",
        f"--context-length={spec.max_model_len}",
        f"--max-running-requests={spec.max_num_seqs}",
        f"--max-total-tokens={tokens}",
        f"--stream-interval={spec.stream_interval}",
        f"--load-format={spec.load_format}",
        "--skip-server-warmup",
        # An idle engine waits for messages: otherwise it would spin on a core that others share.
        "--sleep-on-idle",
    ]
    if spec.tensor_parallel > 1:
        made.append(f"--tp-size={spec.tensor_parallel}")
    if spec.expert_parallel:
        made.append(f"--ep-size={spec.tensor_parallel}")
    if spec.trust_remote_code:
        made.append("--trust-remote-code")
    if spec.tokenizer:
        made.append(f"--tokenizer-path={spec.tokenizer}")
    if spec.device is Device.CPU:
        made.extend(_CPU_ARGS)
    elif spec.enforce_eager:
        made.append("--disable-cuda-graph")
    if spec.role.is_replica:
        made.extend(_REPLICA_ARGS)
        if spec.device is not Device.CPU:
            # Nothing is in flight between two steps: weights and granules may be changed there.
            made.append("--disable-overlap-schedule")
    return [*made, *spec.extra_args]


def refused_values(words: Sequence[str]) -> dict[str, str]:
    """Return the options that a replica must not have with the value that they have in `words`;
    SGLang has none.
    """
    del words
    return {}


def own_options(spec: EngineSpec) -> set[str]:
    """Return the names of the options that `arguments` sets."""
    return {word.partition("=")[0] for word in _arguments(spec, 0)}


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables, for an engine of this specification, that only SGLang
    reads.
    """
    return {
        "SGLANG_PLUGINS": _PLUGINS[spec.role],
        **(_CPU_ENV if spec.device is Device.CPU else {}),
        **(_REPLICA_ENV if spec.role.is_replica else {}),
    }


def kv_tokens(spec: EngineSpec) -> int:
    """Return the number of tokens whose KV fits in each rank's `kv_bytes`. Raises ConfigError if
    the model's configuration does not give the KV size of a token.
    """
    path = Path(spec.model_dir) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        numbers = config["num_hidden_layers"] * _kv_numbers(config, spec.tensor_parallel)
        a_token = numbers * _DTYPE_BYTES[spec.dtype]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"engine {spec.name}: {path} does not say how large a token's KV is ({error!r:.80});"
            " run a model of plain attention on SGLang, or vLLM"
        ) from error
    return max(1, int(spec.kv_bytes // a_token))


def _kv_numbers(config: dict[str, Any], ranks: int) -> int:
    """Return the number of values that one rank keeps of a token in one layer."""
    if config.get("kv_lora_rank"):
        # Latent attention: each rank has all of it.
        return int(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    # A head is on one rank, or on several where there are fewer heads.
    return int(2 * max(1, kv_heads // ranks) * size)
