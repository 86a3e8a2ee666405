"""vLLM: the command line and environment of an engine; the same for all versions that ROSE knows.

Each engine runs its worker inside its engine core (UniProcExecutor): as two processes they would
starve each other on one core, and only there the scheduler's plugin reaches the KV memory.
"""

from rose.engines.spec import Device, EngineRole, EngineSpec
from rose.process.child import ProcessSpec
from rose.process.launcher import Share

_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_PLUGINS = {
    EngineRole.HOST: "rose_host",
    EngineRole.GUEST: "rose_unpacked,rose_replica",
    EngineRole.DEDICATED: "rose_unpacked,rose_replica",
    EngineRole.STOCK: "none",
}
_SCHEDULERS = {
    EngineRole.HOST: "executor.vllm.host.scheduler.ObservedScheduler",
    EngineRole.GUEST: "executor.vllm.guest.scheduler.GatedScheduler",
}
_REPLICA_ARGS = (
    "--worker-extension-cls=weight_transfer.vllm.worker.WeightWorker",
    # Behaviour logprobs are those of the distribution that was sampled from.
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
    "--disable-log-stats",
    # The routes, where vLLM has no endpoint plugins.
    "--middleware=rose.replica.endpoint.EndpointMount",
    # What nobody needs is shut, control needs a secret. Turns skip all middleware: the last is
    # the outermost.
    "--middleware=rose.replica.asgi.AccessFilter",
    "--middleware=rose.replica.asgi.GenerateShortcut",
)
# KV memory is given in bytes. All that is left of vLLM's share of a GPU is that so much of it is
# free when an engine starts, which would keep a guest from starting beside its host.
_NO_SHARE = "--gpu-memory-utilization=0.01"
# Engines of one CPU share its cores.
_CPU_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def process_spec(spec: EngineSpec) -> ProcessSpec:
    """The child process that is this engine."""
    return ProcessSpec(
        name=spec.name,
        argv=(spec.interpreter, "-m", "vllm.entrypoints.openai.api_server", *_arguments(spec)),
        env=_environment(spec),
        log=spec.log,
        core=spec.core,
        share=share_of(spec),
        cgroup=spec.cgroup,
        family=True,  # vLLM's engine core lives on for good when its API process is killed
    )


def share_of(spec: EngineSpec) -> Share | None:
    """How far it stands behind other processes: a guest's steps must not wait where its GPU is
    what it shares with the host, since one that stretches ends in the host's time."""
    if spec.role is not EngineRole.GUEST:
        return None
    return "aside" if spec.device is Device.CUDA else "background"


def _arguments(spec: EngineSpec) -> list[str]:
    arguments = [
        f"--model={spec.model_dir}",
        f"--served-model-name={spec.name}",
        "--host=127.0.0.1",
        f"--port={spec.port}",
        f"--dtype={spec.dtype}",
        f"--kv-cache-memory-bytes={spec.kv_bytes}",
        f"--max-model-len={spec.max_model_len}",
        f"--max-num-seqs={spec.max_num_seqs}",
        f"--block-size={spec.block_size}",
        f"--stream-interval={spec.stream_interval}",
        f"--distributed-executor-backend={_EXECUTOR}",
        "--disable-uvicorn-access-log",
        f"--load-format={spec.load_format}",
    ]
    if spec.enforce_eager:
        arguments.append("--enforce-eager")
    if spec.device is Device.CUDA:
        arguments.append(_NO_SHARE)
    if spec.role in _SCHEDULERS:
        arguments.append(f"--scheduler-cls={_SCHEDULERS[spec.role]}")
    if spec.role in _SCHEDULERS and spec.kv_backend == "cuda":
        arguments.append("--worker-cls=executor.vllm.kv.reserved_worker.ReservedKvWorker")
    if spec.role.is_replica:
        arguments.extend(_REPLICA_ARGS)
    return [*arguments, *spec.extra_args]


def _environment(spec: EngineSpec) -> dict[str, str]:
    env = {
        "ROSE_ROLE": "" if spec.role is EngineRole.STOCK else spec.role.value,
        "ROSE_REPLICA_ID": spec.name,
        "ROSE_SLO_TTFT_S": str(spec.ttft_target_s),
        "ROSE_SLO_TPOT_S": str(spec.tpot_target_s),
        "VLLM_PLUGINS": _PLUGINS[spec.role],
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.device is Device.CPU:
        env |= _CPU_ENV
    if spec.control_page:
        env["ROSE_CONTROL_PAGE"] = str(spec.control_page)
        env["ROSE_PAGE_GROUP"] = spec.page_group
        env["ROSE_ORPHAN_S"] = str(spec.orphan_s)
        env["ROSE_KV_BACKEND"] = spec.kv_backend
    if spec.warm_up_s is not None and spec.role.is_replica:
        env["ROSE_WARM_UP_S"] = str(spec.warm_up_s)
    if spec.step_profile:
        env["ROSE_STEP_PROFILE"] = str(spec.step_profile.absolute())
    if spec.host_step_profile:
        env["ROSE_HOST_STEP_PROFILE"] = str(spec.host_step_profile.absolute())
    if spec.weights_dir:
        env["ROSE_WEIGHTS_DIR"] = str(spec.weights_dir.absolute())
    if spec.verify_key:
        env["ROSE_VERIFY_KEY"] = spec.verify_key
    elif spec.unsigned:
        env["ROSE_UNSIGNED"] = "1"
    return env | spec.extra_env
