"""Checkpoints on disk: one safetensors file or a folder of them, mapped and read as bits."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import TensorFormatError
from weight_transfer.format.tensors import PACKED_BITS, SAFETENSORS, WIDTHS, TensorBits, unsigned

SUFFIX = ".safetensors"
INDEX = "model" + SUFFIX + ".index.json"
# model-00001-of-00003.safetensors: names how many shards there are.
NUMBERED = re.compile(r".*-\d{5}-of-(\d{5})\.safetensors")
HEAD = "draft"
"""Folder in a model's own with a head that drafts; its tensors' names begin with `draft.`."""
MAX_INDEX_BYTES = 64 << 20
MAX_OTHER_BYTES = 64 << 20
"""Files without tensors above this size are left out of a checkpoint, since others are read
whole."""
# Weights in other formats and a trainer's state.
_FOREIGN = (
    *(SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".pkl", ".npz", ".npy", ".h5", ".msgpack"),
    *(".gguf", ".onnx", ".onnx_data", ".tar", ".zip"),
)
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One tensor of a safetensors file; its bytes are [begin, end) of the whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a checkpoint. `path` is relative to the checkpoint, with slashes.

    `head`: bytes before the first tensor. `entries`: the file's tensors in the order of their
    bytes, which cover the rest of the file without a hole.
    """

    path: str
    head: bytes
    size: int
    entries: tuple[CheckpointEntry, ...]


class Checkpoint:
    """A safetensors checkpoint that is open for reading.

    Its tensors are views of the mapped files.
    """

    def __init__(self, root: Path, shards: tuple[Shard, ...], others: tuple[str, ...]) -> None:
        self.root = root
        self.shards = shards
        self.others = others
        """Paths of the folder's files without tensors, relative to the folder, sorted."""
        self._places: dict[str, tuple[Shard, CheckpointEntry]] = {}
        for shard in shards:
            for entry in shard.entries:
                if entry.name in self._places:
                    raise TensorFormatError(f"{entry.name} is in two files of {root}")
                self._places[entry.name] = shard, entry
        self._maps: dict[str, NDArray[np.uint8]] = {}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Return the checkpoint in a safetensors file, or in a folder of them.

        Only headers are read. Raises TensorFormatError that says what is wrong with it.
        """
        if path.is_file():
            return cls(path, (parse_shard(path, path.name),), ())
        if not path.is_dir():
            raise TensorFormatError(f"{path}: no such file or folder")
        index = _index(path)
        own = sorted(set(index.values())) if index else _unindexed(path)
        shards = tuple(parse_shard(path / name, name) for name in own)
        checkpoint = cls(path, shards, tuple(sorted(_others(path))))
        if index:
            checkpoint._check_index(index)
        return checkpoint

    def _check_index(self, index: dict[str, str]) -> None:
        """Raise TensorFormatError for a tensor that is not where the index says, or not in it."""
        for name in sorted(index.keys() | self._places.keys()):
            place = self._places.get(name)
            if place is None or place[0].path != index.get(name, place[0].path):
                raise TensorFormatError(
                    f"{self.root / index[name]} lacks {name}, which {INDEX} says is in it; save"
                    " the model again"
                )
            if name not in index:
                raise TensorFormatError(
                    f"{self.root / INDEX} lacks {name}, which is in {place[0].path}; save the"
                    " model again"
                )

    @classmethod
    def of_model(cls, model_dir: Path) -> Checkpoint:
        """Return the checkpoint in a Hugging Face model folder, with that of the head in its folder
        `draft`. Raises TensorFormatError.
        """
        if not model_dir.is_dir():
            raise TensorFormatError(f"{model_dir}: no such folder; give a model's folder")
        policy = cls.open(model_dir)
        if not any((model_dir / HEAD).glob(f"*{SUFFIX}")):
            return policy
        head = [
            Shard(
                f"{HEAD}/{shard.path}",
                shard.head,
                shard.size,
                tuple(replace(each, name=f"{HEAD}.{each.name}") for each in shard.entries),
            )
            for shard in cls.open(model_dir / HEAD).shards
        ]
        return cls(model_dir, (*policy.shards, *head), policy.others)

    @property
    def single(self) -> bool:
        """True if the checkpoint is one file, False for a folder."""
        return self.root.is_file()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors of the checkpoint, sorted."""
        return tuple(sorted(self._places))

    @property
    def nbytes(self) -> int:
        return sum(entry.end - entry.begin for _, entry in self._places.values())

    def entry(self, name: str) -> CheckpointEntry | None:
        """Return dtype, shape and byte range of a tensor, None if the checkpoint has none of
        that name."""
        place = self._places.get(name)
        return place[1] if place else None

    def file(self, path: str) -> Path:
        return self.root if self.single else self.root / path

    def tensor(self, name: str) -> TensorBits:
        """Return a tensor as a read-only view of its mapped file: a change of the file changes
        it."""
        shard, entry = self._places[name]
        data = self._maps.get(shard.path)
        if data is None:
            data = np.memmap(self.file(shard.path), dtype=np.uint8, mode="r").view(np.ndarray)
            self._maps[shard.path] = data
        return view(data, entry)


def view(data: NDArray[np.uint8], entry: CheckpointEntry) -> TensorBits:
    """Return the tensor of `entry` as a view of its file's bytes `data`."""
    bits = data[entry.begin : entry.end].view(unsigned(WIDTHS[entry.dtype]))
    return TensorBits(entry.name, entry.dtype, entry.shape, bits)


def parse_shard(path: Path, name: str) -> Shard:
    """Return the safetensors file at `path`, listed as `name`.

    Its header is checked against its size. Raises TensorFormatError.
    """
    status = path.stat()
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):  # A FIFO would hold its reader up for ever.
        raise TensorFormatError(f"{path} is no regular file; save the model there again")
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise TensorFormatError(f"{path}: not a safetensors file (header of {length} bytes)")
        head = prefix + file.read(length)
    return Shard(name, head, size, parse_head(head, size, str(path)))


def parse_head(head: bytes, size: int, where: str) -> tuple[CheckpointEntry, ...]:
    """Return the tensors of a safetensors file of `size` bytes, given its first bytes `head`.

    They are in the order of their bytes. `where` names the file in errors. Raises
    TensorFormatError.
    """
    if len(head) != _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little"):
        raise TensorFormatError(f"{where}: its header has another length than it says")
    try:
        header = json.loads(head[_LENGTH_BYTES:])
    except ValueError as error:
        raise TensorFormatError(f"{where}: header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise TensorFormatError(f"{where}: header is not a JSON object")
    header.pop("__metadata__", None)
    entries = [_entry(where, name, entry, len(head)) for name, entry in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = len(head)
    for entry in entries:
        if entry.begin != at:
            raise TensorFormatError(
                f"{where}: {entry.name} begins at byte {entry.begin} where {at} belongs"
            )
        at = entry.end
    if at != size:
        raise TensorFormatError(f"{where}: its tensors end at byte {at}, the file at {size}")
    return tuple(entries)


def read_safetensors(path: Path) -> dict[str, TensorBits]:
    """Return all tensors of a safetensors file by name, copied into memory as they are."""
    return _loaded(Checkpoint.open(path))


def read_model_dir(model_dir: Path) -> dict[str, TensorBits]:
    """Return all tensors of a Hugging Face model folder by name, copied into memory as they are."""
    return _loaded(Checkpoint.of_model(model_dir))


def _loaded(checkpoint: Checkpoint) -> dict[str, TensorBits]:
    views = (checkpoint.tensor(name) for name in checkpoint.names)
    return {t.name: TensorBits(t.name, t.dtype, t.shape, t.bits.copy()) for t in views}


def _entry(where: str, name: str, entry: Any, origin: int) -> CheckpointEntry:  # noqa: ANN401 -- JSON
    word = entry.get("dtype") if isinstance(entry, dict) else None
    if isinstance(word, str) and word not in SAFETENSORS:
        raise TensorFormatError(
            f"{where}: {name} is of dtype {word:.20}, which is not carried; save it as one of"
            f" {', '.join(SAFETENSORS)}"
        )
    try:
        dtype, width = SAFETENSORS[entry["dtype"]]
        shape = _stored(tuple(int(n) for n in entry["shape"]), PACKED_BITS.get(entry["dtype"], 0))
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise TensorFormatError(f"{where}: cannot read the entry of {name}: {entry}") from error
    if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * width:
        raise TensorFormatError(f"{where}: {name} has offsets {begin}..{end} for shape {shape}")
    return CheckpointEntry(name, dtype, shape, origin + begin, origin + end)


def _stored(shape: tuple[int, ...], packed_bits: int) -> tuple[int, ...]:
    """Return the shape in elements: bytes along the last dimension, or of all weights, where
    weights of `packed_bits` bits share them."""
    if not packed_bits:
        return shape
    nbytes, odd = divmod(math.prod(shape) * packed_bits, 8)
    if odd:
        raise ValueError("weights that end within a byte")
    row_bytes, odd = divmod(shape[-1] * packed_bits, 8)
    return (nbytes,) if odd else (*shape[:-1], row_bytes)


def _index(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor by a folder's index file, {} without an index file."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise TensorFormatError(f"{path} has more than {MAX_INDEX_BYTES} bytes")
        index = json.loads(path.read_bytes())["weight_map"]
        names = set(index.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFormatError(f"{path} has no weight_map; save the model again") from error
    plain = all(isinstance(n, str) and n.endswith(SUFFIX) and "/" not in n for n in names)
    if not names or not plain or any("\0" in name for name in names):
        raise TensorFormatError(f"{path} names files that are not in its folder")
    if missing := sorted(name for name in names if not (folder / name).exists()):
        raise TensorFormatError(f"{path} names {missing[0]}, which is not there; save it too")
    return dict(index)


def _unindexed(folder: Path) -> list[str]:
    """Return the safetensors file names of a folder without an index, sorted."""
    # A subfolder may hold another checkpoint, or a copy of this one.
    names = sorted(each.name for each in folder.glob("*" + SUFFIX) if each.name[0] != ".")
    if not names:
        raise TensorFormatError(f"{folder}: no *{SUFFIX} in it; save the model there first")
    numbered = [match for name in names if (match := NUMBERED.fullmatch(name))]
    wanted = max((int(match[1]) for match in numbered), default=0)
    if len(numbered) < wanted:
        raise TensorFormatError(f"{folder} has {len(numbered)} of {wanted} files; save all of them")
    return names


def _others(folder: Path) -> Iterator[str]:
    """Yield the relative paths of a folder's files without weights, such as configurations.

    Hidden files, weights in other formats and files above MAX_OTHER_BYTES are left out.
    """
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(here, name)
            if name.startswith(".") or name.endswith(_FOREIGN):
                continue
            if not path.is_file() or path.stat().st_size > MAX_OTHER_BYTES:
                continue
            relative = path.relative_to(folder).as_posix()
            try:
                relative.encode()
            except UnicodeEncodeError as error:
                raise TensorFormatError(
                    f"{relative!a}: the file's name is not UTF-8; rename it"
                ) from error
            yield relative
