"""Stand-ins for what the clients of other projects import, and a test of their calls does not run.

A module that is nowhere else, in the packages named here, is made when it is imported. Its names
are empty classes, but for those that a client's calls are made of.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGES = (
    "areal",
    "megatron",
    "prime_rl",
    "ray",
    "renderers",
    "sglang",
    "slime",
    "torchdata",
    "verifiers",
)


@dataclasses.dataclass
class HttpRequest:
    """Fields of areal.api.io_struct's request."""

    endpoint: str
    payload: dict[str, Any]
    method: str = "POST"


@dataclasses.dataclass
class WeightUpdateRequests:
    requests: list[HttpRequest]


@dataclasses.dataclass
class HttpGenerationResult:
    output_tokens: list[int]
    output_logprobs: list[float]
    stop_reason: str
    routed_experts: object = None


@dataclasses.dataclass
class ServerArgs:
    """The arguments of an SGLang server that slime sets."""

    model_path: str = ""
    trust_remote_code: bool = False
    random_seed: int = 0
    enable_memory_saver: bool = False
    host: str = ""
    port: int = 0
    nccl_port: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    gpu_id_step: int = 1
    base_gpu_id: int = 0
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    skip_server_warmup: bool = False
    enable_draft_weights_cpu_backup: bool = False
    enable_metrics: bool = False
    mem_fraction_static: float | None = None


class ClientConfig:
    """verifiers' client configuration: any fields."""

    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)


class UpdateWeightFromDistributed:
    """The part of the class that slime's delta mode uses."""

    def __init__(self, args: object, *rest: object, **named: object) -> None:
        self.args, self.weight_version = args, 0
        self.update_weight_metrics: dict[str, float] = {}


class Mpu:
    """Megatron's groups of one rank."""

    @staticmethod
    def get_data_parallel_rank(**options: object) -> int:
        return 0

    @staticmethod
    def get_tensor_model_parallel_rank() -> int:
        return 0


NAMES: dict[str, dict[str, object]] = {
    "areal.api.io_struct": {
        "HttpRequest": HttpRequest,
        "WeightUpdateRequests": WeightUpdateRequests,
        "HttpGenerationResult": HttpGenerationResult,
    },
    "areal.utils.logging": {"getLogger": logging.getLogger},
    "prime_rl.utils.logger": {"get_logger": logging.getLogger},
    "sglang.srt.server_args": {"ServerArgs": ServerArgs},
    "megatron.core": {"mpu": Mpu},
    "ray": {"get": lambda done: done},
    "slime.backends.megatron_utils.update_weight.update_weight_from_distributed": {
        "UpdateWeightFromDistributed": UpdateWeightFromDistributed
    },
    "slime.utils.accelerator": {
        "current_device": lambda: "cpu",
        "resolve_visible_device_id": lambda device: device,
    },
    "slime.utils.distributed_utils": {"get_gloo_group": lambda: None},
    "verifiers.v1.configs.client": {
        "EvalClientConfig": ClientConfig,
        "TrainClientConfig": ClientConfig,
    },
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = NAMES.get(self.__name__, {}).get(name) or type(name, (), {})
        setattr(self, name, made)
        return made


class Neighbours(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: what is really there is taken."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def stand_in() -> None:
    """Make them from now on."""
    sys.meta_path.append(Neighbours())
