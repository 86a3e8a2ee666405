"""A fresh dense load: the engine's own loader, run anew on checkpoint-coordinate weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weight_transfer.tensors import TensorBits, tensor_of

if TYPE_CHECKING:
    import torch


def load_fresh(
    vllm_config: Any,  # noqa: ANN401 -- an engine type that is not ours to check
    device: torch.device,
    tensors: Mapping[str, TensorBits],
) -> torch.nn.Module:
    """Build a second instance of the engine's model and load `tensors` into it.

    Same classes, same loader and the same processing after loading as at engine start. It registers
    its layers in a context of its own, so the live model's layers stay the registered ones.
    """
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    model_config = config.model_config
    with set_default_torch_dtype(model_config.dtype), device:
        model: torch.nn.Module = initialize_model(vllm_config=config, model_config=model_config)
    load: Any = model.load_weights
    load((name, tensor_of(tensor)) for name, tensor in tensors.items())
    process_weights_after_loading(model, model_config, device)
    return model.eval()
