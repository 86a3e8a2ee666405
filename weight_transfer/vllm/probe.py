"""Probe: a version is active when the model computes what a fresh dense load of it computes.

Parameters prove nothing by themselves: engines keep packed copies, tied copies, caches. So a fixed
prompt goes through the live model and through a fresh dense load, and the logits of all positions
must agree in every bit. Both passes use the live KV cache's null block 0 as scratch, which no
request reads, and put back what lay there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_transfer.errors import ProbeError
from weight_transfer.tensors import bits_of

if TYPE_CHECKING:
    import torch

PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether all logits agree bit for bit, and the largest absolute difference.

    Where a difference is no number, the largest float stands for it: reports are JSON.
    """

    ok: bool
    max_abs_diff: float


def probe_prompt(vocab_size: int) -> list[int]:
    """Return the fixed probe prompt: tokens spread over the vocabulary, none special."""
    return [(7 + 31 * position) % vocab_size for position in range(PROBE_TOKENS)]


def compare(live: torch.Tensor, fresh: torch.Tensor) -> ProbeResult:
    """Compare two logits tensors [tokens, vocabulary] bit for bit."""
    if live.shape != fresh.shape:
        raise ProbeError(f"logits {tuple(live.shape)} and {tuple(fresh.shape)} cannot be compared")
    ok = np.array_equal(bits_of(live), bits_of(fresh))
    if ok:
        return ProbeResult(ok=True, max_abs_diff=0.0)
    diff = float((live.double() - fresh.double()).abs().max())
    return ProbeResult(ok=False, max_abs_diff=diff if math.isfinite(diff) else sys.float_info.max)


class Prober:
    """Runs the probe prompt through models that share the live engine's KV cache.

    `runner` is vLLM's model runner. Only to be used while the engine is paused or between steps.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 -- an engine type, not ours to check
        self._runner = runner
        config = runner.vllm_config
        self._tokens = probe_prompt(config.model_config.get_vocab_size())
        for spec in runner.kv_cache_config.kv_cache_groups:
            if spec.kv_cache_spec.block_size < len(self._tokens):
                raise ProbeError(
                    f"KV blocks of {spec.kv_cache_spec.block_size} tokens cannot hold the probe "
                    f"of {len(self._tokens)}; start the engine with a larger --block-size"
                )

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the probe's logits [tokens, vocabulary] as `model` computes them now."""
        import torch
        from vllm.forward_context import set_forward_context

        device = self._runner.device
        count = len(self._tokens)
        tokens = torch.tensor(self._tokens, dtype=torch.int32, device=device)
        positions = torch.arange(count, dtype=torch.int64, device=device)
        with torch.inference_mode(), self._scratch_block():
            metadata, slots = self._attention(positions)
            with set_forward_context(
                metadata, self._runner.vllm_config, num_tokens=count, slot_mapping=slots
            ):
                hidden = model(input_ids=tokens, positions=positions)
            compute: Any = model.compute_logits
            logits: torch.Tensor = compute(hidden).clone()
        return logits

    def _attention(self, positions: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return metadata and slots by layer: one sequence, all of it in block 0."""
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        count = int(positions.numel())
        starts = torch.tensor([0, count], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(positions.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([count], dtype=torch.int32, device=positions.device),
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=count,
            block_table_tensor=torch.zeros((1, 1), dtype=torch.int32, device=positions.device),
            slot_mapping=positions.clone(),
            positions=positions,
        )
        metadata: dict[str, Any] = {}
        for group in (group for groups in self._runner.attn_groups for group in groups):
            built = group.get_metadata_builder().build(0, common)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata, dict.fromkeys(metadata, common.slot_mapping)

    @contextmanager
    def _scratch_block(self) -> Iterator[None]:
        context = self._runner.vllm_config.compilation_config.static_forward_context
        blocks = [layer.kv_cache[0] for layer in context.values() if hasattr(layer, "kv_cache")]
        saved = [block.clone() for block in blocks]
        try:
            yield
        finally:
            for block, content in zip(blocks, saved, strict=True):
                block.copy_(content)
