"""Files of one folder, read whole and within a bound; nothing leads out of it.

Paths come from whoever asks for an update. A FIFO would hold its reader up for ever, a device has
no end and a link leads elsewhere: only regular files are read, no link below the folder is
followed, and the size is known before the first byte.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from weight_transfer.errors import ChunkMissingError, StoreError

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO opened like this does not wait for its writer; for a regular file it means nothing.
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


class Enclosed:
    """Reads files below `root`; without a root any, for a caller of this process's own."""

    def __init__(self, root: Path | None) -> None:
        self._root = None if root is None else _absolute(root)

    def read(self, path: Path, max_bytes: int) -> bytes:
        """The whole file. StoreError for what is none, lies elsewhere or is larger;
        ChunkMissingError when there is nothing."""
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
    """Without `..`, and without following anything."""
    return Path(os.path.normpath(path.absolute()))


def _content(descriptor: int, path: Path, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is no regular file; name a file of the store")
    if status.st_size > max_bytes:
        raise StoreError(f"{path} has {status.st_size} bytes, at most {max_bytes} are expected")
    with os.fdopen(os.dup(descriptor), "rb") as file:
        # One more than expected: it may have grown since.
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise StoreError(f"{path} grows while it is read; fetch it again")
    return content
