"""Specification of an engine: one frozen record, from which each kind makes its command line.

`LACKS` are the capabilities in which engines differ, for the node, `rose doctor` and the docs: what
every engine has to do is not a capability but a promise (tests/engine/contract).

`module_path` makes ROSE's source tree usable for an interpreter that has an engine but not ROSE
installed. Engines find plugins by the entry points of installed distributions. Metadata in a folder
of the module path counts as one, so nothing has to be installed: `PYTHONPATH` names the tree and a
folder with the metadata that the tree's pyproject.toml asks for. The interpreter needs ROSE's own
dependencies (the extra `replica`) all the same.
"""

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rose.errors import ConfigError

_ROOT: Final = Path(__file__).parents[2]


def module_path(folder: Path, root: Path = _ROOT) -> str:
    """Write ROSE's plugin metadata into `folder` and return the PYTHONPATH with which another
    interpreter finds ROSE and its plugins.

    Raises ConfigError if ROSE does not run from a source tree.
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
    """Role of an engine: host (production), guest beside a host, dedicated replica, or stock engine
    without ROSE.
    """

    HOST = "host"
    GUEST = "guest"
    DEDICATED = "dedicated"
    STOCK = "stock"
    """An engine without ROSE, to compare with."""

    @property
    def is_replica(self) -> bool:
        """True for guest and dedicated engines, which serve ROSE's replica HTTP routes."""
        return self in (EngineRole.GUEST, EngineRole.DEDICATED)


class EngineKind(StrEnum):
    """Software that an engine runs: vLLM or SGLang."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Device(StrEnum):
    """Kind of device that an engine computes on: CPU or CUDA GPU."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class LoraSlots:
    """Places for LoRA adapters beside an engine's base: largest rank, and adapters at a time."""

    max_rank: int
    max_adapters: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Specification of one engine process, from which its command line and environment are made.

    kv_bytes: size of its KV cache on each rank. block_size: tokens of a block, None for the
    engine's choice.
    cores: CPUs that it is pinned to, () for any.
    stream_interval: tokens in a streamed chunk.
    control_page: page shared by a host and its guests; page_group: the group that may map it.
    orphan_s: seconds that a guest outlives the last grant.
    headroom_bytes: RAM that must stay free when it starts.
    cgroup: folder that it is moved to, None for its parent's.
    verify_key: hex of the key that signs manifests. unsigned: take updates without a key.
    weights_dir: folder of chunks and manifests, the only one that updates are read from; None takes
    no updates.
    warm_up_s: time limit in which a replica runs every size of step before it is healthy; None
    skips that.
    kv_backend: how a guest gives KV pages back; "cuda" reserves them on a GPU.
    step_profile, host_step_profile: files of `rose profile`, of a guest and of its host.
    engine: software that it runs; sizes mean the same with each.
    python: interpreter with the engine, None for this one; see `check_python`.
    device: on a GPU neither KV nor weights are memory of this machine, and no core is shared.
    enforce_eager: no compilation and no CUDA graphs; a CPU needs it.
    load_format: the engine's own; "dummy" makes random weights of a folder that has a
    configuration.
    tensor_parallel: ranks of one copy of the model; data_parallel: copies. expert_parallel: each
    expert lies whole on one rank.
    lora: places for adapters, of which versions then consist; None: versions are whole weights.
    trust_remote_code: run the Python files of the checkpoint. tokenizer: folder of the tokenizer,
    None for the model's.
    """

    name: str
    role: EngineRole
    model_dir: Path
    port: int
    log: Path
    cores: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    kv_bytes: int = 64 << 20
    max_model_len: int = 512
    max_num_seqs: int = 128
    block_size: int | None = 32
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
    engine: EngineKind = EngineKind.VLLM
    python: Path | None = None
    device: Device = Device.CPU
    enforce_eager: bool = True
    load_format: str = "auto"
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    lora: LoraSlots | None = None
    trust_remote_code: bool = False
    tokenizer: Path | None = None
    extra_env: dict[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of the engine's worker processes, and of its GPUs if it has any."""
        return self.tensor_parallel * self.data_parallel

    @property
    def interpreter(self) -> str:
        """Path of the Python interpreter that runs the engine."""
        return str(self.python or sys.executable)

    @property
    def url(self) -> str:
        """Base URL of the engine's HTTP server, on loopback."""
        return f"http://127.0.0.1:{self.port}"


class Capability(StrEnum):
    """Capability in which engine kinds differ; the value is its name in docs/engines.md."""

    LEND_HOST_MEMORY = "a host lends KV memory of the machine"
    LEND_GPU = "a host lends KV memory of a GPU"
    LEND_RANKS = "a host of several ranks lends"
    RETURN_HOST_MEMORY = "a guest gives back KV memory of the machine"
    RETURN_GPU = "a guest gives back KV memory of a GPU"
    RETURN_GROUPS = "a guest gives back KV memory of sliding windows and states"
    POOLING = "a replica serves a model that is not generative"
    SEED = "a turn that names a seed is repeated by it"
    WHITESPACE = "structured outputs have a turn's own rule for whitespace"
    RANKS = "a prompt's logprobs come with ranks, of unlikely tokens too"
    PIECEWISE_PROOF = "an update is proved with one layer of the new version in memory at a time"
    SLEEP = "a dedicated replica gives up its weights on request"
    ADAPTERS = "a replica serves LoRA adapters as versions"
    COPIES = "a dedicated replica has several data-parallel ranks"


LACKS: Final[Mapping[EngineKind, Mapping[Capability, str]]] = MappingProxyType(
    {
        EngineKind.VLLM: MappingProxyType({}),
        EngineKind.SGLANG: MappingProxyType(
            {
                Capability.RETURN_GROUPS: "ROSE does not shrink its pools of windows and states",
                Capability.POOLING: "its replica serves turns only",
                Capability.SEED: "it takes seeds with --enable-deterministic-inference only",
                Capability.WHITESPACE: "it has one rule for all of them",
                Capability.RANKS: "it tells none",
                Capability.PIECEWISE_PROOF: "its layers hand on more than their output",
                Capability.SLEEP: "its route frees memory of an idle engine only",
                Capability.ADAPTERS: "with LoRA it does not start on a CPU, where ROSE would prove"
                " its slots",
                Capability.COPIES: "ROSE's calls reach the ranks of one copy",
            }
        ),
    }
)
"""Missing capabilities of each engine, with the reason."""


def lacking(engine: EngineKind, capability: Capability) -> str | None:
    """Return the reason why an engine kind lacks a capability, None if it has it."""
    return LACKS[engine].get(capability)
