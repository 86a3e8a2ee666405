"""verl's configuration as ROSE reads it: settings, lengths, and unsupported fields by name."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from rose.errors import ConfigError, RefusedError
from rose.integrations.settings import PREFIX, TrainerSettings
from rose.integrations.verl.turns import Lengths

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

TESTED: Final = ("0.9.1",)
ENDS_TURNS: Final = "ROSE_VERL_ABORT"
_UNFIT: Final = {
    "quantization": "replicas serve the checkpoint's own dtypes; leave it out",
    "ignore_eos": "say it in the sampling parameters of the agent loop; leave it out here",
}
_YES = ("1", "true", "yes")


def settings_of(rollout: "RolloutConfig") -> TrainerSettings:
    """Return ROSE's settings from `engine_kwargs.rose` of verl's rollout configuration, over those
    of the environment. Raises ConfigError.
    """
    return overlaid((getattr(rollout, "engine_kwargs", None) or {}).get("rose") or {})


def overlaid(given: Mapping[str, Any]) -> TrainerSettings:
    """Return ROSE's settings from the environment, overridden by these values; None overrides
    nothing. Raises ConfigError.
    """
    known = [field.name for field in fields(TrainerSettings)]
    for name in given:
        if name not in known:
            raise ConfigError(f"ROSE has no setting {name!r}; there are {', '.join(known)}")
    said = {PREFIX + name.upper(): str(value) for name, value in given.items() if value is not None}
    return TrainerSettings.from_env({**os.environ, **said})


def ends_turns(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if verl's abort ends running turns (ROSE_VERL_ABORT is 1, true or yes); else they
    continue under the new version.
    """
    return environ.get(ENDS_TURNS, "").lower() in _YES


def replays_routes(rollout: "RolloutConfig") -> bool:
    """Return True if verl's trainer replays the experts that the rollout chose."""
    return bool(getattr(rollout, "enable_rollout_routing_replay", False))


def fixed_seed(rollout: "RolloutConfig", replica_rank: int) -> int | None:
    """Return the seed of one of verl's servers where all turns are to be deterministic, else None:
    that which verl's own server gives to each turn that names none.
    """
    if not getattr(rollout, "full_determinism", False):
        return None
    return int(getattr(rollout, "seed", 0) or 0) + replica_rank


def lengths_of(rollout: "RolloutConfig") -> Lengths:
    """Return verl's limits of prompt, response and model context, in tokens, from its rollout
    configuration.
    """
    return Lengths(rollout.prompt_length, rollout.response_length, rollout.max_model_len)


def refuse_unfit(rollout: "RolloutConfig", model: "HFModelConfig") -> None:
    """Raise RefusedError for a field of verl's configuration that ROSE's replicas cannot honour,
    such as quantization.
    """
    lora = getattr(model, "lora", None) or {}
    adapted = (
        getattr(model, "lora_rank", 0)
        or lora.get("rank", 0)
        or getattr(model, "lora_adapter_path", None)
    )
    sync = getattr(rollout, "checkpoint_engine", None)
    backend = getattr(sync, "backend", None) or "naive"
    if adapted and not lora.get("merge", False) and backend != "naive":
        raise RefusedError(
            f"rollout.checkpoint_engine.backend={backend} with LoRA: verl sends the base through"
            " it, and no adapter; train in sync mode, or merge first (model.lora.merge=True)"
        )
    for name, why in _UNFIT.items():
        if value := getattr(rollout, name, None):
            raise RefusedError(f"actor_rollout_ref.rollout.{name}={value}: {why}")
    if replays_routes(rollout) and ends_turns():
        raise RefusedError(
            f"rollout.enable_rollout_routing_replay: a turn that {ENDS_TURNS} ends"
            " has no experts; leave one of them out"
        )
    if getattr(getattr(rollout, "disaggregation", None), "enabled", False):
        raise RefusedError("actor_rollout_ref.rollout.disaggregation: ROSE places turns by itself")
