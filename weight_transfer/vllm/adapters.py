"""LoRA adapters of one rank of vLLM: each version in a slot of its own, beside a base that stays.

decode  a thread: the version's tensors by its signed digests, checked against base and slots
load    between steps: vLLM loads the adapter from files, as it would without ROSE, into a spare
        slot, and the probe runs with it: the reference. Then the tensors go into the version's slot
commit  the probe runs with that slot; both slots are compared, bit for bit; no pause is needed,
        since no request uses the slot yet
drop    once no request uses an old version's slot

The base is mapped, proved and audited as that of any replica, and no update writes to it.
"""

import copy
import json
import tempfile
import time
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from safetensors.torch import save_file

from weight_transfer.apply.probe import compare, kind_of, noticed
from weight_transfer.apply.receiver import Receiver
from weight_transfer.apply.reference import Reference, overlay
from weight_transfer.apply.replica_weights import CommitReport, ReplicaWeights
from weight_transfer.apply.staging import Decoded, Prepared, Staging, UpdatePlacement
from weight_transfer.errors import AdapterError, ManifestError, ProbeError, WrongBaseError
from weight_transfer.format.adapter import base_digest, check_adapter
from weight_transfer.format.manifest import Adapter, Manifest
from weight_transfer.format.signing import Keys
from weight_transfer.format.tensors import WIDTHS, TensorBits, unsigned
from weight_transfer.kernels.device import named_shortage
from weight_transfer.vllm.live_model import VllmModel, VllmProber

SURFACES: Final = (
    "lora.lora_model:LoRAModel.from_lora_tensors(lora_model_id, tensors, peft_helper, device,"
    " dtype, weights_mapper)",
    "lora.peft_helper:PEFTHelper.from_dict",
    "lora.request:LoRARequest",
    "lora.layers.base:BaseLayerWithLoRA",
    "lora.layers.utils:LoRAMapping",
    "lora.worker_manager:LRUCacheWorkerLoRAManager[_adapter_manager]",
    "lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter",
    "lora.worker_manager:LRUCacheWorkerLoRAManager.add_dummy_lora",
    "lora.worker_manager:LRUCacheWorkerLoRAManager.set_active_adapters",
    "lora.model_manager:LRUCacheLoRAModelManager.pin_adapter",
    "lora.model_manager:LRUCacheLoRAModelManager.remove_adapter",
    "lora.model_manager:LRUCacheLoRAModelManager[lora_index_to_id, modules, packed_modules]",
)
"""Names of vLLM that adapters use, as `module:name(parameters)[attributes]`."""
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 -- files that are deleted once they are read
REFERENCE: Final = 1 << 30
# Longest time that the engine's own thread waits for an adapter's decoding.
DECODE_S: Final = 0.05
_BASE: Final = 0


def adapter_number(name: str) -> int:
    """Return vLLM's id of the adapter that an attempt of this name has brought."""
    return 1 + zlib.crc32(name.encode()) % (REFERENCE - 1)


class AdapterSlots:
    """vLLM's LoRA slots: stacked tensors of each module, of which a batch uses several at once."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 -- vLLM's model runner
        self._worker = runner.lora_manager
        self._manager = self._worker._adapter_manager
        self._config = runner.vllm_config.lora_config
        # Others (embeddings, experts) are stacked in ways of their own.
        self._modules: dict[str, Any] = {
            name: module
            for name, module in self._manager.modules.items()
            if isinstance(getattr(module, "lora_a_stacked", None), tuple)
        }

    def select(self, number: int, tokens: int) -> None:
        """Make the next forward of `tokens` tokens compute with this adapter, 0 for the base."""
        from vllm.lora.layers import LoRAMapping

        mapping = LoRAMapping((number,) * tokens, (number,) * tokens, is_prefill=True)
        self._worker.set_active_adapters(set(), mapping)

    def built(self, number: int, adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 -- vLLM's
        """Return vLLM's object of an adapter, in host memory. Raises AdapterError for modules
        without slots.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        if adapter.r > self._config.max_lora_rank:
            raise AdapterError(
                f"r is {adapter.r}, and this replica's lora.max_rank {self._config.max_lora_rank}"
            )
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        made = LoRAModel.from_lora_tensors(
            number,
            dict(tensors),
            PEFTHelper.from_dict(_settings(adapter, tensors)),
            device="cpu",
            dtype=self._config.lora_dtype,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )
        parts = self._manager.packed_modules
        known = {part for name in self._modules for part in parts.get(name, [name])}
        if strange := sorted(made.loras.keys() - known):
            raise AdapterError(f"target_modules: this replica has no slots for {strange[0]}")
        return made

    def take(self, made: Any) -> None:  # noqa: ANN401 -- vLLM's
        """Copy an adapter into a free slot, where it stays until `drop`."""
        self._manager.add_adapter(made)
        self._manager.pin_adapter(made.id)

    def take_files(self, folder: Path, adapter: Adapter, tensors: Mapping[str, Any]) -> None:
        """Let vLLM load an adapter from PEFT's files, as REFERENCE."""
        from vllm.lora.request import LoRARequest

        self.drop(REFERENCE)
        save_file(dict(tensors), folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", **_settings(adapter, tensors)}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        self._worker.add_adapter(LoRARequest("rose-reference", REFERENCE, str(folder)))
        self._manager.pin_adapter(REFERENCE)

    def drop(self, number: int) -> None:
        """Give the slot of an adapter back; do nothing without one."""
        self._manager.remove_adapter(number)

    def parts(self, number: int) -> dict[str, torch.Tensor]:
        """Return the memory of an adapter's slot by module, letter and slice, on this rank."""
        at = self._manager.lora_index_to_id.index(number)
        return {
            f"{name}.lora_{letter}.{place}": stacked[at]
            for name, module in self._modules.items()
            for letter, stacks in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked))
            for place, stacked in enumerate(stacks)
        }

    def take_noise(self) -> None:
        """Fill a slot with noise that is the same on all ranks, as REFERENCE."""
        from vllm.lora.request import LoRARequest

        rank = self._config.max_lora_rank
        self._worker.add_dummy_lora(LoRARequest("rose-noise", REFERENCE, "none"), rank)
        self._manager.pin_adapter(REFERENCE)
        chance = torch.Generator().manual_seed(0)
        for part in self.parts(REFERENCE).values():
            noise = 0.05 * torch.randn(part.shape, generator=chance)
            part.copy_(noise.to(part.dtype))


class AdapterProber(VllmProber):
    """Prober of a model with LoRA slots, which can compute with any of its adapters."""

    def __init__(self, runner: Any, base: torch.nn.Module) -> None:  # noqa: ANN401 -- vLLM's model runner
        super().__init__(runner)
        self._live, self._base_view = runner.get_model(), base
        self.slots = AdapterSlots(runner)

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the probe's logits as `model` computes them; the base's view stands for the live
        model without an adapter.
        """
        return self.adapted(_BASE) if model is self._base_view else super().logits(model)

    def adapted(self, number: int) -> torch.Tensor:
        """Return the probe's logits as the live model computes them with an adapter."""
        self.slots.select(number, len(self._tokens))
        return super().logits(self._live)


@dataclass(frozen=True, slots=True)
class AdaptedModel(VllmModel):
    """A live vLLM model with LoRA slots; `model` is a view of it without them."""

    prober: AdapterProber

    @classmethod
    def of(cls, runner: Any) -> Self:  # noqa: ANN401 -- vLLM's model runner
        """Return the model of vLLM's model runner. Raises ProbeError while it has no KV cache."""
        base = unwrapped(runner.get_model())
        return cls(runner.vllm_config, runner.device, base, AdapterProber(runner, base))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return a view of a model in which LoRA wrappers are the layers that they wrap.

    Its parameters are those of the model, by the names that a model without LoRA has.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    views: dict[int, torch.nn.Module] = {}

    def view(module: torch.nn.Module) -> torch.nn.Module:
        if isinstance(module, BaseLayerWithLoRA):
            wrapped: Any = module
            return view(wrapped.base_layer)
        if id(module) not in views:
            views[id(module)] = seen = copy.copy(module)
            inner = {name: part and view(part) for name, part in module._modules.items()}
            seen.__dict__["_modules"] = inner
        return views[id(module)]

    return view(model)


@dataclass(frozen=True, slots=True)
class _Coming:
    """Decoded adapter on its way into a slot."""

    number: int
    adapter: Adapter
    receiver: Receiver
    tensors: Mapping[str, torch.Tensor]
    made: Any


class AdapterWeights(ReplicaWeights):
    """Adapters of one rank's live model: the only code by which they come, are proven and go."""

    takes_adapters = True

    def __init__(
        self,
        engine: AdaptedModel,
        model_dir: Path,
        verify_key: Keys,
        weights_dir: Path | None = None,
        place: Path | None = None,
    ) -> None:
        """Prove the base as ReplicaWeights does, and that the engine computes with its slots."""
        super().__init__(engine, model_dir, verify_key, weights_dir, place)
        self._prober, self._slots = engine.prober, engine.prober.slots
        self._base = base_digest(self._receiver.digests)
        # By job: the tensors of its active adapter and their settings.
        self._held: dict[str, tuple[Receiver, Adapter]] = {}
        self._coming: _Coming | None = None
        self._active = "", 0
        self._insist_on_slots()

    @property
    def version(self) -> int:
        """Version of the adapter that was activated last, 0 without one."""
        return self._active[1]

    @property
    def job(self) -> str:
        """Job of the adapter that was activated last, "" without one."""
        return self._active[0]

    def adapter_tensors(self, job: str) -> Mapping[str, TensorBits]:
        """Return the tensors of a job's active adapter by PEFT's names."""
        return self._held[job][0].tensors

    def drop(self, names: Iterable[str]) -> None:
        """Give the slots of the adapters that these attempts brought back."""
        for name in names:
            self._slots.drop(adapter_number(name))

    def decode(self, manifest_paths: Sequence[Path], chunks_dir: Path, attempt: str) -> Staging:
        """Start to decode as ReplicaWeights does; most adapters are decoded when it returns."""
        begun = self.attempt != attempt
        staging = super().decode(manifest_paths, chunks_dir, attempt)
        if begun:
            # Beside the engine's steps the thread would take longer, and a step more to be seen.
            staging.wait(DECODE_S)
        return staging

    def _decode(self, manifest_paths: Sequence[Path], chunks_dir: Path, attempt: str) -> Decoded:
        verified = self._manifests(manifest_paths)
        if not verified:
            raise ManifestError("no version to decode; give at least one manifest")
        receiver, adapter = self._begun([each.manifest for each in verified])
        plan = receiver.plan(verified, time.time())
        chunks = self._chunks(chunks_dir, verified)
        update = plan.update(receiver.decode_tensor(plan, name, chunks) for name in plan.tensors)
        read = overlay(receiver.tensors, update.tensors)
        tensors = {name: read(name) for name in receiver.tensors}
        number = adapter_number(attempt)
        made = self._slots.built(number, adapter, tensors)
        self._coming = _Coming(number, adapter, receiver, tensors, made)
        return Decoded(update, UpdatePlacement(()))

    def _begun(self, manifests: Sequence[Manifest]) -> tuple[Receiver, Adapter]:
        """Return what the first version builds on, zeros for a base, and the last one's settings.

        Raises AdapterError for an adapter of another base or shape.
        """
        first, last = manifests[0], manifests[-1]
        adapter, held = last.adapter, self._held.get(last.job)
        assert adapter is not None
        if adapter.base != self._base:
            raise AdapterError(
                f"adapter.base is {adapter.base[:12]}…, and this replica's base {self._base[:12]}…;"
                " train on the checkpoint that it serves"
            )
        if any(each.adapter != adapter for each in manifests):
            raise AdapterError("the adapter's settings change within a chain; publish it anew")
        if held is not None and last.version < held[0].version:
            raise WrongBaseError(f"version {held[0].version} is active; {last.version} is older")
        if not first.is_base:
            if held is None or held[1] != adapter:
                raise WrongBaseError(f"no adapter of {last.job} is here to build on; rebase")
            return held[0], adapter
        check_adapter(adapter, {t.name: t for t in first.tensors}, self.tensors)
        zeros = {
            t.name: TensorBits(
                t.name, t.dtype, t.shape, np.zeros(prod(t.shape), unsigned(WIDTHS[t.dtype]))
            )
            for t in first.tensors
        }
        return Receiver(zeros), adapter

    def _prepare(self, decoded: Decoded) -> Generator[None, None, Prepared]:
        coming = self._coming
        assert coming is not None
        try:
            with named_shortage(self.engine.device, "an adapter"):
                with tempfile.TemporaryDirectory(prefix="rose-adapter-", dir=SHARED_MEMORY) as at:
                    self._slots.take_files(Path(at), coming.adapter, coming.tensors)
                # One piece: another would wait for a step, which takes longer than the files.
                yield from ()
                reference = Reference(self._prober.adapted(REFERENCE), {})
                self._slots.take(coming.made)
        except BaseException:
            # Another attempt may have begun.
            self._forget(coming)
            raise
        return Prepared(decoded.update, decoded.placement, reference)

    def _activate(self, prepared: Prepared) -> CommitReport:
        coming, update = self._coming, prepared.update
        assert coming is not None
        started_s = time.perf_counter()
        try:
            parts, wanted = self._slots.parts(coming.number), self._slots.parts(REFERENCE)
            alike = all(torch.equal(part, wanted[name]) for name, part in parts.items())
            compared_s = time.perf_counter()
            probe = compare(self._prober.adapted(coming.number), prepared.reference.logits)
        except BaseException:
            self._forget(coming)
            raise
        probe_s = time.perf_counter() - compared_s
        if alike and probe.ok:
            self._slots.drop(REFERENCE)
            coming.receiver.commit(update)
            self._held[update.job] = coming.receiver, coming.adapter
            self._active, self._coming = (update.job, update.version), None
        else:
            self._forget(coming)
        return self._report(prepared, compared_s - started_s, probe_s, alike, probe)

    def _forget(self, coming: _Coming) -> None:
        self._slots.drop(REFERENCE)
        self._slots.drop(coming.number)

    def _insist_on_slots(self) -> None:
        """Raise ProbeError that names the first kind of slot that the engine does not compute with
        where it lies.
        """
        try:
            self._slots.take_noise()
            live = self._prober.adapted(REFERENCE)
            kinds = {kind_of(name): part for name, part in self._slots.parts(REFERENCE).items()}
            for kind, part in kinds.items():
                if noticed(lambda: self._prober.adapted(REFERENCE), part, live) is None:
                    raise ProbeError(f"the engine does not compute with its LoRA slots of {kind}")
        finally:
            self._slots.drop(REFERENCE)


def _settings(adapter: Adapter, tensors: Iterable[str]) -> dict[str, Any]:
    """Return an adapter's settings as PEFT's `adapter_config.json` has them."""
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    return {
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "use_rslora": adapter.use_rslora,
        "target_modules": sorted(modules),
    }
