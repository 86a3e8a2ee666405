"""Workers that claim what they did not do: the controls `stale-guest` and `wrong-chunk`.

An engine gets one by `--worker-extension-cls`. What the demo checks besides their word has to
notice that their weights are not the version that they claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from weight_transfer.apply.probe import ProbeResult
from weight_transfer.apply.receiver import StagedTensor, StagedUpdate
from weight_transfer.apply.replica_weights import CommitReport, ReplicaWeights
from weight_transfer.apply.staging import Prepared, place, write
from weight_transfer.vllm.worker import WeightWorker

_CLAIMED = ProbeResult(ok=True, max_abs_diff=0.0)


class StaleWeights(ReplicaWeights):
    """Weights that stay what they are while the version that they claim moves on."""

    _claimed: int | None = None

    @property
    def version(self) -> int:
        return super().version if self._claimed is None else self._claimed

    def _verified(
        self, manifest_paths: Sequence[Path], chunks_dir: Path, attempt: str
    ) -> StagedUpdate:
        last = self._manifests(manifest_paths)[-1].manifest
        return StagedUpdate(last.version, self._receiver.version, (), last.wire_bytes, last.job)

    def _activate(self, prepared: Prepared) -> CommitReport:
        self._claimed = prepared.update.version
        return self._report(prepared, 0.0, 0.0, digest_ok=True, probe=_CLAIMED)


class PermutedWeights(ReplicaWeights):
    """Weights of which the most changed tensor has its new values in the wrong places."""

    def _activate(self, prepared: Prepared) -> CommitReport:
        write(place(self.map, permuted(prepared.update)))
        self._unsettled = prepared.update
        return self._report(prepared, 0.0, 0.0, digest_ok=True, probe=_CLAIMED)


class StaleWorker(WeightWorker):
    """Worker extension that applies nothing and claims each version as proven."""

    _rose_weights_class = StaleWeights


class WrongChunkWorker(WeightWorker):
    """Worker extension that applies permuted values and claims them as proven."""

    _rose_weights_class = PermutedWeights


def permuted(staged: StagedUpdate) -> StagedUpdate:
    """Return `staged` with the values of its most changed tensor rotated by one half."""
    if not staged.tensors:
        return staged
    largest = max(staged.tensors, key=lambda tensor: tensor.change.indices.size)
    return replace(staged, tensors=tuple(_rotated(t, largest) for t in staged.tensors))


def _rotated(tensor: StagedTensor, chosen: StagedTensor) -> StagedTensor:
    if tensor is not chosen:
        return tensor
    new = tensor.change.new
    return replace(tensor, change=replace(tensor.change, new=np.roll(new, new.size // 2)))
