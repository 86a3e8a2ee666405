"""SGLang's internals that the plugins use: the versions ROSE is tested with, and the hooks.

No surface here is public in SGLang but the registry of hooks; the engine tests pin the others.
SGLang only logs a hook that cannot be set, or a plugin that fails, and then serves without it. So
`install` checks each hook, and ends the process with one line if one is missing.

`stamp` attaches its policy version to every token where it is sampled. SGLang reports the weights
of a request's tokens at its end, and a killed request never ends. Values that a model returns
beside its logits travel with each token: so does this one.
"""

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, NoReturn

from executor.engine_settings import POLICY_VERSION
from executor.engine_surfaces import EngineVersions
from executor.errors import ExecutorError

TESTED: Final = ("0.5.23",)
VERSIONS: Final = EngineVersions("SGLang", "sglang", TESTED, ("0.5.15", "0.5.24"))
check_version: Final = VERSIONS.check
STAMP: Final = "rose_version"
SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"

Hook = Callable[..., Any]
"""Hook around an SGLang function: called with the original, then with the original's arguments."""

logger = logging.getLogger("rose.sglang")


class EnginePart(StrEnum):
    """Part of an SGLang engine that a process is; each loads all plugins."""

    SERVER = "serves HTTP"
    SCHEDULER = "schedules and computes, for one rank"
    OTHER = "turns tokens into text"


def part_of_engine() -> EnginePart:
    """Return this process's part of the engine, so that hooks of other parts are not set."""
    if multiprocessing.parent_process() is None:
        return EnginePart.SERVER
    target = getattr(multiprocessing.current_process(), "_target", None)
    name = getattr(target, "__name__", "")
    return EnginePart.OTHER if name == "run_detokenizer_process" else EnginePart.SCHEDULER


def stand_around(hooks: Mapping[str, Hook]) -> None:
    """Set hooks around SGLang's functions, given by their full names.

    Raises ExecutorError if one cannot be set.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = sorted(hooks.keys() - HookRegistry._patched)
    if missing:
        raise ExecutorError(f"this SGLang has no {missing[0]}; install {TESTED[-1]}")


def install(hooks: Mapping[str, Hook]) -> None:
    """Set hooks that this engine needs; end the process if one cannot be set."""
    try:
        stand_around(hooks)
    except ExecutorError as error:
        give_up(error)


def give_up(error: Exception) -> NoReturn:
    """Write the error as one line to standard error and exit with status 1.

    SGLang would log an exception and serve on without ROSE.
    """
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    raise SystemExit(1) from error


NEEDED: Final[Mapping[str, tuple[object, str]]] = {
    "speculative_algorithm": (None, "speculative decoding"),
    "disaggregation_mode": ("null", "disaggregated prefill and decode"),
    "enable_custom_logit_processor": (False, "custom samplers"),
    "enable_lora": (False, "LoRA adapters"),
    "enable_hierarchical_cache": (False, "the hierarchical cache"),
    "enable_lmcache": (False, "LMCache"),
    "language_only": (False, "encoders in other engines"),
    "dllm_algorithm": (None, "diffusion models"),
    "tokenizer_worker_num": (1, "several tokenizer processes"),
    "pp_size": (1, "pipeline parallelism"),
    "dp_size": (1, "data parallelism"),
    "disable_overlap_schedule": (True, "overlapped scheduling, which holds tokens back"),
    "incremental_streaming_output": (True, "streams that repeat all tokens"),
}
"""Server arguments that a replica must have, and the feature that any other value turns on."""

GUEST_NEEDED: Final[Mapping[str, tuple[object, str]]] = {
    "nnodes": (1, "ranks on several machines"),
}


HOST_NEEDED: Final[Mapping[str, tuple[object, str]]] = {
    name: NEEDED[name]
    for name in (
        "speculative_algorithm",
        "disaggregation_mode",
        "dllm_algorithm",
        "pp_size",
        "dp_size",
    )
} | {"enable_pdmux": (False, "prefill and decode multiplexed on one GPU")}
"""Server arguments that a host must have, since its steps would be published wrongly otherwise."""

LENDING_NEEDED: Final[Mapping[str, tuple[object, str]]] = {
    name: NEEDED[name] for name in ("enable_hierarchical_cache", "enable_lmcache")
} | {
    **GUEST_NEEDED,
    "enable_hisparse": (False, "hierarchical sparse attention"),
    "enable_unified_memory": (False, "one memory for several kinds of cache"),
}
"""Further server arguments that a lending host must have."""


def check_features(
    arguments: object,
    needed: Mapping[str, tuple[object, str]] = NEEDED,
    what: str = "a replica",
) -> None:
    """Raise ExecutorError for the first server argument that does not have its needed value.

    needed: by name, the value and the meaning of any other. what: the subject of the error.
    """
    for name, (value, meaning) in needed.items():
        found = getattr(arguments, name, value)
        if (found or None) != (value or None):
            option = "--" + name.replace("_", "-")
            instead = f"give {option}" if value is True else f"leave out {option}"
            raise ExecutorError(f"{what} on SGLang does not have {meaning}; {instead}")


def client_request_id(engine_request_id: str) -> str:
    """Return the id that a client sent: SGLang takes it unchanged."""
    return engine_request_id


def own_devices(arguments: Any) -> tuple[str, ...]:  # noqa: ANN401 -- SGLang's
    """Return the UUIDs of the GPUs of an engine's ranks; empty on a CPU or if unknown."""
    import torch

    if not torch.cuda.is_available():
        return ()
    try:
        first, step = int(arguments.base_gpu_id), int(arguments.gpu_id_step)
        numbers = range(first, first + int(arguments.tp_size) * step, step)
        found = [torch.cuda.get_device_properties(number).uuid for number in numbers]
    except Exception:  # noqa: BLE001 -- of whatever driver there is; without UUIDs nobody comes
        return ()
    return tuple(f"GPU-{str(uuid).removeprefix('GPU-')}" for uuid in found)


def stamp(batch: Any, result: Any, environ: Mapping[str, str] = os.environ) -> None:  # noqa: ANN401 -- SGLang's
    """Attach to each token of a step's result the policy version that this process has active.

    The result's `customized_info` gets a list under STAMP, one version for each request of the
    batch.
    """
    output = getattr(result, "logits_output", None)
    if output is None:
        return
    versions = [int(environ.get(POLICY_VERSION, "0"))] * len(batch.reqs)
    output.customized_info = {**(output.customized_info or {}), STAMP: versions}


def stamped_run(original: Any, scheduler: Any, batch: Any, *more: Any, **named: Any) -> Any:  # noqa: ANN401
    """Run a batch, stamp its tokens and return the result: a hook for an engine without a gate."""
    result = original(scheduler, batch, *more, **named)
    stamp(batch, result)
    return result
