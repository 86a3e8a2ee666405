"""SGLang's internals that the plugins use: the versions ROSE is tested with, and the hooks.

No surface here is public in SGLang but the registry of hooks; the engine tests pin the others. A
hook that cannot be set, or a plugin that fails, would only be logged by SGLang, which then serves
without it. So `install` looks whether each hook is in its place, and ends the process with one line
where it is not.
"""

import logging
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, NoReturn

from executor.errors import ExecutorError

TESTED: Final = ("0.5.23",)
SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"

Hook = Callable[..., Any]
"""Called with the function that it stands around, then with that function's arguments."""

logger = logging.getLogger("rose.sglang")


class Part(StrEnum):
    """The part of an engine that a process is. Each loads all plugins."""

    SERVER = "serves HTTP"
    SCHEDULER = "schedules and computes, for one rank"
    OTHER = "turns tokens into text"


def part_of_engine() -> Part:
    """What this process is: hooks of another part's would only have that part's modules loaded."""
    if multiprocessing.parent_process() is None:
        return Part.SERVER
    target = getattr(multiprocessing.current_process(), "_target", None)
    name = getattr(target, "__name__", "")
    return Part.OTHER if name == "run_detokenizer_process" else Part.SCHEDULER


def check_version(version: str | None = None) -> None:
    """Raise ExecutorError unless ROSE is tested with this SGLang (None: the one installed here)."""
    if version is None:
        from sglang.version import __version__

        return check_version(__version__)
    if version.partition("+")[0] not in TESTED:
        raise ExecutorError(
            f"ROSE is not tested with SGLang {version}; install one of {', '.join(TESTED)}"
        )
    return None


def stand_around(hooks: Mapping[str, Hook]) -> None:
    """Set hooks around these functions, by their full names.

    Raises ExecutorError where one cannot be set.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = sorted(hooks.keys() - HookRegistry._patched)
    if missing:
        raise ExecutorError(f"this SGLang has no {missing[0]}; install {TESTED[-1]}")


def install(hooks: Mapping[str, Hook]) -> None:
    """Set hooks without which this engine may not serve: ends the process where one cannot be."""
    try:
        stand_around(hooks)
    except ExecutorError as error:
        give_up(error)


def give_up(error: Exception) -> NoReturn:
    """End the process with one line: SGLang would log an exception and serve on without ROSE."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    raise SystemExit(1) from error


NEEDED: Final[Mapping[str, tuple[object, str]]] = {
    "speculative_algorithm": (None, "speculative decoding"),
    "disaggregation_mode": ("null", "disaggregated prefill and decode"),
    "enable_custom_logit_processor": (False, "custom samplers"),
    "enable_lora": (False, "LoRA adapters"),
    "enable_hierarchical_cache": (False, "the hierarchical cache"),
    "enable_lmcache": (False, "LMCache"),
    "dllm_algorithm": (None, "diffusion models"),
    "tokenizer_worker_num": (1, "several tokenizer processes"),
    "pp_size": (1, "pipeline parallelism"),
    "dp_size": (1, "data parallelism"),
    "disable_overlap_schedule": (True, "overlapped scheduling, which holds tokens back"),
    "incremental_streaming_output": (True, "streams that repeat all tokens"),
}
"""What a replica's server arguments have to be, and what any other value means."""

GUEST_NEEDED: Final[Mapping[str, tuple[object, str]]] = {
    "tp_size": (1, "a guest on several GPUs"),
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
"""What a host's have to be: its steps are told of otherwise than they are."""

LENDING_NEEDED: Final[Mapping[str, tuple[object, str]]] = {
    name: NEEDED[name] for name in ("enable_hierarchical_cache", "enable_lmcache")
} | {
    "tp_size": (1, "several ranks, whose caches have to forget the same"),
    "enable_hisparse": (False, "hierarchical sparse attention"),
    "enable_unified_memory": (False, "one memory for several kinds of cache"),
}
"""What a lending host's have to be besides."""


def check_features(
    arguments: object,
    needed: Mapping[str, tuple[object, str]] = NEEDED,
    what: str = "a replica",
) -> None:
    """Raise ExecutorError for the first argument that breaks a promise that `what` makes."""
    for name, (value, meaning) in needed.items():
        found = getattr(arguments, name, value)
        if (found or None) != (value or None):
            option = "--" + name.replace("_", "-")
            instead = f"give {option}" if value is True else f"leave out {option}"
            raise ExecutorError(f"{what} on SGLang does not have {meaning}; {instead}")


def client_request_id(engine_request_id: str) -> str:
    """The id that a client sent: SGLang takes it as it is."""
    return engine_request_id


def own_devices(ranks: int) -> tuple[str, ...]:
    """UUIDs of the GPUs that an engine of so many ranks has; empty on a CPU, or where no driver
    says."""
    import torch

    if not torch.cuda.is_available():
        return ()
    try:
        found = [torch.cuda.get_device_properties(rank).uuid for rank in range(ranks)]
    except Exception:  # noqa: BLE001 -- of whatever driver there is; without UUIDs nobody comes
        return ()
    return tuple(f"GPU-{str(uuid).removeprefix('GPU-')}" for uuid in found)
