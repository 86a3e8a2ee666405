"""Worker of weight updates: its methods are called on every rank, by name.

init → (decode* → load* → commit → settle)*; audit at any time. See `replica_weights.py`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weight_transfer.engine.model import EngineModel
from weight_transfer.engine.proof.probe import Audit
from weight_transfer.engine.replica_weights import ReplicaWeights, names_errors
from weight_transfer.engine.staging import Prepared
from weight_transfer.errors import WeightError
from weight_transfer.format.signing import VerifyKey

POLICY_VERSION = "ROSE_POLICY_VERSION"


class WeightMethods(ABC):
    """One rank's methods, which take and return plain JSON.

    `rose_weights` is None before init. Across processes their errors arrive as text:
    `replica_weights.typed` gives them their type again.
    """

    _rose_weights_class: type[ReplicaWeights] = ReplicaWeights
    rose_weights: ReplicaWeights | None = None
    _rose_audit: Audit | None = None
    _rose_decode_began_s: float = 0.0

    @names_errors
    def rose_weights_init(
        self,
        model_dir: str,
        verify_key_hex: str | None,
        weights_dir: str | None = None,
        place: str | None = None,
    ) -> dict[str, Any]:
        """Take `model_dir` as version 0 and prove that it is what this engine serves.

        Updates are read from below `weights_dir`; None lets the caller name any file. Ranks that
        are told one `place`, a path on each node that is new at each init, share a copy of it.
        """
        key = None if verify_key_hex is None else VerifyKey(verify_key_hex)
        engine = self._engine_model()
        folder, meeting = (None if p is None else Path(p) for p in (weights_dir, place))
        weights = self.rose_weights = self._rose_weights_class(
            engine, Path(model_dir), key, folder, meeting
        )
        return {
            "version": weights.version,
            "loose": list(weights.map.loose),
            "transformed": dict(weights.map.transformed),
        }

    @names_errors
    def rose_weights_decode(
        self, manifest_paths: list[str], chunks_dir: str, attempt: str
    ) -> dict[str, Any]:
        """Decode versions that follow each other, as one update, beside the engine's steps.

        The first call with a name of an attempt begins; it and every later one say in `done`
        whether decoding has come to an end. `load` then tells how it went.
        """
        weights = self._rose()
        if weights.attempt != attempt:
            self._rose_decode_began_s = time.perf_counter()
        paths = [Path(path) for path in manifest_paths]
        return {"done": weights.decode(paths, Path(chunks_dir), attempt).decoded}

    @names_errors
    def rose_weights_load(self, pieces: int | None = None) -> dict[str, Any]:
        """Load so many pieces of a decoded update, or all; `done`: it may be committed."""
        staging = self._rose().staging
        if not staging.step(pieces):
            return {"done": False}
        assert staging.prepared is not None
        return {"done": True, **_loaded(staging.prepared, self._rose_decode_began_s)}

    @names_errors
    def rose_weights_commit(self) -> dict[str, Any]:
        """Activate the loaded update; only under the engine's pause. See `CommitReport`."""
        report = asdict(self._rose().commit())
        self._tell_version()
        return report

    @names_errors
    def rose_weights_settle(self) -> None:
        """After the pause: bring the checkpoint copy to the version that was activated."""
        self._rose().finish()

    @names_errors
    def rose_weights_audit(self, elements: int, again: bool) -> dict[str, Any]:
        """Sum over the next `elements` live weights; `again` begins anew. See `audit`."""
        if again or self._rose_audit is None:
            self._rose_audit = self._rose().audit()
        parts = [[p.tensor, p.key, p.elements, p.total] for p in self._rose_audit.step(elements)]
        return {"done": self._rose_audit.done, "version": self._rose().version, "parts": parts}

    @names_errors
    def rose_weights_digests(self) -> dict[str, Any]:
        """Return the digest and the size of each checkpoint tensor, for the caller of an audit."""
        weights = self._rose()
        return {
            "version": weights.version,
            "digests": dict(weights.digests),
            "elements": dict(weights.elements),
        }

    @abstractmethod
    def _engine_model(self) -> EngineModel:
        """This rank's live model, whose KV cache exists."""

    def _tell_version(self) -> None:
        """A guest's scheduler, which shares this process, publishes it on the control page."""
        os.environ[POLICY_VERSION] = str(self._rose().version)

    def _rose(self) -> ReplicaWeights:
        if self.rose_weights is None:
            raise WeightError("weights are not initialised; call rose_weights_init first")
        return self.rose_weights


def _loaded(prepared: Prepared, began_s: float) -> dict[str, Any]:
    update = prepared.update
    return {
        "version": update.version,
        "job": update.job,
        "tensors": len(update.tensors),
        "changed_elements": update.changed,
        "wire_bytes": update.wire_bytes,
        "stage_s": time.perf_counter() - began_s,
    }
