"""WatchedFiles: a value of files that other programs replace, read again when one changes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from rose.errors import ConfigError

T = TypeVar("T")


def read_bounded(path: Path, most_bytes: int, otherwise: str = "{} cannot be read") -> bytes:
    """Return a file's first `most_bytes` + 1 bytes, so that the caller detects a longer one.

    Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            return file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{otherwise.format(path)} ({error.strerror})") from error


class WatchedFiles(Generic[T]):
    """Value that `read` makes of some files, made again when one of them changes. Any thread may
    use it.

    Files are replaced one after the other, so while they cannot be read the last value stays, and
    `trouble` says why.
    """

    def __init__(
        self, paths: tuple[Path, ...], read: Callable[[], T], otherwise: str = "{} cannot be read"
    ) -> None:
        """Call `read` for the first value.

        otherwise: text of the error for a missing file. Raises ConfigError.
        """
        self.trouble = ""
        self._paths = paths
        self._read = read
        self._otherwise = otherwise
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._value = read()

    def newest(self) -> T:
        """Return the value that `read` makes of the files, made again if a file changed; the last
        value while they cannot be read.
        """
        with self._lock:
            try:
                stamps = self._stamps()
                if stamps != self._seen:
                    self._value = self._read()
                    self._seen = stamps
                self.trouble = ""
            except ConfigError as error:
                self.trouble = str(error)
            return self._value

    def _stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._paths:
            try:
                found = path.stat()
            except OSError as error:
                raise ConfigError(f"{self._otherwise.format(path)} ({error.strerror})") from error
            stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
        return stamps
