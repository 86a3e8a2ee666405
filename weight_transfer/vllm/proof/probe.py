"""Proofs of an active version: the audit of its weights and the probe of what it computes.

Audit: digests of the weights that an engine really holds, in pieces between its steps.

Each rank sums over the weights it has; of a weight that several ranks or parameters hold, every
copy has to have the same sum. Together they are the checkpoint's digests, or a weight was flipped.

Probe: a version is active when the model computes what a fresh dense load of it computes.

Parameters prove nothing by themselves: engines keep packed copies, tied copies, caches. So a fixed
prompt goes through the live model and through a fresh dense load, and the logits of all positions
must agree in every bit. Both passes use the live KV cache's null block 0 as scratch, which no
request reads, and put back what lay there.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weight_transfer.errors import ProbeError
from weight_transfer.format.digest import MODULUS
from weight_transfer.vllm.loader_map import LoaderMap
from weight_transfer.vllm.rectangle import Rectangle, flat_bits, flat_view

if TYPE_CHECKING:
    import torch


PIECE_ELEMENTS = 8 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Sum over some weights of a checkpoint tensor; `key` names them, on all ranks alike."""

    tensor: str
    key: tuple[int, ...]
    elements: int
    total: int


class Audit:
    """One pass over all mapped weights of one rank."""

    def __init__(self, loader_map: LoaderMap) -> None:
        self._map = loader_map
        self._left = [
            piece
            for name in loader_map.names
            for rectangle in loader_map.rectangles(name)
            for piece in rectangle.pieces(PIECE_ELEMENTS)
        ][::-1]

    @property
    def done(self) -> bool:
        """Whether every weight was looked at."""
        return not self._left

    def step(self, elements: int) -> list[Part]:
        """Sum over about as many weights as `elements`; at least one piece."""
        parts: list[Part] = []
        while self._left and elements > 0:
            piece = self._left.pop()
            parts.append(self._part(piece))
            elements -= piece.elements
        return parts

    def _part(self, piece: Rectangle) -> Part:
        flat = self._map.parameter(piece.target)
        if flat.device.type == "cpu":
            total = piece.digest_part(flat_bits(flat))
        else:
            total = _on_device(piece, self._map)
        return Part(piece.source, piece.source_key, piece.elements, total)


def _on_device(piece: Rectangle, loader_map: LoaderMap) -> int:
    """Fetch the piece alone, compacted; its sum is the host's work."""
    live = loader_map.flat(piece.target)
    part = live.as_strided(piece.shape, piece.target_strides, piece.target_offset).contiguous()
    strides = tuple(part.stride())
    return replace(piece, target_offset=0, target_strides=strides).digest_part(flat_bits(part))


@dataclass(frozen=True, slots=True)
class Findings:
    """`flipped`: checkpoint tensors whose live weights are wrong, or whose copies differ.

    `unjudged`: tensors of which the parts leave something out, as they do where ranks are missing
    or a loader transforms weights; their copies agree.
    """

    flipped: tuple[str, ...]
    unjudged: tuple[str, ...]


def judge(
    parts: Iterable[Part], digests: Mapping[str, int], elements: Mapping[str, int]
) -> Findings:
    """Compare all ranks' parts with `digests`; `elements`: how many each tensor has."""
    totals: dict[str, dict[tuple[int, ...], Part]] = defaultdict(dict)
    wrong: set[str] = set()
    for part in parts:
        if totals[part.tensor].setdefault(part.key, part) != part:
            wrong.add(part.tensor)
    unjudged = set()
    for name, sums in totals.items():
        if sum(part.elements for part in sums.values()) != elements[name]:
            unjudged.add(name)
        elif sum(part.total for part in sums.values()) % MODULUS != digests[name]:
            wrong.add(name)
    return Findings(tuple(sorted(wrong)), tuple(sorted(unjudged - wrong)))


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
    import torch

    if torch.equal(flat_view(live.contiguous()), flat_view(fresh.contiguous())):
        return ProbeResult(ok=True, max_abs_diff=0.0)
    diff = float((live.double() - fresh.double()).abs().max())
    return ProbeResult(ok=False, max_abs_diff=diff if math.isfinite(diff) else sys.float_info.max)


class Prober:
    """Runs the probe prompt through models that share the live engine's KV cache.

    Only to be used while the engine is paused or between its steps. A KV block that is shorter than
    the prompt shortens it: the probe has block 0 alone.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:  # noqa: ANN401 -- vLLM's
        self._config = vllm_config
        self._device = device
        self._layers = _cached_layers(vllm_config)
        if not self._layers:
            raise ProbeError("the engine has no KV cache yet; initialise weights after its start")
        specs = [layer.get_kv_cache_spec(vllm_config) for layer in self._layers.values()]
        room = min(spec.block_size for spec in specs)
        self._tokens = probe_prompt(vllm_config.model_config.get_vocab_size())[:room]
        self._builders = _builders(vllm_config, device, self._layers)

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the probe's logits [tokens, vocabulary] as `model` computes them now."""
        import torch
        from vllm.forward_context import set_forward_context

        device = self._device
        count = len(self._tokens)
        tokens = torch.tensor(self._tokens, dtype=torch.int32, device=device)
        positions = torch.arange(count, dtype=torch.int64, device=device)
        with torch.inference_mode(), self._scratch_block():
            metadata, slots = self._attention(positions)
            # Compiled code of the live model would be compared with code made anew for another.
            with set_forward_context(
                metadata,
                self._config,
                num_tokens=count,
                slot_mapping=slots,
                skip_compiled=True,
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
        for names, builder in self._builders:
            metadata.update(dict.fromkeys(names, builder.build(0, common)))
        return metadata, dict.fromkeys(metadata, common.slot_mapping)

    @contextmanager
    def _scratch_block(self) -> Iterator[None]:
        blocks = [layer.kv_cache[0] for layer in self._layers.values()]
        saved = [block.clone() for block in blocks]
        try:
            yield
        finally:
            for block, content in zip(blocks, saved, strict=True):
                block.copy_(content)


def _cached_layers(vllm_config: Any) -> dict[str, Any]:  # noqa: ANN401 -- vLLM's
    """Live layers by name that keep KV in the cache."""
    context = vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in context.items()
        if getattr(layer, "kv_cache", None) is not None
        and len(layer.kv_cache)
        and layer.get_kv_cache_spec(vllm_config) is not None
    }


def _builders(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's
    device: torch.device,
    layers: dict[str, Any],
) -> list[tuple[list[str], Any]]:
    """(layers, what builds their attention metadata) for each backend and kind of KV cache."""
    groups: dict[tuple[Any, Any], list[str]] = {}
    for name, layer in layers.items():
        key = layer.get_attn_backend(), layer.get_kv_cache_spec(vllm_config)
        groups.setdefault(key, []).append(name)
    return [
        (names, backend.get_builder_cls()(spec, names, vllm_config, device))
        for (backend, spec), names in groups.items()
    ]
