"""Worker extension: weight updates inside a vLLM worker, by `collective_rpc`.

init    read the base, prove the loader map
stage   while serving: verify and decode, nothing written
commit  under the engine's pause: scatter → digests of the live weights → probe
        all proofs hold: the new version is active; any fails: the old values go back
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_transfer.checkpoint import read_model_dir
from weight_transfer.errors import WeightError, WrongBaseError
from weight_transfer.manifest import Manifest
from weight_transfer.receiver import Receiver, StagedUpdate
from weight_transfer.signing import VerifyKey
from weight_transfer.store import read_chunk
from weight_transfer.vllm import faults
from weight_transfer.vllm.applier import apply_update, live_digests, revert_update
from weight_transfer.vllm.fresh import load_fresh
from weight_transfer.vllm.loader_map import LoaderMap
from weight_transfer.vllm.probe import Prober, ProbeResult, compare
from weight_transfer.vllm.rpc_errors import names_errors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did; `version` is the version active afterwards."""

    version: int
    tensors: int
    changed_elements: int
    wire_bytes: int
    apply_s: float
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float


class ReplicaWeights:
    """Weights of one engine: its receiver, its loader map and the proofs of activation."""

    def __init__(
        self,
        runner: Any,  # noqa: ANN401 -- an engine type that is not ours to check
        model_dir: Path,
        verify_key: VerifyKey | None,
    ) -> None:
        self._runner = runner
        self._verify_key = verify_key
        base = read_model_dir(model_dir)
        self._map = LoaderMap.prove(self._model, base)
        self._receiver = Receiver(base)
        self._prober = Prober(runner)
        self._staged: StagedUpdate | None = None
        self._claimed: int | None = None

    @property
    def version(self) -> int:
        """The active version (with the fault `stale_weights`: the claimed one)."""
        return self._receiver.version if self._claimed is None else self._claimed

    def stage(self, manifest_paths: Sequence[Path], chunks_dir: Path) -> StagedUpdate:
        """Verify, decode and fold versions that follow each other; the engine may serve."""
        self._staged = None
        manifests = [Manifest.from_json(path.read_bytes()) for path in manifest_paths]
        if faults.injected() is faults.Fault.STALE_WEIGHTS:
            last = manifests[-1]
            self._staged = StagedUpdate(last.version, self._receiver.version, (), last.wire_bytes)
            return self._staged
        refs = [ref for manifest in manifests for ref in manifest.chunks]
        chunks = {ref.id: read_chunk(chunks_dir, ref.id) for ref in refs}
        now_s = time.time()
        self._staged = self._receiver.stage_chain(manifests, chunks, self._verify_key, now_s)
        return self._staged

    def commit(self) -> CommitReport:
        """Activate what is staged, or take it back when a proof fails."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise WrongBaseError("nothing is staged; stage an update before committing it")
        started_s = time.perf_counter()
        fault = faults.injected()
        if fault is faults.Fault.STALE_WEIGHTS:
            self._claimed = staged.version
            return self._claim(staged, started_s)
        if fault is faults.Fault.WRONG_CHUNK:
            apply_update(self._map, faults.permuted(staged))
            self._receiver.commit(staged)
            return self._claim(staged, started_s)
        try:
            apply_update(self._map, staged)
            self._receiver.commit(staged)
            applied_s = time.perf_counter() - started_s
            digest_ok, probe = self.prove()
        except BaseException:
            self._revert(staged)
            raise
        if not (digest_ok and probe.ok):
            self._revert(staged)
        return self._report(staged, applied_s, digest_ok, probe)

    def prove(self) -> tuple[bool, ProbeResult]:
        """Return (live digests are right, probe) for the version the receiver holds."""
        digests = live_digests(self._map, self._receiver.tensors)
        fresh = load_fresh(self._runner.vllm_config, self._runner.device, self._receiver.tensors)
        live_logits = self._prober.logits(self._model)
        probe = compare(live_logits, self._prober.logits(fresh))
        return digests == self._receiver.digests, probe

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.get_model()
        return model

    def _revert(self, staged: StagedUpdate) -> None:
        revert_update(self._map, staged)
        self._receiver.rollback(staged)

    def _claim(self, staged: StagedUpdate, started_s: float) -> CommitReport:
        """Report proofs that nobody made: what the faults exist for."""
        elapsed_s = time.perf_counter() - started_s
        return self._report(staged, elapsed_s, True, ProbeResult(ok=True, max_abs_diff=0.0))

    def _report(
        self, staged: StagedUpdate, apply_s: float, digest_ok: bool, probe: ProbeResult
    ) -> CommitReport:
        return CommitReport(
            version=self.version,
            tensors=len(staged.tensors),
            changed_elements=staged.changed,
            wire_bytes=staged.wire_bytes,
            apply_s=apply_s,
            digest_ok=digest_ok,
            probe_ok=probe.ok,
            probe_max_abs_diff=probe.max_abs_diff,
        )


class WeightWorker:
    """Mixed into vLLM's worker by `--worker-extension-cls`; methods take and return plain JSON.

    Across processes their errors arrive as text: `rpc_errors.typed` gives them their type again.
    """

    model_runner: Any
    _rose_weights: ReplicaWeights | None = None

    @names_errors
    def rose_weights_init(self, model_dir: str, verify_key_hex: str | None) -> dict[str, Any]:
        """Take `model_dir` as version 0 and prove that it is what this engine serves."""
        key = None if verify_key_hex is None else VerifyKey(verify_key_hex)
        self._rose_weights = ReplicaWeights(self.model_runner, Path(model_dir), key)
        return {"version": self._rose_weights.version}

    @names_errors
    def rose_weights_stage(self, manifest_paths: list[str], chunks_dir: str) -> dict[str, Any]:
        """Verify and decode versions that follow each other while serving."""
        started_s = time.perf_counter()
        staged = self._rose().stage([Path(path) for path in manifest_paths], Path(chunks_dir))
        return {
            "version": staged.version,
            "tensors": len(staged.tensors),
            "changed_elements": staged.changed,
            "wire_bytes": staged.wire_bytes,
            "stage_s": time.perf_counter() - started_s,
        }

    @names_errors
    def rose_weights_commit(self) -> dict[str, Any]:
        """Activate the staged update; only under the engine's pause. See `CommitReport`."""
        return asdict(self._rose().commit())

    @names_errors
    def rose_weights_version(self) -> int:
        """Return the active version, 0 before any update."""
        return self._rose().version

    def _rose(self) -> ReplicaWeights:
        if self._rose_weights is None:
            raise WeightError("weights are not initialised; call rose_weights_init first")
        return self._rose_weights
