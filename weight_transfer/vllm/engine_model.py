"""Models of vLLM: the live one, others like it, and the probe that runs through both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weight_transfer.engine.proof.probe import probe_prompt
from weight_transfer.errors import ProbeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class VllmLoader:
    """Makes instances of an engine's model as vLLM does at its start."""

    vllm_config: Any
    device: torch.device

    def skeleton(self, device: torch.device) -> torch.nn.Module:
        """Build a second instance of the engine's model, its weights not loaded.

        It registers its layers in a context of its own: the live model's stay the registered ones.
        """
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(self.vllm_config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        model_config = config.model_config
        with set_default_torch_dtype(model_config.dtype), device:
            model: torch.nn.Module = initialize_model(vllm_config=config, model_config=model_config)
        return model

    def loading(self) -> AbstractContextManager[Any]:
        """What vLLM's loaders and their processing run in."""
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[Any] = set_current_vllm_config(self.vllm_config)
        return context

    def process(self, module: torch.nn.Module) -> None:
        """Do what vLLM does once weights are loaded."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        process_weights_after_loading(module, self.vllm_config.model_config, self.device)


@dataclass(frozen=True, slots=True)
class VllmModel(VllmLoader):
    """A live model with its configuration, and the probe for models like it."""

    model: torch.nn.Module
    prober: VllmProber

    layerwise = True

    @classmethod
    def of(cls, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> VllmModel:  # noqa: ANN401 -- vLLM's
        """Of a worker whose KV cache exists."""
        return cls(vllm_config, device, model, VllmProber(vllm_config, device))


class VllmProber:
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
