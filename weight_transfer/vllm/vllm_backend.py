"""`--weight-transfer-config '{"backend": "rose"}'`: ROSE's weights behind vLLM's own weight calls.

init_weight_transfer_engine {model_dir, verify_key}    as `rose_weights_init`
start_weight_update                                    vLLM's; the engine may still serve
update_weights {manifest, chunks}                      stages; nothing is written
finish_weight_update                                   under a pause: activates and proves

The caller pauses and resumes, as for vLLM's other backends, and names the version when it finishes.
Where `WeightWorker` is mixed into the worker both ways lead to weights of their own: use one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weight_transfer.errors import DigestMismatchError, ProbeError, WeightError
from weight_transfer.format.signing import VerifyKey
from weight_transfer.vllm.update.replica_weights import CommitReport, ReplicaWeights, names_errors
from weight_transfer.vllm.worker import EngineModel


@dataclass
class RoseInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`model_dir`: the checkpoint that the engine serves. `verify_key`: hex, or signatures pass."""

    model_dir: str
    verify_key: str | None = None


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Paths on this machine: manifests of versions that follow each other, folder of chunks."""

    manifests: list[str]
    chunks: str


class RoseWeightEngine(WeightTransferEngine[RoseInitInfo, RoseUpdateInfo]):  # type: ignore[misc]
    """One rank's engine, made by vLLM's factory."""

    init_info_cls = RoseInitInfo
    update_info_cls = RoseUpdateInfo
    supports_draft_weight_update = False
    _weights: ReplicaWeights | None = None
    report: CommitReport | None = None
    """Of the newest activation."""

    @names_errors
    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Take `model_dir` as version 0 and prove that it is what this engine serves."""
        key = None if init_info.verify_key is None else VerifyKey(init_info.verify_key)
        engine = EngineModel.of(self.model, self.vllm_config, self.device)
        self._weights = ReplicaWeights(engine, Path(init_info.model_dir), key)

    def start_weight_update(self) -> None:
        """Nothing: weights are written at the end."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage. No device has anything to finish, so none is waited for."""
        self.receive_weights(self.parse_update_info(update_info))

    @names_errors
    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        """Verify, decode and load an update; nothing is written."""
        manifests = [Path(path) for path in update_info.manifests]
        self._ready().stage(manifests, Path(update_info.chunks))

    @names_errors
    def finish_weight_update(self) -> None:
        """Activate what was staged. Raises a WeightError when it went back to the old version."""
        report = self.report = self._ready().commit()
        if not report.digest_ok:
            raise DigestMismatchError("live weights are not the published ones; they went back")
        if not report.probe_ok:
            raise ProbeError("the engine does not compute with the new weights; they went back")
        self._ready().finish()

    def shutdown(self) -> None:
        """Forget everything; the engine keeps the weights that it has."""
        self._weights = None

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """vLLM 0.25 wants one; here a trainer publishes and an engine is told where."""
        del iterator, trainer_args
        raise WeightError("nothing is sent to engines; publish with weight_transfer.Publisher")

    def _ready(self) -> ReplicaWeights:
        if self._weights is None:
            raise WeightError("weights are not initialised; call init_weight_transfer_engine first")
        return self._weights
