"""vLLM's models as a weight update sees them, and the probe that runs through them.

vLLM finds attention, expert and state layers by name in a table of its configuration. Each model
has a table and a scratch KV cache of its own here, so that a probe computes with the probed model's
layers alone and touches nothing that a request reads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from weight_transfer.apply.probe import probe_prompt
from weight_transfer.apply.reference import take_own
from weight_transfer.errors import ProbeError

if TYPE_CHECKING:
    import torch


_CONFIG = "_rose_vllm_config"
"""Attribute of a skeleton model: the vLLM configuration with its own table of layers."""
_WITH_WEIGHTS: Final = ("mtp", "eagle")
"""Methods of drafts that have weights of the checkpoint."""
_ONLINE_LOADER = "online_process_loader"
"""Name of vLLM's weight loaders that quantise a layer once all of its weights are there."""


SURFACES: Final = (
    "model_executor.model_loader.utils:initialize_model(vllm_config, model_config)",
    "model_executor.model_loader.utils:process_weights_after_loading(model, model_config,"
    " target_device)",
    "utils.torch_utils:set_default_torch_dtype",
    "config.vllm:set_current_vllm_config(vllm_config)",
    "model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
    "forward_context:set_forward_context(attn_metadata, vllm_config, num_tokens, slot_mapping,"
    " skip_compiled)",
    "v1.attention.backend:CommonAttentionMetadata[query_start_loc, query_start_loc_cpu, seq_lens,"
    " num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, slot_mapping,"
    " positions]",
    "v1.attention.backend:AttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata)",
    "v1.worker.utils:AttentionGroup.get_metadata_builder",
    "v1.worker.gpu_model_runner:GPUModelRunner.get_model",
    "v1.worker.gpu_model_runner:GPUModelRunner[vllm_config, device, attn_groups]",
    "v1.worker.gpu.model_runner:GPUModelRunner.get_model",
    "v1.worker.gpu.model_runner:GPUModelRunner[vllm_config, device, attn_groups]",
    "pooling_params:PoolingParams.verify(model_config)",
    "v1.pool.metadata:PoolingMetadata[prompt_lens, prompt_token_ids, prompt_token_ids_cpu,"
    " pooling_params, pooling_states]",
    "v1.pool.metadata:PoolingMetadata.build_pooling_cursor",
)
"""Names of vLLM that an update uses, as `module:name(parameters)[attributes]`."""


@dataclass(frozen=True, slots=True)
class VllmLoader:
    """Loader that makes further instances of an engine's model, as vLLM does at its start."""

    vllm_config: Any
    device: torch.device

    def skeleton(self, device: torch.device) -> torch.nn.Module:
        """Return a new instance of the engine's model on `device`, its weights not loaded.

        Its layers are registered in a table of its own; those of the live model stay registered in
        vLLM's.
        """
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(self.vllm_config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        model_config = self._served
        with set_default_torch_dtype(model_config.dtype), device:
            model: torch.nn.Module = initialize_model(vllm_config=config, model_config=model_config)
        setattr(model, _CONFIG, config)
        take_own(model, head=self._head)
        return model

    def only_copies(self, skeleton: torch.nn.Module) -> None:
        """Take vLLM's wrappers off the weight loaders, which quantise a layer once it is
        complete."""
        for parameter in skeleton.parameters():
            loader: Any = getattr(parameter, "weight_loader", None)
            while getattr(loader, "__name__", "") == _ONLINE_LOADER:
                loader = parameter.weight_loader = loader.__wrapped__  # type: ignore[attr-defined]

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Hold the configuration and the default dtype in which vLLM's weight loaders run."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        dtype = self.vllm_config.model_config.dtype
        with set_current_vllm_config(self.vllm_config), set_default_torch_dtype(dtype):
            yield

    def process(self, module: torch.nn.Module) -> None:
        """Run vLLM's post-processing of loaded weights on a module, in place."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        config = self.vllm_config.model_config
        if config.quantization is not None:
            from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

            # Layers that have padding, and attention, wait for it if they are quantised at load.
            finalize_layerwise_reload(module, config)
        process_weights_after_loading(module, config, self.device)

    @property
    def _served(self) -> Any:  # noqa: ANN401 -- vLLM's
        """Configuration of the model that is made."""
        return self.vllm_config.model_config

    @property
    def _head(self) -> bool:
        """True for a head that drafts, which has a checkpoint of its own beside the policy's."""
        return False


@dataclass(frozen=True, slots=True)
class VllmDrafts(VllmLoader):
    """A live model of vLLM that predicts more tokens: layers of the policy's, or a head (EAGLE)."""

    model: torch.nn.Module

    @classmethod
    def of(cls, runner: Any) -> VllmDrafts | None:  # noqa: ANN401 -- vLLM's model runner
        """Return the drafting model of vLLM's model runner, None without one of the checkpoint."""
        if getattr(runner.vllm_config.speculative_config, "method", None) not in _WITH_WEIGHTS:
            return None
        drafter = getattr(runner, "drafter", None) or runner.speculator
        return cls(runner.vllm_config, runner.device, drafter.model)

    @property
    def _served(self) -> Any:  # noqa: ANN401 -- vLLM's
        return self.vllm_config.speculative_config.draft_model_config

    @property
    def _head(self) -> bool:
        return bool(self.vllm_config.speculative_config.method == "eagle")


@dataclass(frozen=True, slots=True)
class VllmModel(VllmLoader):
    """A live vLLM model with its configuration, and the prober for models like it."""

    model: torch.nn.Module
    prober: VllmProber
    drafts: VllmDrafts | None = None

    layerwise = True

    @classmethod
    def of(cls, runner: Any) -> VllmModel:  # noqa: ANN401 -- vLLM's model runner
        """Return the model of vLLM's model runner. Raises ProbeError while it has no KV cache."""
        config, device = runner.vllm_config, runner.device
        return cls(config, device, runner.get_model(), VllmProber(runner), VllmDrafts.of(runner))


class VllmProber:
    """Prober that runs the fixed prompt through a model with a scratch KV cache.

    The scratch cache replaces the live one during the run. Use it only while the engine is paused
    or between its steps.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 -- vLLM's model runner
        """Prepare the prompt and its scratch cache.

        Raise ProbeError if the engine has no KV cache.
        """
        self._config = runner.vllm_config
        self._device = runner.device
        self._groups = [group for groups in runner.attn_groups for group in groups]
        if not self._groups:
            raise ProbeError("the engine has no KV cache yet; initialise weights after its start")
        self._tokens = probe_prompt(self._config.model_config.get_vocab_size())
        self._media = _media(runner)
        self._blocks = {
            name: 2 + (len(self._tokens) - 1) // _block_size(group)
            for group in self._groups
            for name in group.layer_names
        }

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the probe's logits [tokens, vocabulary] as `model` computes them now.

        For a model with image, video or sound encoders, return all logits and encoder outputs for a
        dummy input as one flat float32 tensor. For a pooling model, hidden states and the poolers'
        outputs stand in for the logits.
        """
        import torch
        from vllm.forward_context import set_forward_context

        count = len(self._tokens)
        tokens = torch.tensor(self._tokens, dtype=torch.int32, device=self._device)
        positions = torch.arange(count, dtype=torch.int64, device=self._device)
        # Text has one position on each axis of a rotary embedding of several.
        axes = self._config.model_config.uses_mrope
        rotary = positions.expand(3, -1).contiguous() if axes else positions
        config = getattr(model, _CONFIG, self._config)
        metadata, slots = self._attention(positions)
        with (
            torch.inference_mode(),
            self._scratch_cache(config),
            # Compiled code of the live model would be compared with code made anew for another.
            set_forward_context(
                metadata, config, num_tokens=count, slot_mapping=slots, skip_compiled=True
            ),
        ):
            called: Any = model
            hidden = called(input_ids=tokens, positions=rotary)
            if config.model_config.runner_type == "pooling":
                outputs = [hidden, *_pooled(called, config.model_config, hidden, tokens)]
            else:
                outputs = [called.compute_logits(hidden)]
            outputs += [part for batch in self._media for part in called.embed_multimodal(**batch)]
            return outputs[0].clone() if len(outputs) == 1 else _flat(outputs)

    def _attention(self, positions: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return attention metadata and KV slots, by layer name, for one new sequence.

        Its blocks begin with 1: block 0 is the one that vLLM's kernels take for padding.
        """
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        count, device = int(positions.numel()), self._device
        starts = torch.tensor([0, count], dtype=torch.int32)
        length = torch.tensor([count], dtype=torch.int32)
        # vLLM 0.25 does not have these fields.
        prefill = {"seq_lens_cpu_upper_bound": length, "is_prefilling": torch.tensor([True])}
        known = {field.name for field in fields(CommonAttentionMetadata)}
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for group in self._groups:
            block = _block_size(group)
            blocks = torch.arange(1, 2 + (count - 1) // block, dtype=torch.int32, device=device)
            common = CommonAttentionMetadata(
                **{name: value for name, value in prefill.items() if name in known},
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=length.to(device),
                num_reqs=1,
                num_actual_tokens=count,
                max_query_len=count,
                max_seq_len=count,
                block_table_tensor=blocks[None],
                slot_mapping=positions + block,
                positions=positions,
            )
            built = group.get_metadata_builder().build(0, common)
            metadata.update(dict.fromkeys(group.layer_names, built))
            slots.update(dict.fromkeys(group.layer_names, common.slot_mapping))
        return metadata, slots

    @contextmanager
    def _scratch_cache(self, config: Any) -> Iterator[None]:  # noqa: ANN401 -- vLLM's
        """Bind a scratch KV cache to the layers that `config` names.

        A skeleton keeps its own from one forward to the next, since a layer may read what another
        has written; the live model gets its real one back.
        """
        live: Mapping[str, Any] = self._config.compilation_config.static_forward_context
        bound: Mapping[str, Any] = config.compilation_config.static_forward_context
        # A skeleton has no layers that draft.
        caches = {n: layer.kv_cache for n, layer in live.items() if n in bound and _cached(layer)}
        if any(_cached(bound[name]) for name in caches if bound is not live):
            yield
            return
        shared = {n: getattr(live[n], "kv_sharing_target_layer_name", None) for n in caches}
        try:
            for name in sorted(caches, key=lambda n: shared[n] is not None):
                target = shared[name]
                cache = (
                    bound[target].kv_cache if target else _scratch(caches[name], self._blocks[name])
                )
                bound[name].kv_cache = cache
                # The engine sets attributes on its layers after they were made.
                for key in vars(live[name]).keys() - vars(bound[name]).keys():
                    setattr(bound[name], key, getattr(live[name], key))
            yield
        finally:
            for name, cache in caches.items():
                live[name].kv_cache = cache


def _block_size(group: Any) -> int:  # noqa: ANN401 -- vLLM's
    """Return the number of tokens in one KV block of an attention group."""
    return int(group.get_metadata_builder().kv_cache_spec.block_size)


def _scratch(cache: Any, blocks: int) -> Any:  # noqa: ANN401 -- a tensor, or a layer's states
    """Return zeros laid out like the KV cache `cache`, with `blocks` blocks."""
    import torch

    if not isinstance(cache, torch.Tensor):
        return type(cache)(_scratch(state, blocks) for state in cache)
    # Blocks come first but on vLLM 0.25, where keys and values may.
    axis = 1 if cache.dim() == 5 and cache.shape[0] == 2 else 0
    shape = [blocks if at == axis else size for at, size in enumerate(cache.shape)]
    strides = cache.stride()
    order = sorted(range(cache.dim()), key=lambda at: (at == axis, strides[at]), reverse=True)
    zeros = torch.zeros([shape[axis] for axis in order], dtype=cache.dtype, device=cache.device)
    return zeros.permute([order.index(axis) for axis in range(cache.dim())])


def _cached(layer: Any) -> bool:  # noqa: ANN401 -- vLLM's
    """Return True if a KV cache with elements is bound to `layer`."""
    import torch

    cache = getattr(layer, "kv_cache", ())
    states = [cache] if isinstance(cache, torch.Tensor) else cache
    return any(state.numel() for state in states)


def _media(runner: Any) -> list[Any]:  # noqa: ANN401 -- vLLM's model runner
    """Return a dummy input batch for each kind served: images (or else videos), and sound."""
    budget = getattr(runner, "mm_budget", None)
    served = budget.mm_max_toks_per_item if budget is not None else {}
    seen = next((kind for kind in ("image", "video") if kind in served), None)
    return [runner._get_mm_dummy_batch(k, 1) for k in served if k == seen or k == "audio"]


def _flat(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return all numbers of `parts` in one flat float32 tensor; bfloat16 and float16 stay exact."""
    import torch

    return torch.cat([part.flatten().float() for part in parts])


def _pooled(model: Any, config: Any, hidden: Any, tokens: torch.Tensor) -> list[torch.Tensor]:  # noqa: ANN401 -- vLLM's
    """Return the outputs of each of a model's poolers for the hidden states of one prompt."""
    import torch
    from vllm.pooling_params import PoolingParams
    from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

    count = len(tokens)
    outputs: list[torch.Tensor | None] = []
    for task in sorted(model.pooler.get_supported_tasks()):
        params = PoolingParams(task=task)
        params.verify(config)
        model.pooler.get_pooling_updates(task).apply(params)
        lengths = torch.tensor([count])
        metadata = PoolingMetadata(
            prompt_lens=lengths,
            prompt_token_ids=tokens[None],
            prompt_token_ids_cpu=tokens[None].cpu(),
            pooling_params=[params],
            pooling_states=[PoolingStates()],
        )
        metadata.build_pooling_cursor(lengths.numpy(), seq_lens_cpu=lengths, device=hidden.device)
        outputs += model.pooler(hidden_states=hidden, pooling_metadata=metadata)
    return [part for part in outputs if part is not None]
