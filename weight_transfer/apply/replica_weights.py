"""Weights of one rank of an engine, and the worker methods by which updates reach each rank.

init    map the base, one copy for all ranks of the node; compile the kernels, trace and prove the
        loader map
decode  while serving, a thread: settle what was committed before, then the update, once a node
load    while serving, between steps: a fresh load of the new version, piece by piece
commit  under the engine's pause: scatter → read back → one probe forward
        all proofs hold: the new version is active; any fails: the old values go back
audit   any time between steps: digests of everything that is live

init → (decode* → load* → commit → settle)*; audit at any time.

Updates are read from files that whoever asks for an update names. A FIFO would hold its reader up
for ever, a device has no end and a link leads elsewhere: only regular files of one folder are read,
no link below it is followed, and the size is known before the first byte.

Engines carry only an exception's text between their processes. So the worker names the error inside
its text and the API process makes the typed error again, and an endpoint can tell a wrong base
(409) from a failed proof (422).
"""

from __future__ import annotations

import functools
import os
import re
import stat
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import torch

from weight_transfer import errors
from weight_transfer.apply.loader_map import DRAFTS, LoaderMap
from weight_transfer.apply.node_copy import NodeCopy
from weight_transfer.apply.probe import (
    Audit,
    ProbeResult,
    compare,
    flipped,
    insist_on_sight,
    kind_of,
)
from weight_transfer.apply.receiver import Receiver, StagedUpdate
from weight_transfer.apply.reference import (
    EngineModel,
    LayerPlan,
    LiveModel,
    Reference,
    finish,
    load_fresh,
    load_in_pieces,
    overlay,
    reference_in_pieces,
)
from weight_transfer.apply.staging import (
    Decoded,
    OpaqueCopy,
    Prepared,
    Staging,
    place,
    warm_kernels,
    write,
    write_back,
)
from weight_transfer.apply.trace_loader import trace_loader
from weight_transfer.errors import (
    AdapterError,
    ChunkMissingError,
    LoaderMapError,
    ProbeError,
    StoreError,
    WeightError,
    WrongBaseError,
)
from weight_transfer.format.checkpoint import Checkpoint
from weight_transfer.format.manifest import MAX_MANIFEST_BYTES, ChunkRef, Manifest, VerifiedManifest
from weight_transfer.format.signing import JobKeys, Keys
from weight_transfer.format.tensors import TensorBits
from weight_transfer.kernels.device import named_shortage, release_unused

if TYPE_CHECKING:
    from weight_transfer.apply.reference import EngineModel

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO opened like this does not wait for its writer; for a regular file it means nothing.
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
POLICY_VERSION = "ROSE_POLICY_VERSION"
_P = ParamSpec("_P")
_R = TypeVar("_R")
_MARK = re.compile(r"\[rose:(\w+)\] (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CommitReport:
    """Result of a commit. `version`: the active version afterwards, the old one if it was undone.

    `tensors`, `changed_elements`: numbers of changed tensors and weights. `apply_s`: seconds to
    write and read back. `probe_s`: seconds of the live model's probe forward and the comparison.
    `loose`: number of parameters that were copied as a whole. `digest_ok`: True if every
    overwritten weight was the parent's and reads as the new version's. `probe_ok`: True if the
    probe's logits are those of a fresh load.
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


class ReplicaWeights:
    """Weights of one rank's live model: the only code by which updates change and prove them."""

    takes_adapters = False
    """True if versions are LoRA adapters beside a base that stays, False if they are weights."""

    def __init__(
        self,
        engine: EngineModel,
        model_dir: Path,
        verify_key: Keys,
        weights_dir: Path | None = None,
        place: Path | None = None,
    ) -> None:
        """Read the checkpoint in `model_dir`, map it to the live model, and prove map and probe.

        `verify_key`: keys of the trainers, None accepts unsigned versions. `weights_dir`: folder
        from which updates may be read, None for anywhere. `place`: path at which this engine's
        ranks on this node elect the leader of a shared copy, None for a private copy. Raise
        LoaderMapError, ProbeError, StoreError or TensorFormatError.
        """
        self._files = Enclosed(weights_dir)
        self.engine = engine
        self._verify_key = verify_key
        self._copy = NodeCopy(Checkpoint.of_model(model_dir), place)
        base = self._copy.tensors
        warm_kernels(base, engine.device)
        self.map, self.load_plan = map_engine(engine, base)
        insist_on_sight(engine, self.map, lambda: self._reference(base, None))
        if self.map.packed:
            self._rehearse(base)
        self._receiver = Receiver.over(self._copy)
        self._shared = place is not None
        self._drafted: tuple[str, ...] = ()
        if engine.drafts is not None:
            self.map, self._drafted = map_drafts(self.map, engine.drafts, base)
        self._staging: Staging | None = None
        self._unsettled: StagedUpdate | None = None
        self._settling = threading.Lock()

    def _rehearse(self, base: Mapping[str, TensorBits]) -> None:
        """Make an update of a tensor of each kind and undo it. Raise ProbeError unless the live
        model then computes what a fresh load computes, and after it what it computed before.

        An engine that keeps what it made of a module's weights elsewhere too is found so.
        """
        engine = self.engine
        before = engine.prober.logits(engine.model)
        kinds = {kind_of(name): tensor for name, tensor in base.items()}
        update = StagedUpdate(0, 0, tuple(flipped(tensor) for tensor in kinds.values()), 0)
        reference = finish(self._reference(base, update))
        placement = place(self.map, update)
        copy = OpaqueCopy(engine.model, self.map, reference)
        try:
            wrong = write(placement) + copy.write()
            after = compare(engine.prober.logits(engine.model), reference.logits)
        finally:
            write_back(placement)
            copy.write_back()
        undone = compare(engine.prober.logits(engine.model), before)
        if wrong or not (after.ok and undone.ok):
            first = (wrong or self.map.packed)[0]
            raise ProbeError(
                f"the engine does not compute with {first} as its own loader makes it anew, so no"
                " update of this model could be proven: serve weights in another format"
            )

    @property
    def version(self) -> int:
        return self._unsettled.version if self._unsettled else self._receiver.version

    @property
    def job(self) -> str:
        """Job of the active version, "" for the model as it was started."""
        return self._unsettled.job if self._unsettled else self._receiver.job

    def settle(self) -> None:
        """Write the committed update into the checkpoint copy too; do nothing if that is done."""
        with self._settling:
            if self._unsettled is not None:
                self._receiver.commit(self._unsettled)
            self._unsettled = None

    def finish(self) -> None:
        """Start a thread that settles the committed update, and free the GPU memory that it took.

        Call it after the engine's pause.
        """
        # If it fails, the next call of settle raises the error.
        threading.Thread(target=self.settle, name="rose-settle").start()
        release_unused(self.engine.device)

    @property
    def tensors(self) -> Mapping[str, TensorBits]:
        """Checkpoint tensors of the settled version, by name."""
        return self._receiver.tensors

    @property
    def digests(self) -> Mapping[str, int]:
        """Digest of each checkpoint tensor in the active version; settles first."""
        self.settle()
        return self._receiver.digests

    @property
    def elements(self) -> Mapping[str, int]:
        """Number of weights of each checkpoint tensor."""
        return {name: tensor.bits.size for name, tensor in self.tensors.items()}

    def decode(self, manifest_paths: Sequence[Path], chunks_dir: Path, attempt: str) -> Staging:
        """Start to decode versions that follow each other, and return the update on its way.

        `attempt`: name of this try, the same on all ranks. With the name of the running attempt the
        same object is returned; with another one a decoded update is dropped, and StoreError is
        raised while one is still being decoded, since this is the engine's own thread.
        """
        if self._staging is not None:
            if self._staging.attempt == attempt:
                return self._staging
            if not self._staging.decoded:
                raise StoreError("an update is still being read and decoded; ask again later")
            self._staging.drop()
        decode = lambda: self._decode(manifest_paths, chunks_dir, attempt)  # noqa: E731
        self._staging = Staging(decode, self._prepare, attempt)
        return self._staging

    @property
    def attempt(self) -> str | None:
        """Name of the attempt whose update is being decoded or loaded, None when there is none."""
        return self._staging.attempt if self._staging else None

    @property
    def staging(self) -> Staging:
        """Update that is being decoded or loaded, or is ready to commit.

        Raises WrongBaseError when there is none.
        """
        if self._staging is None:
            raise WrongBaseError("no update is on its way; decode one first")
        return self._staging

    def commit(self) -> CommitReport:
        """Activate the loaded update; write the old values back if a proof fails.

        Return a report of it. Raises WrongBaseError when no update is loaded to its end.
        """
        prepared = self.staging.prepared
        if prepared is None:
            raise WrongBaseError("the update is not loaded to its end; go on loading it")
        self._staging = None
        return self._activate(prepared)

    def audit(self) -> Audit:
        """Return a new audit of all live weights; step it between the engine's steps."""
        return Audit(self.map)

    def _decode(self, manifest_paths: Sequence[Path], chunks_dir: Path, attempt: str) -> Decoded:
        self.settle()
        update = self._verified(manifest_paths, chunks_dir, attempt)
        return Decoded(update, place(self.map, update))

    def _verified(
        self, manifest_paths: Sequence[Path], chunks_dir: Path, attempt: str
    ) -> StagedUpdate:
        manifests = self._manifests(manifest_paths)
        plan = self._receiver.plan(manifests, time.time())
        if self._shared and self._receiver.job not in ("", plan.job):
            raise WrongBaseError(
                "ranks that share a copy do not change jobs; start the engine anew"
            )
        chunks = self._chunks(chunks_dir, manifests)
        return self._copy.decode(
            plan, lambda name: self._receiver.decode_tensor(plan, name, chunks), attempt
        )

    def _manifests(self, paths: Sequence[Path]) -> list[VerifiedManifest]:
        found = [
            VerifiedManifest.read(self._files.read(path, MAX_MANIFEST_BYTES), self._verify_key)
            for path in paths
        ]
        for manifest in (each.manifest for each in found):
            if (manifest.adapter is not None) != self.takes_adapters:
                raise AdapterError(
                    f"version {manifest.version} is whole weights, and this replica's `lora` keeps"
                    " its base; publish an adapter, or leave `lora` out"
                    if self.takes_adapters
                    else f"version {manifest.version} is a LoRA adapter, and this replica has no"
                    " place for one; give it `lora`, or publish merged weights"
                )
        return found

    def _chunks(self, folder: Path, manifests: Sequence[VerifiedManifest]) -> Mapping[str, bytes]:
        """Return the encoded chunks of manifests by name, each read when it is looked up."""
        return _ChunkFiles(self._files, folder, [each.manifest for each in manifests])

    def _prepare(self, decoded: Decoded) -> Generator[None, None, Prepared]:
        with named_shortage(self.engine.device, "a fresh load of the new version"):
            reference = yield from self._reference(self.tensors, decoded.update)
        return Prepared(decoded.update, decoded.placement, reference)

    def _reference(
        self, tensors: Mapping[str, TensorBits], update: StagedUpdate | None
    ) -> Generator[None, None, Reference]:
        drafted = [name for name in self.map.loose if name.startswith(DRAFTS)]
        loose = tuple(name for name in self.map.loose if name not in drafted)
        reference = yield from reference_in_pieces(
            self.engine, tensors, update, loose, self.load_plan, self.map.packed
        )
        if not drafted:
            return reference
        assert self.engine.drafts is not None
        read = overlay(tensors, update.tensors if update else ())
        drafts = yield from load_in_pieces(self.engine.drafts, self._drafted, read)
        known = dict(drafts.named_parameters()) | dict(drafts.named_buffers())
        fresh = {name: known[name.removeprefix(DRAFTS)].detach() for name in drafted}
        return replace(reference, loose={**reference.loose, **fresh})

    def _activate(self, prepared: Prepared) -> CommitReport:
        started_s = time.perf_counter()
        changes = bool(prepared.update.tensors)
        loose = OpaqueCopy(self.engine.model, self.map, prepared.reference if changes else None)
        try:
            unproven = write(prepared.placement) + loose.write()
            self._unsettled = prepared.update
            applied_s = time.perf_counter()
            logits = self.engine.prober.logits(self.engine.model)
            probe = compare(logits, prepared.reference.logits)
        except BaseException:
            self._revert(prepared, loose)
            raise
        probe_s = time.perf_counter() - applied_s
        if unproven or not probe.ok:
            self._revert(prepared, loose)
        return self._report(prepared, applied_s - started_s, probe_s, not unproven, probe)

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


class _ChunkFiles(Mapping[str, bytes]):
    """Encoded chunks of manifests in a folder, each read when it is looked up, and not verified."""

    def __init__(self, files: Enclosed, folder: Path, manifests: Sequence[Manifest]) -> None:
        self._files, self._folder = files, folder
        self._refs: dict[str, ChunkRef] = {r.id: r for m in manifests for r in m.chunks}

    def __getitem__(self, name: str) -> bytes:
        return self._files.read(self._folder / name, self._refs[name].encoded_bytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)


def map_engine(
    engine: EngineModel, base: Mapping[str, TensorBits]
) -> tuple[LoaderMap, LayerPlan | None]:
    """Trace the engine's own loader, and return its map, proved against the live parameters.

    The second value is the plan to load layer by layer, None where the model cannot be taken apart.
    Raises LoaderMapError.
    """
    layerwise = engine.layerwise
    try:
        traced = engine.skeleton(torch.device("meta"))
    except NotImplementedError:
        # The constructor computes with tensors (slopes of ALiBi), which have no data on meta.
        traced, layerwise = engine.skeleton(engine.device), False
    engine.only_copies(traced)
    trace = trace_loader(traced, base)

    def fresh() -> torch.nn.Module:
        return load_fresh(engine, base, overlay(base))

    proved = LoaderMap.prove(engine.model, trace, base, fresh)
    whole = not layerwise or proved.packed
    return proved, None if whole else LayerPlan.of(trace, traced, engine.model)


def map_drafts(
    loader_map: LoaderMap, drafts: LiveModel, base: Mapping[str, TensorBits]
) -> tuple[LoaderMap, tuple[str, ...]]:
    """Return the map with a drafting model's weights, and the checkpoint tensors that fill them.

    Updates write these weights and audits read them. No probe runs the model: a draft that is
    wrong costs time alone, since each token is sampled from the policy. Raises LoaderMapError.
    """
    traced = drafts.skeleton(torch.device("meta"))
    drafts.only_copies(traced)
    trace = trace_loader(traced, base)
    own = loader_map.lacking(drafts.model, trace)
    fill = (each.source for each in trace.rectangles if each.target in own)
    names = tuple(dict.fromkeys((*fill, *trace.transformed)))

    def fresh() -> torch.nn.Module:
        return load_fresh(drafts, names, overlay(base))

    proved = LoaderMap.prove(drafts.model, trace, base, fresh, own)
    if proved.packed:
        raise LoaderMapError(
            f"drafts keep weights of {proved.packed[0]} elsewhere; leave out --speculative-config"
        )
    return loader_map.with_drafts(proved), names


class Enclosed:
    """Reader of regular files below the folder `root`; with a root of None, of any file."""

    def __init__(self, root: Path | None) -> None:
        self._root = None if root is None else _absolute(root)

    def read(self, path: Path, max_bytes: int) -> bytes:
        """Return the content of a file of at most `max_bytes` bytes.

        Links below the root are not followed. Raises StoreError for a file that is not regular,
        lies elsewhere or is larger, ChunkMissingError when there is none.
        """
        try:
            descriptor = self._open(path)
        except FileNotFoundError as error:
            raise ChunkMissingError(f"{path} is not there; fetch it first") from error
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}; name a file of the store") from error
        try:
            return _content(descriptor, path, max_bytes)
        finally:
            os.close(descriptor)

    def _open(self, path: Path) -> int:
        if self._root is None:
            return os.open(path, _FILE)
        relative = _absolute(path).relative_to(self._root)
        if not relative.parts:
            raise ValueError("it is the folder itself")
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in relative.parts[:-1]:
                inner = os.open(name, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            return os.open(relative.parts[-1], _FILE, dir_fd=folder)
        finally:
            os.close(folder)


def _absolute(path: Path) -> Path:
    """Return the absolute path without `..`; links are not followed."""
    return Path(os.path.normpath(path.absolute()))


def _content(descriptor: int, path: Path, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is no regular file; name a file of the store")
    if status.st_size > max_bytes:
        raise StoreError(f"{path} has {status.st_size} bytes, at most {max_bytes} are expected")
    with os.fdopen(os.dup(descriptor), "rb") as file:
        # Read one byte more than allowed, since the file may have grown.
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise StoreError(f"{path} grows while it is read; fetch it again")
    return content


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the one report that all ranks' commit reports make: proofs hold if they hold
    everywhere.

    Times and differences are the largest. Ranks at different versions prove nothing. Raises
    IndexError without any report, KeyError for one that lacks a field.
    """
    whole = dict(reports[0])
    agree = all(report["version"] == whole["version"] for report in reports)
    for name in ("digest_ok", "probe_ok"):
        whole[name] = agree and all(report[name] is True for report in reports)
    for name in ("apply_s", "probe_s", "probe_max_abs_diff"):
        whole[name] = max(report[name] for report in reports)
    return whole


def names_errors(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a worker method so that an error from it carries its type and reason in its text.

    All errors become WeightErrors. Engines pass on the text alone; an error that is not ROSE's gets
    the line of code that raised it.
    """

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except WeightError as error:
            raise type(error)(f"[rose:{type(error).__name__}] {error}") from error
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
            text = f"{method.__name__}: {type(error).__name__}: {error} ({where})"
            raise WeightError(f"[rose:WeightError] {text}") from error

    return wrapped


def typed(failure: Exception) -> Exception:
    """Return the WeightError that is named in the text of `failure`, or else `failure` itself."""
    marked = _MARK.search(str(failure))
    if marked is None:
        return failure
    kind = getattr(errors, marked.group(1), None)
    if not (isinstance(kind, type) and issubclass(kind, WeightError)):
        return failure
    return kind(marked.group(2))


class WeightMethods(ABC):
    """Methods of one rank's worker by which weights are updated; they take and return plain JSON.

    `rose_weights` is None before `rose_weights_init`. Across processes their errors arrive as text:
    `typed` gives them their type again.
    """

    _rose_weights_class: type[ReplicaWeights] = ReplicaWeights
    rose_weights: ReplicaWeights | None = None
    _rose_audit: Audit | None = None
    _rose_decode_began_s: float = 0.0

    @names_errors
    def rose_weights_init(
        self,
        model_dir: str,
        verify_keys: str | None,
        weights_dir: str | None = None,
        place: str | None = None,
    ) -> dict[str, Any]:
        """Take `model_dir` as version 0 and prove that the engine serves it.

        Return {version, loose, transformed, packed}. Updates are read from below `weights_dir`;
        None lets the caller name any file. Ranks that are given one `place`, a path on each node
        that is new at each init, share a copy of the checkpoint.
        """
        keys = None if verify_keys is None else JobKeys.parse(verify_keys)
        engine = self._engine_model()
        folder, meeting = (None if p is None else Path(p) for p in (weights_dir, place))
        weights = self.rose_weights = self._weights_class(
            engine, Path(model_dir), keys, folder, meeting
        )
        return {
            "version": weights.version,
            "loose": list(weights.map.loose),
            "transformed": dict(weights.map.transformed),
            "packed": list(weights.map.packed),
        }

    @names_errors
    def rose_weights_decode(
        self, manifest_paths: list[str], chunks_dir: str, attempt: str
    ) -> dict[str, Any]:
        """Start to decode versions that follow each other, as one update, beside the engine's
        steps.

        Return {done}: True once decoding has ended. Call it again with the same `attempt` until
        then; `rose_weights_load` raises an error of decoding.
        """
        weights = self._rose()
        if weights.attempt != attempt:
            self._rose_decode_began_s = time.perf_counter()
        paths = [Path(path) for path in manifest_paths]
        return {"done": weights.decode(paths, Path(chunks_dir), attempt).decoded}

    @names_errors
    def rose_weights_load(self, pieces: int | None = None) -> dict[str, Any]:
        """Load `pieces` pieces of a decoded update, or all if None; it waits for the decoding.

        Return {done: False, piece_s}, the seconds that this took, or {done: True} with the update's
        version, job and sizes once it may be committed.
        """
        began_s = time.perf_counter()
        staging = self._rose().staging
        if not staging.step(pieces):
            return {"done": False, "piece_s": time.perf_counter() - began_s}
        assert staging.prepared is not None
        return {"done": True, **_loaded(staging.prepared, self._rose_decode_began_s)}

    @names_errors
    def rose_weights_commit(self) -> dict[str, Any]:
        """Activate the loaded update and return the fields of a CommitReport.

        Call it only under the engine's pause.
        """
        report = asdict(self._rose().commit())
        self._tell_version()
        return report

    @names_errors
    def rose_weights_settle(self) -> None:
        """Start to write the committed update into the checkpoint copy too.

        Call it after the pause.
        """
        self._rose().finish()

    @names_errors
    def rose_weights_audit(self, elements: int, again: bool) -> dict[str, Any]:
        """Sum the digests of about `elements` more live weights; `again` begins a new audit.

        Return {done, version, parts: [[tensor, key, elements, sum], …]}.
        """
        if again or self._rose_audit is None:
            self._rose_audit = self._rose().audit()
        parts = [[p.tensor, p.key, p.elements, p.total] for p in self._rose_audit.step(elements)]
        return {"done": self._rose_audit.done, "version": self._rose().version, "parts": parts}

    @names_errors
    def rose_weights_digests(self) -> dict[str, Any]:
        """Return {version, digests, elements}: by checkpoint tensor, what an audit is compared
        with."""
        weights = self._rose()
        return {
            "version": weights.version,
            "digests": dict(weights.digests),
            "elements": dict(weights.elements),
        }

    @property
    def _weights_class(self) -> type[ReplicaWeights]:
        """Class of this rank's weights."""
        return self._rose_weights_class

    @abstractmethod
    def _engine_model(self) -> EngineModel:
        """Return this rank's live model, whose KV cache exists."""

    def _tell_version(self) -> None:
        """Put the active version into the environment of this process.

        A guest's scheduler, which shares the process, publishes it on the control page.
        """
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
