"""Process of an engine: each kind's command line, and what all kinds share."""

from types import ModuleType

from rose.engines import sglang, vllm
from rose.engines.spec import Device, EngineKind, EngineRole, EngineSpec
from rose.process.child import ProcessSpec
from rose.process.launcher import Share

_KINDS: dict[EngineKind, ModuleType] = {EngineKind.VLLM: vllm, EngineKind.SGLANG: sglang}


def process_spec(spec: EngineSpec) -> ProcessSpec:
    """Return the child process that is this engine."""
    kind = _KINDS[spec.engine]
    return ProcessSpec(
        name=spec.name,
        argv=(spec.interpreter, "-m", kind.MODULE, *kind.arguments(spec)),
        env=_environment(spec) | kind.environment(spec) | spec.extra_env,
        log=spec.log,
        core=spec.core,
        share=share_of(spec),
        cgroup=spec.cgroup,
        family=True,  # an engine core lives on for good when its API process is killed
    )


def share_of(spec: EngineSpec) -> Share | None:
    """Return an engine's CPU share beside other processes, None for an equal one.

    A guest on a GPU ranks above one on a CPU: if it has to wait for a core, the step that it has
    begun ends in the host's time.
    """
    if spec.role is not EngineRole.GUEST:
        return None
    return "aside" if spec.device is Device.CUDA else "background"


def _environment(spec: EngineSpec) -> dict[str, str]:
    env = {
        "ROSE_ROLE": "" if spec.role is EngineRole.STOCK else spec.role.value,
        "ROSE_REPLICA_ID": spec.name,
        "ROSE_SLO_TTFT_S": str(spec.ttft_target_s),
        "ROSE_SLO_TPOT_S": str(spec.tpot_target_s),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
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
    return env
