"""Weights that an engine pulls before it loads them: `/pull_weights` of slime's and Miles' SGLang.

    weight_v000001/ ── whole, or changes of the one before ──► the front's copy
    update_weights_from_disk ── the copy's folder ──► a version of the copy

A trainer in delta mode saves no checkpoints, only the changes of each tensor, compressed, with the
checksum of the result. The first builds on the checkpoint that replicas start with, so a front that
restarts builds its copy from there.
"""

import importlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import numpy as np
import zstandard
from numpy.typing import NDArray

from rose.errors import RefusedError
from rose.integrations.front.checkpoint_folder import (
    NotWholeError,
    WeightRoots,
    look,
    named_tensors,
)
from weight_transfer import TensorBits, WeightError, read_model_dir, tensor_bits, tensor_of
from weight_transfer.format.checkpoint import INDEX, CheckpointEntry, Shard

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]
MOST_VERSIONS = 4_096
_COUNT_BYTES = 4
_UNREADABLE = (
    AttributeError,
    KeyError,
    OSError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    zstandard.ZstdError,
)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Index of a folder of changes: the version, the version that it builds on, and how to apply
    and check the changes.
    """

    version: int
    builds_on: int
    apply: Callable[[Bytes, bytes], None]
    checksum: Callable[[Bytes], str]


class PulledWeights:
    """The front's copy of the weights of one stream of versions; only one thread may use it."""

    def __init__(self, roots: WeightRoots, base: Path) -> None:
        self._roots = roots
        self._base = base
        self._tensors: dict[str, TensorBits] = {}
        self.version: int | None = None
        """Version that was pulled last, 0 for the base; None before a pull or after a failure."""

    def pull(self, source: Path, version: int) -> None:
        """Apply the stream's versions from `source` to the copy, up to `version`. Raises
        RefusedError, NotWholeError.

        Version 0, or one older than the copy's, begins a new stream: the copy is built again from
        the base. After NotWholeError the same pull may be repeated; after other errors the copy is
        built anew.
        """
        if version == 0 or self.version is None or version < self.version:
            self._begin()
        assert self.version is not None
        if version - self.version > MOST_VERSIONS:
            raise RefusedError(f"version {version} is too far from {self.version}; start anew")
        try:
            for each in range(self.version + 1, version + 1):
                self._take(each, source / f"weight_v{each:06d}")
                self.version = each
        except NotWholeError:
            # No change of this version is applied yet: it may be pulled again.
            raise
        except RefusedError:
            # A half-applied copy is useless: the next pull builds it anew.
            self.version = None
            raise
        except _UNREADABLE as error:
            self.version = None
            raise RefusedError(f"{source} holds no changes that can be read: {error!r}") from error

    def named(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the name and content of each tensor of the front's copy."""
        for name, tensor in self._tensors.items():
            yield name, tensor_of(tensor)

    def _begin(self) -> None:
        try:
            self._tensors = read_model_dir(self._base)
        except (WeightError, OSError) as error:
            raise RefusedError(f"{self._base} cannot be read: {error}") from error
        self.version = 0

    def _take(self, version: int, folder: Path) -> None:
        said = _said(folder)
        if said is not None and not said["weight_map"]:
            # A step that changed nothing has no file.
            return
        saved = look(folder, self._roots)
        changes = None if said is None else _changes(said["metadata"])
        if changes is None:
            self._tensors = {n: tensor_bits(n, t) for n, t in named_tensors(saved, self._roots)}
            return
        if (changes.version, changes.builds_on) != (version, version - 1):
            raise RefusedError(
                f"{folder} says that it makes {changes.version} of {changes.builds_on}; save the"
                " stream to a new folder"
            )
        for shard in saved.shards:
            wanted = json.loads(shard.head[8:]).get("__metadata__", {})
            for entry, data in _entries(folder, shard):
                self._change(entry.name, data, changes, wanted.get(entry.name))

    def _change(self, name: str, data: bytes, changes: _Changes, wanted: str | None) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise RefusedError(f"the checkpoint has no {name}, which changes")
        content: Bytes = tensor.bits.view(np.uint8)
        changes.apply(content, data)
        if changes.checksum(content) != wanted:
            raise RefusedError(
                f"{name} is not what the trainer has after version {changes.version}; the stream"
                f" does not build on {self._base}"
            )


def _said(folder: Path) -> dict[str, Any] | None:
    """Return the JSON index of a folder of changes; None if the folder holds a whole checkpoint.

    Raises NotWholeError.
    """
    if not folder.is_dir():
        raise NotWholeError(f"{folder}: no such folder")
    if not (folder / INDEX).exists():
        return None
    said: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    return said if "delta_encoding" in (said.get("metadata") or {}) else None


def _changes(said: dict[str, Any]) -> _Changes:
    if said["compression_format"] != "zstd":
        raise RefusedError(f"compression {said['compression_format']!r:.80} is not read; set zstd")
    return _Changes(
        int(said["version"]),
        int(said["base_version"]),
        _one_of(_ENCODINGS, said["delta_encoding"]),
        _one_of(_CHECKSUMS, said["checksum_format"]),
    )


def _one_of(known: dict[str, Any], name: object) -> Any:  # noqa: ANN401 - a table's entry
    if name not in known:
        raise RefusedError(
            f"{name!r:.80} is not read; set --update-weight-delta-encoding xor or overwrite,"
            " --update-weight-delta-checksum xxh3-128, blake3 or adler32"
        )
    return known[str(name)]


def _entries(folder: Path, shard: Shard) -> Iterator[tuple[CheckpointEntry, bytes]]:
    with (folder / shard.path).open("rb") as file:
        for entry in shard.entries:
            file.seek(entry.begin)
            yield entry, file.read(entry.end - entry.begin)


def _decompressed(data: bytes, most: int) -> bytes:
    """Return zstd data decompressed.

    Raises RefusedError unless its frame says that it is at most `most` bytes: that size is
    allocated at once.
    """
    if not 0 <= zstandard.frame_content_size(data) <= most:
        raise RefusedError(f"changes of {most} bytes at most are longer, or do not say how long")
    return zstandard.ZstdDecompressor().decompress(data)


def _xor(content: Bytes, data: bytes) -> None:
    content ^= np.frombuffer(_decompressed(data, content.size), np.uint8)


def _overwrite(content: Bytes, data: bytes) -> None:
    """Write changed bytes into a tensor's content.

    data: a count, that many positions of four bytes, then a byte for each.
    """
    raw = _decompressed(data, _COUNT_BYTES + 5 * content.size)
    (count,) = struct.unpack_from("<I", raw)
    positions = np.frombuffer(raw, "<u4", count, _COUNT_BYTES)
    values = np.frombuffer(raw, np.uint8, count, _COUNT_BYTES + 4 * count)
    if count and int(positions.max()) >= content.size:
        raise RefusedError("changes lie outside of their tensor")
    content[positions] = values


def _xxh3(content: Bytes) -> str:
    try:
        xxhash = importlib.import_module("xxhash")
    except ModuleNotFoundError:
        raise RefusedError(
            "xxhash is not installed here: pip install xxhash, or set"
            " --update-weight-delta-checksum blake3"
        ) from None
    digest: str = xxhash.xxh3_128(content.data).hexdigest()
    return digest


_ENCODINGS: dict[str, Callable[[Bytes, bytes], None]] = {"xor": _xor, "overwrite": _overwrite}
_CHECKSUMS: dict[str, Callable[[Bytes], str]] = {
    "xxh3-128": _xxh3,
    "blake3": lambda content: blake3.blake3(content.data).hexdigest(),
    "adler32": lambda content: f"{zlib.adler32(content.data):08x}",
}
