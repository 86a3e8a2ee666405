"""Plugin that keeps vLLM's Linear weights unpacked on CPU, so that in-place writes take effect.

On CPU vLLM packs each Linear weight into a closure at load time and empties the parameter (a tied
lm_head keeps a packed copy of its own): writing into parameters then changes nothing the engine
computes. Replicas pay some throughput for plain `F.linear`; hosts are never touched.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROLES = ("guest", "dedicated")
"""Values of ROSE_ROLE whose engines take weight updates."""


def register() -> None:
    """Make vLLM keep Linear weights unpacked on CPU.

    Do nothing unless ROSE_ROLE is guest or dedicated.
    """
    if os.environ.get("ROSE_ROLE") not in ROLES:
        return
    from vllm.model_executor.layers import utils

    # vLLM imports this name inside the functions that use it, so the module attribute decides.
    utils.dispatch_cpu_unquantized_gemm = plain_linear


def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Make a 2-D layer compute with `F.linear` on its own weight, so that the weight is not packed.

    It replaces vLLM's `dispatch_cpu_unquantized_gemm`.
    """
    from torch.nn import functional

    attributes: Any = layer
    weight: torch.Tensor = attributes.weight
    # 3-D weights (experts, causal convolutions) are computed by their own methods, unpacked.
    if weight.ndim == 2 or weight.is_meta:
        attributes.cpu_linear = functional.linear
