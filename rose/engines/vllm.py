"""vLLM's command line and environment for an engine, the same for all versions that ROSE knows.

An engine of one rank runs its worker inside its engine core (UniProcExecutor): two processes would
starve each other on one core. Several ranks are a process each below their engine core ("mp").
"""

import json
from collections.abc import Iterator, Sequence

from executor.vllm.compat import DRAFTS, undrafted
from rose.contract.replica import MOST_LOGPROBS
from rose.engines.spec import Device, EngineRole, EngineSpec

MODULE = "vllm.entrypoints.openai.api_server"
NAME = "vLLM"
# Entry points: the stat logger of a host, and the plugins that every engine loads.
HOST_GROUP, PLUGINS_GROUP = "vllm.stat_logger_plugins", "vllm.general_plugins"
# Options that every role, and that replicas, must not have, each with its meaning.
REFUSED: dict[str, str] = {}
SPECULATIVE = "--speculative-config"
REFUSED_IN_REPLICAS = {
    "--spec-method": f"drafts outside of {SPECULATIVE}",
    "-sc": f"drafts outside of {SPECULATIVE}",
    "--kv-transfer-config": "disaggregated prefill and decode",
    "--logits-processors": "custom samplers",
    "--enable-lora": "LoRA adapters but by `lora` of the node's file",
}
# Options that a node does not give to its replicas.
REFUSED_BY_NODE = {
    "--pipeline-parallel-size": "pipeline stages, of which the last alone proves an update",
    "--prefill-context-parallel-size": "several ranks",
    "--api-server-count": "several API processes",
    "--headless": "several machines",
    "--config": "options in a file",
    "--api-key": "a key of its own",
    "--uds": "a socket in the place of its port",
    "--ssl-keyfile": "TLS of its own",
    "--root-path": "other paths",
    "--kv-offloading-size": "offloaded KV memory",
}
# Options that a node's file has a field of its own for.
FIELDS = {
    "--tensor-parallel-size": "tensor_parallel",
    "--data-parallel-size": "data_parallel",
    "--enable-expert-parallel": "expert_parallel",
    "--enable-lora": "lora",
    "--max-loras": "lora",
    "--max-lora-rank": "lora",
}
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_PLUGINS = {
    EngineRole.HOST: "rose_host",
    EngineRole.GUEST: "rose_unpacked,rose_replica",
    EngineRole.DEDICATED: "rose_unpacked,rose_replica",
    EngineRole.STOCK: "none",
}
_REPLICA_ARGS = (
    "--worker-extension-cls=weight_transfer.vllm.worker.WeightWorker",
    # Behaviour logprobs are those of the distribution that was sampled from.
    "--logprobs-mode=processed_logprobs",
    # A bound alone: vLLM reserves nothing for it.
    f"--max-logprobs={MOST_LOGPROBS}",
    "--generation-config=vllm",
    "--disable-log-stats",
    # The routes, for a vLLM without endpoint plugins.
    "--middleware=rose.replica.endpoint.EndpointMount",
    # AccessFilter closes unused routes, and requires a secret for control. The last middleware is
    # the outermost, so turns skip the others.
    "--middleware=rose.replica.asgi.AccessFilter",
    "--middleware=rose.replica.asgi.GenerateShortcut",
)
# KV memory is given in bytes. vLLM's share only has to be free when an engine starts; a larger one
# would keep a guest from starting beside its host.
_NO_SHARE = "--gpu-memory-utilization=0.01"
# Engines of one CPU share its cores.
_CPU_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def arguments(spec: EngineSpec) -> list[str]:
    """Return vLLM's command-line options for an engine, to follow the module's name."""
    made = [
        f"--model={spec.model_dir}",
        f"--served-model-name={spec.name}",
        "--host=127.0.0.1",
        f"--port={spec.port}",
        f"--dtype={spec.dtype}",
        f"--kv-cache-memory-bytes={spec.kv_bytes}",
        f"--max-model-len={spec.max_model_len}",
        f"--max-num-seqs={spec.max_num_seqs}",
        *([f"--block-size={spec.block_size}"] if spec.block_size else []),
        f"--stream-interval={spec.stream_interval}",
        f"--distributed-executor-backend={_EXECUTOR if spec.tensor_parallel == 1 else 'mp'}",
        "--disable-uvicorn-access-log",
        f"--load-format={spec.load_format}",
    ]
    made.extend(_parallel(spec))
    if spec.trust_remote_code:
        made.append("--trust-remote-code")
    if spec.tokenizer:
        made.append(f"--tokenizer={spec.tokenizer}")
    if spec.enforce_eager:
        made.append("--enforce-eager")
    if spec.device is Device.CUDA:
        made.append(_NO_SHARE)
    made.extend(_scheduler(spec))
    if spec.role in (EngineRole.HOST, EngineRole.GUEST):
        if spec.kv_backend == "cuda":
            made.append("--worker-cls=executor.vllm.reserved_worker.ReservedKvWorker")
        elif spec.device is Device.CPU and spec.tensor_parallel > 1:
            made.append("--worker-cls=executor.vllm.cpu_worker.CpuKvWorker")
    made.extend(_lora(spec))
    if spec.role.is_replica:
        made.extend(_REPLICA_ARGS)
    return [*made, *spec.extra_args]


def _scheduler(spec: EngineSpec) -> Iterator[str]:
    if spec.role is EngineRole.GUEST:
        yield "--scheduler-cls=executor.vllm.guest.scheduler.GatedScheduler"
    elif spec.role is EngineRole.DEDICATED and drafts_of(spec.extra_args) is not None:
        yield "--scheduler-cls=executor.vllm.drafts.DraftScheduler"


def _parallel(spec: EngineSpec) -> Iterator[str]:
    if spec.tensor_parallel > 1:
        yield f"--tensor-parallel-size={spec.tensor_parallel}"
    if spec.data_parallel > 1:
        yield f"--data-parallel-size={spec.data_parallel}"
    if spec.expert_parallel:
        yield "--enable-expert-parallel"


def _lora(spec: EngineSpec) -> list[str]:
    if spec.lora is None:
        return []
    # One slot is for the reference of a version that comes.
    slots = spec.lora.max_adapters + 1
    return ["--enable-lora", f"--max-loras={slots}", f"--max-lora-rank={spec.lora.max_rank}"]


def drafts_of(words: Sequence[str]) -> str | None:
    """Return the method of the drafts that these options ask for; None without drafts, "" if they
    do not name it.
    """
    method = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        option, _, key = name.replace("_", "-").partition(".")
        # vLLM takes the beginning of an option for the whole.
        if len(option) < len("--spec") or not SPECULATIVE.startswith(option):
            continue
        given = value if equals else "".join(words[place + 1 : place + 2])
        if key == "method":
            method = given
        elif not key:
            try:
                method = str(json.loads(given).get("method", ""))
            except (ValueError, AttributeError):
                method = ""
        method = method or ""
    return method


def refused_values(words: Sequence[str]) -> dict[str, str]:
    """Return the options among these words that a replica must not have with the value that they
    have there, each with its meaning.
    """
    method = drafts_of(words)
    return {} if method is None or method in DRAFTS else {SPECULATIVE: undrafted(method)}


def own_options(spec: EngineSpec) -> set[str]:
    """Return the names of the options that `arguments` sets."""
    return {word.partition("=")[0] for word in arguments(spec)}


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables, for an engine of this specification, that only vLLM
    reads.
    """
    env = {
        "VLLM_PLUGINS": _PLUGINS[spec.role],
        "VLLM_NO_USAGE_STATS": "1",
    }
    return env | (_CPU_ENV if spec.device is Device.CPU else {})
