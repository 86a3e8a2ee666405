"""Checkpoint folders that a trainer saves: permission to read one, completeness, tensors.

    path ── below a root of the operator's? ──► folder ── whole? ──► its tensors ── unchanged?
            no: refused, whatever is there        │ not yet: waited for                │ no: refused

A trainer names folders of its own file system, and any caller of the front's port may name any
other: only folders below the operator's roots are read, after links are resolved.
"""

import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rose.errors import ConfigError, RefusedError
from weight_transfer import WeightError
from weight_transfer.format.checkpoint import (
    INDEX,
    MAX_INDEX_BYTES,
    NUMBERED,
    SUFFIX,
    CheckpointEntry,
    Shard,
    parse_shard,
)

if TYPE_CHECKING:
    import torch

MAX_PATH_CHARS = 4_096
ADAPTER = "adapter_model" + SUFFIX
Stamp = tuple[tuple[str, int, int], ...]


class NotWholeError(RefusedError):
    """Error: a folder does not hold a whole checkpoint; a trainer may still be writing it."""


class WeightRoots:
    """Folders of the operator, below which checkpoints may be read; callers' paths elsewhere are
    refused.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        """Resolve the folders. Raises ConfigError for none, or for a path that is not a folder."""
        if not roots:
            raise ConfigError("give --weights-root DIR: checkpoints are read below it and nowhere")
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"--weights-root {root}: no such folder; make it first")
        self._roots = tuple(root.resolve() for root in roots)

    def __str__(self) -> str:
        return ", ".join(map(str, self._roots))

    def folder(self, path: str) -> Path:
        """Return the resolved path of a folder that a caller names.

        Raises RefusedError unless it is absolute and lies below a root.
        """
        # One error for existing and missing folders, so that callers learn nothing of others.
        refusal = RefusedError(
            f"{path[:200]!r} is not below a --weights-root of this front; save checkpoints below"
            " one, and name them by their absolute path"
        )
        if len(path) > MAX_PATH_CHARS or not path.startswith("/"):
            raise refusal
        try:
            resolved = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):
            raise refusal from None
        if not self.holds(resolved):
            raise refusal
        return resolved

    def holds(self, resolved: Path) -> bool:
        """Return True if a path, its links already resolved, lies below a root."""
        return any(resolved.is_relative_to(root) for root in self._roots)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """Whole checkpoint in a folder.

    stamp: (name, bytes, modification time in ns) of each of its weight files.
    """

    folder: Path
    shards: tuple[Shard, ...]
    stamp: Stamp

    @property
    def changed_ns(self) -> int:
        """Modification time of the checkpoint's newest weight file, in Unix nanoseconds."""
        return max(changed_ns for _, _, changed_ns in self.stamp)


def look(folder: Path, roots: WeightRoots, marker: str | None = None) -> SavedCheckpoint:
    """Return the checkpoint in a folder. Raises NotWholeError if it is incomplete, RefusedError if
    it cannot be published.

    Each file of its index must exist and be as long as its own header says. marker: name of the
    file that the trainer makes last, in the folder or the one above. Only headers are read.
    """
    if not folder.is_dir():
        raise NotWholeError(f"{folder}: no such folder")
    if marker and not ((folder / marker).exists() or (folder.parent / marker).exists()):
        raise NotWholeError(f"{folder} has no {marker} yet")
    names = _weight_files(folder)
    try:
        stamp = _stamp(folder, names, roots)
        shards = tuple(parse_shard(folder / name, name) for name in names)
    except FileNotFoundError as error:
        raise NotWholeError(f"{error.filename} is not there yet") from error
    except (OSError, WeightError) as error:
        raise NotWholeError(f"no whole checkpoint yet: {error}") from error
    tensors = [entry.name for shard in shards for entry in shard.entries]
    if len(set(tensors)) != len(tensors):
        raise RefusedError(f"{folder}: a tensor is in two of its files; save it to a new folder")
    return SavedCheckpoint(folder, shards, stamp)


def named_tensors(
    saved: SavedCheckpoint, roots: WeightRoots
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield each tensor's name and content, with one tensor in memory at a time.

    Raises RefusedError if the files change meanwhile. They are read and not mapped: a file that is
    cut short under a mapping ends the process.
    """
    try:
        for shard in saved.shards:
            with (saved.folder / shard.path).open("rb") as file:
                for entry in shard.entries:
                    file.seek(entry.begin)
                    data = bytearray(entry.end - entry.begin)
                    if file.readinto(data) != len(data):
                        raise OSError(f"{shard.path} is shorter than it was")  # noqa: TRY301
                    yield entry.name, _tensor(data, entry)
        now = _stamp(saved.folder, [shard.path for shard in saved.shards], roots)
    except OSError as error:
        raise RefusedError(f"{saved.folder} went while it was read: {error}") from error
    if now != saved.stamp:
        raise RefusedError(f"{saved.folder} changed while it was read; save to a new folder")


def _tensor(data: bytearray, entry: CheckpointEntry) -> "torch.Tensor":
    import torch

    dtype: torch.dtype = getattr(torch, entry.dtype)
    # torch makes no tensor of an empty buffer.
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(
        entry.shape
    )


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    found = sorted(each.name for each in folder.glob("*" + SUFFIX))
    names = [name for name in found if name != ADAPTER]
    if found and not names:
        raise RefusedError(f"{folder} holds an adapter; merge it into the weights and save those")
    if not names and (pickled := next(folder.glob("*.bin"), None)):
        raise NotWholeError(
            f"{folder} has {pickled.name} and no *{SUFFIX} yet; save it as safetensors"
        )
    if not names:
        raise NotWholeError(f"{folder} has no *{SUFFIX} yet")
    numbered = [match for name in names if (match := NUMBERED.fullmatch(name))]
    wanted = max((int(match[1]) for match in numbered), default=0)
    if len(numbered) < wanted:
        raise NotWholeError(f"{folder} has {len(numbered)} of {wanted} files yet")
    return names


def _indexed(index: Path) -> list[str]:
    """Return the sorted weight files that an index names.

    Raises NotWholeError while the index cannot be read: a trainer writes it last.
    """
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise RefusedError(f"{index} is no index: it is longer than {MAX_INDEX_BYTES} bytes")
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise NotWholeError(f"{index} cannot be read yet") from None
    if not names or not all(isinstance(each, str) and _is_plain(each) for each in names):
        raise RefusedError(f"{index} names files that are not in its folder")
    return sorted(names)


def _is_plain(name: str) -> bool:
    return name.endswith(SUFFIX) and "/" not in name and "\0" not in name


def _stamp(folder: Path, names: Sequence[str], roots: WeightRoots) -> Stamp:
    """Return (name, bytes, modification time in ns) of each file.

    Raises OSError, and RefusedError for anything but a plain file below the roots.
    """
    stamp = []
    for name in names:
        path = (folder / name).resolve()
        found = path.stat()
        # A fifo would never end, and a link may lead anywhere.
        if not stat.S_ISREG(found.st_mode) or not roots.holds(path):
            raise RefusedError(f"{folder / name} is no file below a --weights-root")
        stamp.append((name, found.st_size, found.st_mtime_ns))
    return tuple(stamp)
