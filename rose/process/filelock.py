"""A locked file that belongs to one process; the kernel unlocks it when that process ends.

POSIX record locks, so that any process can ask for the holder. They belong to the process:
closing any descriptor of the file unlocks it, so a holder opens its file once.
"""

import fcntl
import os
from pathlib import Path
from typing import Self

from rose.errors import ConfigError, RefusedError
from rose.logs.rotating_jsonl import private_folder
from rose.process.launcher import claim_holder


class HeldFile:
    """Open file that this process has locked; closing any other descriptor of it unlocks it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Self:
        """Open the file, or create it, lock it without waiting, and return it.

        Raises RefusedError with the process that holds it, ConfigError if it cannot be created.
        """
        try:
            private_folder(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be made: {error.strerror}; check its owner"
            ) from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = claim_holder(descriptor)
            os.close(descriptor)
            raise RefusedError(
                f"{path} is held by process {holder}; stop that one first"
            ) from error
        return cls(path, descriptor)

    def read(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    def write(self, raw: bytes) -> None:
        """Replace the content in place, not by a rename: other processes watch this very file."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, raw, 0)

    def close(self) -> None:
        """Unlock and close the file."""
        os.close(self.descriptor)


def holder_of(path: Path) -> int | None:
    """Return the id of the process that has locked the file; None if there is none, or no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return claim_holder(descriptor)
    finally:
        os.close(descriptor)
