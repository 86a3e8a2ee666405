"""SGLang's part of a weight update: its models, the probe that runs through them, its worker.

SGLang keeps what one layer hands to the next beside its hidden states in the batch. So a reference
is one whole model, loaded in pieces between steps: one that had a layer at a time would lose that.

The probe's scratch is the beginning of the KV cache, which is saved and put back: its first page of
tokens takes what padding writes, and ROSE never gives the memory of those that follow away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weight_transfer.apply.probe import probe_prompt
from weight_transfer.apply.reference import take_own
from weight_transfer.apply.replica_weights import WeightMethods
from weight_transfer.errors import LoaderMapError, ProbeError

if TYPE_CHECKING:
    import torch

SIDE: Final = 4
"""Height and width of the dummy image, in tokens."""


@dataclass(frozen=True, slots=True)
class SglangLoader:
    """Loader that makes further instances of an engine's model, as SGLang does at its start."""

    model_config: Any
    load_config: Any
    device: torch.device

    def skeleton(self, device: torch.device) -> torch.nn.Module:
        """Return a new instance of the engine's model on `device`, its weights not loaded.

        Tables that SGLang shares between models of one shape, such as rotary positions, are shared
        with the live model.
        """
        from sglang.srt.model_loader import loader
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        config, load_config = self.model_config, self.load_config
        quantized = loader._get_quantization_config(config, load_config)
        with set_default_torch_dtype(config.dtype), device:
            model: torch.nn.Module = loader._initialize_model(config, load_config, quantized)
        take_own(model, head=False)
        return model

    def only_copies(self, skeleton: torch.nn.Module) -> None:
        """Leave SGLang's loaders as they are: they copy, and post-processing quantises."""

    def loading(self) -> AbstractContextManager[Any]:
        """Return an empty context: SGLang's loaders need none around them."""
        return nullcontext()

    def process(self, module: torch.nn.Module) -> None:
        """Run SGLang's post-processing of loaded weights on a module, in place."""
        from sglang.srt.model_loader.loader import DefaultModelLoader

        DefaultModelLoader.postprocess_weights(module, self.device)


@dataclass(frozen=True, slots=True)
class SglangModel(SglangLoader):
    """A live SGLang model with its configuration, and the prober for models like it."""

    model: torch.nn.Module
    prober: SglangProber

    layerwise = False
    drafts = None

    @classmethod
    def of(cls, runner: Any) -> SglangModel:  # noqa: ANN401 -- SGLang's ModelRunner
        """Return the model of SGLang's ModelRunner, whose KV cache exists.

        Raises LoaderMapError where SGLang packed weights away, ProbeError for an unknown kind of KV
        cache.
        """
        import torch

        packed = next((n for n, p in runner.model.named_parameters() if not p.numel()), None)
        if packed is not None:
            raise LoaderMapError(
                f"{packed} is empty: SGLang packed its weights away; leave out --quantization and"
                " serve without the CPU's matrix extension"
            )
        device = torch.device(runner.device)
        prober = SglangProber(runner, device)
        return cls(runner.model_config, runner.load_config, device, runner.model, prober)


class SglangProber:
    """Prober that runs the fixed prompt through models that share the live engine's KV cache.

    Its result holds every token's last hidden state and then the last token's logits, since SGLang
    computes only the logits that it samples from; then what an encoder of images makes of a dummy.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:  # noqa: ANN401 -- SGLang's
        """Find the KV cache. Raise ProbeError if it consists of other tensors than keys and values,
        or latent ones, of each layer.
        """
        self._runner = runner
        self._device = device
        self._caches = _kv_tensors(runner.token_to_kv_pool)
        self._rows = runner.req_to_token_pool.req_to_token
        self._first = int(runner.page_size)
        room = min(self._caches[0].shape[0] - self._first, self._rows.shape[1])
        self._tokens = probe_prompt(int(runner.model_config.vocab_size))[:room]

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """Return hidden states and logits that `model` computes now, one flat float32 tensor.

        Its length is tokens · hidden size + vocabulary size, and the encoder's output.
        """
        import torch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.runtime_context import get_model

        runner = self._runner
        with torch.inference_mode(), self._scratch() as slots:
            batch = self._batch(slots)
            runner.kv_index_translator.bind_runner_slots(batch)
            runner.attn_backend.init_forward_metadata(batch)
            shared: Any = runner.model.shared_experts_config
            with (
                get_model().override(shared_experts=shared),
                forward_context(
                    ForwardContext(attn_backend=runner.attn_backend), forward_batch=batch
                ),
            ):
                forward: Any = model.forward
                output = forward(batch.input_ids, batch.positions, batch)
                seen = self._encoded(model)
            parts = (output.hidden_states, output.next_token_logits, *seen)
            numbers: torch.Tensor = torch.cat([part.flatten().float() for part in parts])
        return numbers

    def _batch(self, slots: torch.Tensor) -> Any:  # noqa: ANN401 -- SGLang's ForwardBatch
        """Return SGLang's batch of the prompt: one new sequence in the first row of requests."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        count, device = len(self._tokens), self._device
        positions = torch.arange(count, dtype=torch.int64, device=device)
        one = torch.ones(1, dtype=torch.int64, device=device)
        small = torch.ones(1, dtype=torch.int32, device=device)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=torch.tensor(self._tokens, dtype=torch.int64, device=device),
            req_pool_indices=one * 0,
            seq_lens=one * count,
            seq_lens_cpu=torch.tensor([count], dtype=torch.int64),
            orig_seq_lens=small * count,
            out_cache_loc=slots,
            seq_lens_sum=count,
            return_logprob=False,
            positions=positions,
            # Models that take images read these instead.
            mrope_positions=positions.expand(3, -1),
            extend_num_tokens=count,
            extend_seq_lens=small * count,
            extend_prefix_lens=small * 0,
            extend_start_loc=small * 0,
            extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[count],
            extend_logprob_start_lens_cpu=[count],
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_algorithm=self._runner.spec_algorithm,
            global_forward_mode=ForwardMode.EXTEND,
        )

    def _encoded(self, model: Any) -> list[torch.Tensor]:  # noqa: ANN401 -- an SGLang model
        """Return the encoder's output for a dummy image of SIDE x SIDE tokens, in the form of
        Qwen's models; nothing for a model without such an encoder.
        """
        import torch

        patches = getattr(getattr(model, "visual", None), "patch_embed", None)
        if patches is None:
            return []
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

        side, width = SIDE * model.visual.spatial_merge_size, patches.proj.weight[0].numel()
        pixels = torch.arange(side * side * width, dtype=torch.float32, device=self._device)
        image = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=pixels.sin().view(side * side, width),
            model_specific_data={"image_grid_thw": torch.tensor([[1, side, side]])},
        )
        return [model.get_image_feature([image])]

    @contextmanager
    def _scratch(self) -> Iterator[torch.Tensor]:
        """Yield KV-cache slots for the prompt; restore the contents of the slots afterwards."""
        import torch

        first, count = self._first, len(self._tokens)
        caches = [cache[: first + count] for cache in self._caches]
        saved = [part.clone() for part in caches]
        row = self._rows[0, :count].clone()
        slots = torch.arange(first, first + count, dtype=torch.int64, device=self._device)
        self._rows[0, :count] = slots.to(self._rows.dtype)
        try:
            yield slots
        finally:
            self._rows[0, :count] = row
            for part, content in zip(caches, saved, strict=True):
                part.copy_(content)


def _kv_tensors(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401 -- SGLang's
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    if isinstance(keys, list) and isinstance(values, list):
        return [*keys, *values]
    latent = getattr(pool, "kv_buffer", None)
    if not isinstance(latent, list):
        raise ProbeError("this model's KV cache has no keys and values that could be saved")
    return latent


class SglangWeightWorker(WeightMethods):
    """Weight methods of one rank, held beside SGLang's scheduler of that rank."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
        self._runner = scheduler.tp_worker.model_runner

    def _engine_model(self) -> SglangModel:
        return SglangModel.of(self._runner)
