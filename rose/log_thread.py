"""A thread that waits for disks, so that nobody else has to."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from typing_extensions import override

# Lines that wait for a slow disk: some minutes of a node's samples.
WAITING = 8_192
# A write that takes longer than that is worth a word.
HUNG_S = 5.0

_logger = logging.getLogger("rose.logs")


class LogThread:
    """Carries out writes in their order; what it has no room for is refused at once."""

    def __init__(self, name: str, waiting: int = WAITING) -> None:
        # Of this kind, because a signal's handler may put while its thread is putting.
        self._writes: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._waiting = waiting
        self._since_s: float | None = None
        self._closed = False
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], object]) -> bool:
        """Have it done soon; False, and it is not done, where too much waits already."""
        if self._closed or self._writes.qsize() >= self._waiting:
            return False
        self._writes.put(write)
        return True

    def hung_s(self) -> float:
        """For how long one write has lasted; 0 below HUNG_S."""
        since_s = self._since_s
        lasted_s = 0.0 if since_s is None else time.monotonic() - since_s
        return lasted_s if lasted_s >= HUNG_S else 0.0

    def flush(self, patience_s: float) -> bool:
        """Wait for all that was put before; False when it takes longer."""
        done = threading.Event()
        self._writes.put(done.set)
        return done.wait(patience_s)

    def close(self, patience_s: float) -> None:
        """Do what waits, for so long at most, and end."""
        if not self._closed:
            self._closed = True
            self._writes.put(None)
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (write := self._writes.get()) is not None:
            self._since_s = time.monotonic()
            try:
                write()
            except Exception:  # a write keeps its own errors: this one is a fault of the program
                _logger.exception("a log could not be written")
            self._since_s = None


class AsideHandler(logging.Handler):
    """Hands lines to another handler in a thread of its own: a full pipe holds nobody up.

    Lines for which there is no room are dropped.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._thread = LogThread("rose-stderr")

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Take one line."""
        self._thread.put(lambda: self._handler.emit(record))

    @override
    def close(self) -> None:
        """Write what waits, as far as the reader takes it within a second."""
        self._thread.close(1.0)
        super().close()


def log_to_stderr(level: int) -> None:
    """Configure this process's `logging`: to standard error, without ever waiting for it."""
    if logging.getLogger().handlers:
        return  # Somebody else has.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[AsideHandler(handler)])
