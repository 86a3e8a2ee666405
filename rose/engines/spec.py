"""Specification of an engine: one frozen record that gives its command line and environment.

They are the same for all versions of vLLM that ROSE knows. Each engine runs its worker inside its
engine core (UniProcExecutor): as two processes they would starve each other on one core, and only
there the scheduler's plugin reaches the KV memory.

`module_path` makes ROSE's source tree usable for an interpreter that has vLLM but not ROSE
installed. vLLM finds plugins by the entry points of installed distributions. Metadata in a folder
of the module path counts as one, so nothing has to be installed: `PYTHONPATH` names the tree and a
folder with the metadata that the tree's pyproject.toml asks for. The interpreter needs ROSE's own
dependencies (the extra `replica`) all the same.
"""

import sys
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rose.errors import ConfigError
from rose.process.child import ProcessSpec
from rose.process.launcher import Share

_ROOT: Final = Path(__file__).parents[2]


def module_path(folder: Path, root: Path = _ROOT) -> str:
    """Write the metadata into `folder`; the PYTHONPATH to start the other interpreter with.

    Raises ConfigError where ROSE does not run from a source tree.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"ROSE does not run from a source tree ({root} has no pyproject.toml of it); install it"
            " for the other interpreter: pip install --no-deps rose-rollout"
        ) from error
    name, version = project["name"], project["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(_entry_points(project), encoding="utf-8")
    return f"{root}:{folder.absolute()}"


def _entry_points(project: dict[str, Any]) -> str:
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines.extend(f"{name} = {target}" for name, target in points.items())
    return "\n".join([*lines, ""])


class EngineRole(StrEnum):
    """The part an engine plays on its GPU."""

    HOST = "host"
    GUEST = "guest"
    DEDICATED = "dedicated"
    STOCK = "stock"
    """An engine without ROSE, to compare with."""

    @property
    def is_replica(self) -> bool:
        """Whether it speaks ROSE's replica HTTP."""
        return self in (EngineRole.GUEST, EngineRole.DEDICATED)


class Device(StrEnum):
    """Device that an engine computes on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine.

    kv_bytes: size of its KV cache. core: CPU it is pinned to.
    stream_interval: tokens in a streamed chunk.
    control_page: page shared by a host and its guests; page_group: the group that may map it.
    orphan_s: how long a guest outlives the last grant.
    headroom_bytes: memory of the machine that has to stay free when it starts.
    cgroup: where it is put, None leaves it where its parent is.
    verify_key: hex of the key that signs manifests. unsigned: without a key updates are taken only
    where this is said.
    weights_dir: folder of chunks and manifests, the only one that updates are read from; None takes
    no updates.
    warm_up_s: a replica runs every size of step before it is healthy, for at most so long; None
    leaves that out.
    kv_backend: how a guest gives KV pages back; "cuda" reserves them on a GPU.
    step_profile, host_step_profile: files of `rose profile`, of a guest and of its host.
    python: interpreter with the vLLM to start, None for this one; see `check_python`.
    device: on a GPU neither KV nor weights are memory of this machine, and no core is shared.
    enforce_eager: without compilation and CUDA graphs; a CPU needs it.
    load_format: vLLM's; "dummy" makes random weights of a folder that has only a configuration.
    """

    name: str
    role: EngineRole
    model_dir: Path
    port: int
    log: Path
    core: int | None = None
    dtype: str = "bfloat16"
    kv_bytes: int = 64 << 20
    max_model_len: int = 512
    max_num_seqs: int = 128
    block_size: int = 32
    stream_interval: int = 1
    control_page: Path | None = None
    page_group: str = ""
    orphan_s: float = 1.5
    headroom_bytes: int = 0
    cgroup: Path | None = None
    verify_key: str | None = None
    unsigned: bool = False
    weights_dir: Path | None = None
    ttft_target_s: float = 0.5
    tpot_target_s: float = 0.15
    warm_up_s: float | None = None
    step_profile: Path | None = None
    host_step_profile: Path | None = None
    kv_backend: str = "auto"
    python: Path | None = None
    device: Device = Device.CPU
    enforce_eager: bool = True
    load_format: str = "auto"
    extra_env: dict[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()

    @property
    def interpreter(self) -> str:
        """The Python that runs it."""
        return str(self.python or sys.executable)

    @property
    def url(self) -> str:
        """Base address of its HTTP surface, on loopback."""
        return f"http://127.0.0.1:{self.port}"


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
        arguments.append("--worker-cls=executor.vllm.reserved_worker.ReservedKvWorker")
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
