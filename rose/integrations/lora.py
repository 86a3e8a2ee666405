"""LoRA adapters of PEFT as versions: what is published is the adapter alone, without merging.

A replica of the same checkpoint whose node gives it `lora` keeps its base, and takes the adapter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose.errors import RefusedError
from rose.integrations.named_weights import Named, UnfitWeightsError, cast_bits, gathered
from weight_transfer import Adapter, AdapterError, TensorBits, base_digest, check_adapter, digest_of

if TYPE_CHECKING:
    import torch

# Settings of PEFT's LoraConfig that make more of an adapter than lora_A and lora_B of one rank.
_UNFIT = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
# Ways to begin that change the base, which replicas keep.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of an adapter that its tensors do not say, in PEFT's words."""

    r: int
    lora_alpha: float
    use_rslora: bool = False

    @classmethod
    def of(cls, config: Any) -> "LoraSettings":  # noqa: ANN401 -- PEFT's LoraConfig, or its fields
        """Return the settings in a LoraConfig or in a mapping of its fields. Raises RefusedError
        for one that makes another kind of adapter.
        """
        fields = config if isinstance(config, Mapping) else vars(config)
        kind = str(getattr(fields.get("peft_type"), "value", fields.get("peft_type") or "LORA"))
        odd = [name for name in _UNFIT if fields.get(name)]
        if fields.get("bias", "none") != "none":
            odd.append("bias")
        if str(fields.get("init_lora_weights", "")).startswith(_CHANGES_BASE):
            odd.append("init_lora_weights")
        if kind != "LORA" or odd:
            what = f"{odd[0]}={fields.get(odd[0])!r}" if odd else f"peft_type={kind}"
            raise RefusedError(
                f"{what}: adapters are published with LoRA's lora_A and lora_B alone"
            )
        return cls(int(fields["r"]), float(fields["lora_alpha"]), bool(fields.get("use_rslora")))


def is_adapted(model: "torch.nn.Module") -> bool:
    """Return True for a model of PEFT with adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "active_adapters")


def adapter_of(model: Any) -> tuple[LoraSettings, Named]:  # noqa: ANN401 -- PEFT's PeftModel
    """Return the settings of a PEFT model's active adapter, and its tensors by the names that PEFT
    saves them under. Raises RefusedError for an adapter that is not LoRA alone.
    """
    from peft import get_peft_model_state_dict

    names = model.active_adapters
    if len(names) != 1:
        raise RefusedError(f"{len(names)} adapters are active ({names}); activate one")
    settings = LoraSettings.of(model.peft_config[names[0]])
    # By itself PEFT would look on a hub whether embeddings were resized.
    tensors = get_peft_model_state_dict(model, adapter_name=names[0], save_embedding_layers=False)
    return settings, tensors.items()


class NamedAdapter:
    """Collector of one version's adapter tensors, in the dtypes of the weights that they adapt.

    As with NamedWeights every tensor is visited, since gathering a DTensor is collective.
    """

    def __init__(self, base: Mapping[str, TensorBits], settings: LoraSettings, digest: str) -> None:
        self._base = base
        self.adapter = Adapter(digest, settings.r, settings.lora_alpha, settings.use_rslora)
        self._bits: dict[str, TensorBits] = {}

    def take(self, named: Named, *, keep: bool = True) -> None:
        """Gather every tensor from its ranks, and keep a copy if `keep`."""
        for name, tensor in named:
            whole = gathered(tensor)
            if keep:
                module = name.removeprefix("base_model.model.").partition(".lora_")[0]
                weight = self._base.get(f"{module}.weight")
                self._bits[name] = cast_bits(name, whole, weight.dtype if weight else None)

    def finish(self) -> dict[str, TensorBits]:
        """Return the adapter's tensors by name. Raises `UnfitWeightsError` if one does not fit the
        checkpoint.
        """
        try:
            check_adapter(self.adapter, self._bits, self._base)
        except AdapterError as error:
            raise UnfitWeightsError(str(error)) from error
        return self._bits


def digest_of_base(base: Mapping[str, TensorBits]) -> str:
    """Return the name of a checkpoint as a base; it reads all of its weights."""
    return base_digest({name: digest_of(tensor.bits) for name, tensor in base.items()})
