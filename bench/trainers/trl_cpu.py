"""Stand-ins on a CPU for the GPU calls of `AsyncGRPOTrainer`: for tests and measurements.

Its forward calls FlashAttention 3, whose kernel comes from a hub, and it asks CUDA for the peak of
the device.
"""

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


def stand_in() -> None:
    """Put both in the place of TRL's own."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = type("Kernel", (), {"flash_attn_varlen_func": staticmethod(flash_attn_varlen_func)})
    packing._flash_attn = lambda: kernel
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attention of packed sequences, as the kernel of that name: (tokens, heads, width) each."""
    out = torch.empty_like(q)
    groups = q.shape[1] // k.shape[1]
    rows, keys = (pairwise(map(int, each)) for each in (cu_seqlens_q, cu_seqlens_k))
    for (begin, end), (first, last) in zip(rows, keys, strict=True):
        length, seen = end - begin, last - first
        # The last query sees all keys.
        mask = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
        part = scaled_dot_product_attention(
            q[begin:end].transpose(0, 1),
            k[first:last].repeat_interleave(groups, 1).transpose(0, 1),
            v[first:last].repeat_interleave(groups, 1).transpose(0, 1),
            attn_mask=mask,
            scale=softmax_scale,
        )
        out[begin:end] = part.transpose(0, 1)
    return out
