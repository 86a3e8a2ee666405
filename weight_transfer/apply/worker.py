"""Worker of weight updates: its methods are called on every rank, by name.

init → (decode* → load* → commit → settle)*; audit at any time. See `replica_weights.py`.

Engines carry only an exception's text between their processes. So the worker names the error inside
its text and the API process makes the typed error again, and an endpoint can tell a wrong base
(409) from a failed proof (422).
"""

from __future__ import annotations

import functools
import os
import re
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from weight_transfer import errors
from weight_transfer.apply.probe import Audit
from weight_transfer.apply.reference import EngineModel
from weight_transfer.apply.replica_weights import ReplicaWeights
from weight_transfer.apply.staging import Prepared
from weight_transfer.errors import WeightError
from weight_transfer.format.signing import VerifyKey

POLICY_VERSION = "ROSE_POLICY_VERSION"


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
    """Wrap a worker method: an error that leaves it carries its type and its reason in its text.

    Engines pass on the text alone, and an assertion of theirs has none: it gets its place.
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
    """Return the WeightError that `failure` carried out of a worker, else `failure` itself."""
    marked = _MARK.search(str(failure))
    if marked is None:
        return failure
    kind = getattr(errors, marked.group(1), None)
    if not (isinstance(kind, type) and issubclass(kind, WeightError)):
        return failure
    return kind(marked.group(2))


class WeightMethods(ABC):
    """One rank's methods, which take and return plain JSON.

    `rose_weights` is None before init. Across processes their errors arrive as text:
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
