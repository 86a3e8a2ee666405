"""Plugin of replicas on a CPU: weights stay unpacked, and seeded turns do not end the engine.

On CPU vLLM packs each Linear weight into a closure at load time and empties the parameter (a tied
lm_head keeps a packed copy of its own): writing into parameters then changes nothing the engine
computes. Replicas pay some throughput for plain `F.linear`; hosts are never touched.

vLLM computes a prompt in parts where a step has no room for all of it. It samples a token after
each part, and sets the generator of a seeded request back by an offset, which a CPU's generator
does not have: the engine core ends.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

SURFACES: Final = (
    "v1.worker.gpu_model_runner:GPUModelRunner._sample",
    "v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
    "v1.worker.gpu_model_runner:GPUModelRunner[input_batch, discard_request_mask]",
)
"""Names of vLLM that seeded turns on a CPU use, as `module:name(parameters)[attributes]`."""
ROLES = ("guest", "dedicated")
"""Values of ROSE_ROLE whose engines take weight updates."""


def register() -> None:
    """Make vLLM keep Linear weights unpacked on CPU, and compute parts of seeded prompts.

    Do nothing unless ROSE_ROLE is guest or dedicated.
    """
    if os.environ.get("ROSE_ROLE") not in ROLES:
        return
    from vllm.model_executor.layers import utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    for name in ("_sample", "_bookkeeping_sync"):
        setattr(Runner, name, unseeded_parts(getattr(Runner, name)))
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


def unseeded_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of vLLM's model runner before which the generators of requests whose sampled
    token is dropped are set aside, so that it neither draws from them nor sets them back.
    """

    @functools.wraps(method)
    def call(runner: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401 -- vLLM's model runner
        batch = runner.input_batch
        dropped = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        aside = {k: batch.generators.pop(k) for k in dropped if k in batch.generators}
        try:
            return method(runner, *args, **named)
        finally:
            batch.generators.update(aside)

    return call
