"""Weights of one rank of an engine, with the proofs and the report of each activation.

init    read the base, compile the kernels, trace and prove the loader map
stage   while serving: see `staging`
commit  under the engine's pause: scatter → read back → one probe forward
        all proofs hold: the new version is active; any fails: the old values go back
audit   any time between steps: digests of everything that is live

vLLM carries only an exception's text between its processes. So the worker names the error inside
its text and the API process makes the typed error again, and an endpoint can tell a wrong base
(409) from a failed proof (422).
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from weight_transfer import errors
from weight_transfer.errors import StoreError, WeightError, WrongBaseError
from weight_transfer.files.checkpoint import read_model_dir
from weight_transfer.format.chunk import check_id
from weight_transfer.format.manifest import MAX_MANIFEST_BYTES, ChunkRef, Manifest
from weight_transfer.format.tensors import TensorBits
from weight_transfer.kernels.triton.exchange import named_shortage, release_unused
from weight_transfer.receiver import Receiver, StagedUpdate
from weight_transfer.vllm.enclosed_files import Enclosed
from weight_transfer.vllm.mapping.loader_map import LoaderMap
from weight_transfer.vllm.mapping.trace_loader import trace_loader
from weight_transfer.vllm.proof.audit import Audit
from weight_transfer.vllm.proof.layered import LayerPlan
from weight_transfer.vllm.proof.probe import ProbeResult, compare
from weight_transfer.vllm.proof.reference import load_fresh, overlay, reference_in_pieces, skeleton
from weight_transfer.vllm.update.applier import OpaqueCopy, place, write, write_back
from weight_transfer.vllm.update.staging import Decoded, Prepared, Staging, warm_kernels

if TYPE_CHECKING:
    from weight_transfer.format.signing import VerifyKey
    from weight_transfer.vllm.worker import EngineModel


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did; `version` is the version active afterwards.

    `apply_s`: scatter and read-back. `probe_s`: the live model's probe forward and the comparison.
    `loose`: parameters copied as a whole. `digest_ok`: every overwritten weight was the parent's
    and reads as the new version's.
    """

    version: int
    tensors: int
    changed_elements: int
    wire_bytes: int
    apply_s: float
    probe_s: float
    loose: int
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of all ranks: proofs hold when they hold everywhere, times are the slowest's.

    Ranks that are at different versions prove nothing. Raises IndexError without any report,
    KeyError for one that lacks something.
    """
    whole = dict(reports[0])
    agree = all(report["version"] == whole["version"] for report in reports)
    for name in ("digest_ok", "probe_ok"):
        whole[name] = agree and all(report[name] is True for report in reports)
    for name in ("apply_s", "probe_s", "probe_max_abs_diff"):
        whole[name] = max(report[name] for report in reports)
    return whole


_P = ParamSpec("_P")
_R = TypeVar("_R")
_MARK = re.compile(r"\[rose:(\w+)\] (.*)", re.DOTALL)


def names_errors(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a worker method: a WeightError that leaves it carries its own name in its text."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except WeightError as error:
            raise type(error)(f"[rose:{type(error).__name__}] {error}") from error

    return wrapped


def typed(failure: Exception) -> Exception:
    """Return the WeightError that `failure` carried out of a worker, else `failure` itself."""
    marked = _MARK.search(str(failure))
    if marked is None:
        return failure
    kind = getattr(errors, marked.group(1), None)
    if not (isinstance(kind, type) and issubclass(kind, WeightError)):
        return failure
    return kind(marked.group(2))


class ReplicaWeights:
    """Receiver, loader map and proofs; the one path by which an engine's weights change."""

    def __init__(
        self,
        engine: EngineModel,
        model_dir: Path,
        verify_key: VerifyKey | None,
        weights_dir: Path | None = None,
    ) -> None:
        """`weights_dir`: where updates are read from, None for anywhere."""
        self._files = Enclosed(weights_dir)
        self._engine = engine
        self._verify_key = verify_key
        base = read_model_dir(model_dir)
        warm_kernels(base, engine.device)
        self.map, self._plan = map_engine(engine, base)
        self._receiver = Receiver(base)
        self._staging: Staging | None = None
        self._unsettled: StagedUpdate | None = None
        self._settling = threading.Lock()

    @property
    def version(self) -> int:
        return self._unsettled.version if self._unsettled else self._receiver.version

    def settle(self) -> None:
        """Bring the checkpoint copy to the active version: what a pause need not wait for."""
        with self._settling:
            if self._unsettled is not None:
                self._receiver.commit(self._unsettled)
            self._unsettled = None

    def finish(self) -> None:
        """After the pause: settle beside the engine's steps, and free what the update took."""
        # Should it fail, whoever settles next is told.
        threading.Thread(target=self.settle, name="rose-settle").start()
        release_unused(self._engine.device)

    @property
    def digests(self) -> Mapping[str, int]:
        """What each checkpoint tensor's digest has to be."""
        self.settle()
        return self._receiver.digests

    @property
    def elements(self) -> Mapping[str, int]:
        """How many weights each checkpoint tensor has."""
        return {name: tensor.bits.size for name, tensor in self._receiver.tensors.items()}

    def begin_stage(self, manifest_paths: Sequence[Path], chunks_dir: Path) -> Staging:
        """Begin to stage versions that follow each other; what was staged before is forgotten.

        Raises StoreError while an earlier one is still read: this is the engine's own thread.
        """
        if self._staging is not None:
            if not self._staging.decoded:
                raise StoreError("an update is still being read and decoded; ask again later")
            self._staging.drop()
        self.settle()
        self._staging = Staging(lambda: self._decode(manifest_paths, chunks_dir), self._prepare)
        return self._staging

    @property
    def staging(self) -> Staging:
        """The update on its way. Raises WrongBaseError when there is none."""
        if self._staging is None:
            raise WrongBaseError("nothing is staged; stage an update before committing it")
        return self._staging

    def stage(self, manifest_paths: Sequence[Path], chunks_dir: Path) -> Prepared:
        """Stage them at once."""
        staging = self.begin_stage(manifest_paths, chunks_dir)
        staging.step()
        assert staging.prepared is not None
        return staging.prepared

    def commit(self) -> CommitReport:
        """Activate what is staged, or take it back when a proof fails."""
        prepared = self.staging.prepared
        if prepared is None:
            raise WrongBaseError("the update is not staged to its end; step it on")
        self._staging = None
        return self._activate(prepared)

    def audit(self) -> Audit:
        """A new pass over everything that is live; step it between the engine's steps."""
        return Audit(self.map)

    def _decode(self, manifest_paths: Sequence[Path], chunks_dir: Path) -> Decoded:
        update = self._verified(manifest_paths, chunks_dir)
        return Decoded(update, place(self.map, update))

    def _verified(self, manifest_paths: Sequence[Path], chunks_dir: Path) -> StagedUpdate:
        manifests = self._manifests(manifest_paths)
        refs = {ref.id: ref for manifest in manifests for ref in manifest.chunks}
        chunks = {ref.id: self._chunk(chunks_dir, ref) for ref in refs.values()}
        return self._receiver.stage_chain(manifests, chunks, self._verify_key, time.time())

    def _manifests(self, paths: Sequence[Path]) -> list[Manifest]:
        return [
            Manifest.from_bytes(self._files.read(path, MAX_MANIFEST_BYTES), self._verify_key)
            for path in paths
        ]

    def _chunk(self, folder: Path, ref: ChunkRef) -> bytes:
        encoded = self._files.read(folder / ref.id, ref.encoded_bytes)
        check_id(ref.id, encoded)
        return encoded

    def _prepare(self, decoded: Decoded) -> Generator[None, None, Prepared]:
        tensors, loose = self._receiver.tensors, self.map.loose
        with named_shortage(self._engine.device, "a fresh load of the new version"):
            reference = yield from reference_in_pieces(
                self._engine, tensors, decoded.update, loose, self._plan
            )
        return Prepared(decoded.update, decoded.placement, reference)

    def _activate(self, prepared: Prepared) -> CommitReport:
        started_s = time.perf_counter()
        loose = OpaqueCopy(self.map, prepared.reference.loose if prepared.update.tensors else {})
        try:
            unproven = write(prepared.placement) + loose.write()
            self._unsettled = prepared.update
            applied_s = time.perf_counter()
            probe = compare(self._logits(), prepared.reference.logits)
        except BaseException:
            self._revert(prepared, loose)
            raise
        probe_s = time.perf_counter() - applied_s
        if unproven or not probe.ok:
            self._revert(prepared, loose)
        return self._report(prepared, applied_s - started_s, probe_s, not unproven, probe)

    def _logits(self) -> torch.Tensor:
        return self._engine.prober.logits(self._engine.model)

    def _revert(self, prepared: Prepared, loose: OpaqueCopy) -> None:
        write_back(prepared.placement)
        loose.write_back()
        self._unsettled = None

    def _report(
        self,
        prepared: Prepared,
        apply_s: float,
        probe_s: float,
        digest_ok: bool,
        probe: ProbeResult,
    ) -> CommitReport:
        update = prepared.update
        return CommitReport(
            version=self.version,
            tensors=len(update.tensors),
            changed_elements=update.changed,
            wire_bytes=update.wire_bytes,
            apply_s=apply_s,
            probe_s=probe_s,
            loose=len(self.map.loose),
            digest_ok=digest_ok,
            probe_ok=probe.ok,
            probe_max_abs_diff=probe.max_abs_diff,
        )


def map_engine(
    engine: EngineModel, base: Mapping[str, TensorBits]
) -> tuple[LoaderMap, LayerPlan | None]:
    """Trace the engine's own loader and prove the map against its live parameters."""
    config, device = engine.vllm_config, engine.device
    traced = skeleton(config, torch.device("meta"))
    trace = trace_loader(traced, base)

    def fresh() -> torch.nn.Module:
        return load_fresh(config, device, base, overlay(base, {}))

    plan = LayerPlan.of(trace, traced, engine.model)
    return LoaderMap.prove(engine.model, trace, base, fresh), plan
