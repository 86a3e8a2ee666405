"""LoRA adapters of the tiny model: their tensors by PEFT's names, and the model that they make."""

from collections.abc import Mapping
from pathlib import Path

from weight_transfer import (
    Adapter,
    TensorBits,
    base_digest,
    digest_of,
    tensor_bits,
    tensor_of,
)

RANK, ALPHA = 8, 16.0
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def settings_of(base: Mapping[str, TensorBits], r: int = RANK) -> Adapter:
    """Return the signed settings of an adapter on this base."""
    digests = {name: digest_of(tensor.bits) for name, tensor in base.items()}
    return Adapter(base_digest(digests), r, ALPHA)


def adapter_of(
    base: Mapping[str, TensorBits], seed: int, r: int = RANK, targets: tuple[str, ...] = TARGETS
) -> dict[str, TensorBits]:
    """Return random tensors of an adapter, large enough to change what is generated."""
    import torch

    torch.manual_seed(seed)
    made = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module.endswith(targets) and len(tensor.shape) == 2:
            rows, columns = tensor.shape
            for letter, shape in (("A", (r, columns)), ("B", (rows, r))):
                full = f"base_model.model.{module}.lora_{letter}.weight"
                values = 0.05 * torch.randn(shape)
                made[full] = tensor_bits(full, values.to(getattr(torch, tensor.dtype)))
    return made


def moved(tensors: Mapping[str, TensorBits], seed: int) -> dict[str, TensorBits]:
    """Return the adapter after a step that changes a tenth of its weights."""
    import torch

    torch.manual_seed(seed)
    new = {}
    for name, bits in tensors.items():
        weight = tensor_of(bits)
        chosen = torch.rand(weight.shape) < 0.1
        noise = 0.05 * torch.randn(weight.shape, dtype=torch.float32)
        new[name] = tensor_bits(name, torch.where(chosen, weight + noise.to(weight.dtype), weight))
    return new


def merged_tokens(
    model_dir: Path, tensors: Mapping[str, TensorBits], prompt: list[int], count: int
) -> list[int]:
    """Return greedy tokens of transformers' model, its weights with the adapter's added."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, bits in tensors.items():
            module, found, _ = name.partition(".lora_A.weight")
            if found:
                low = tensor_of(tensors[f"{module}.lora_B.weight"]) @ tensor_of(bits)
                weight = parameters[f"{module.removeprefix('base_model.model.')}.weight"]
                weight += ALPHA / bits.shape[0] * low
        given = torch.tensor([prompt])
        # Tokens are compared one by one, whatever ends a sequence.
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def write_adapter(folder: Path, tensors: Mapping[str, TensorBits]) -> None:
    """Write an adapter as PEFT does, in a folder that engines load."""
    import json

    from safetensors.torch import save_file

    folder.mkdir()
    save_file(
        {name: tensor_of(bits) for name, bits in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*TARGETS]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
