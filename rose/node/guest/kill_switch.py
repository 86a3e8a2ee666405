"""Kill switch of a node: a file, so that it holds across restarts and without a daemon.

kill file ──► keepers and the daemon end the guests ──► still there after a while? SIGKILL

`end_guests` ends a node's guests from outside, with the daemon alive, stopped or dead.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ConfigError
from rose.node.guest.guest_record import running_guests
from rose.process.child import group_alive
from rose.process.filelock import holder_of
from rose.process.launcher import kill_group

KILLED = "kill switch"


class KillSwitch:
    """Set while the file exists. Keepers of guests look for it too, with or without a daemon."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._latched = False

    @property
    def engaged(self) -> bool:
        """Whether no guest may exist."""
        return self._latched or self.file.exists()

    def engage(self) -> None:
        """Set it. A disk that takes no file delays nothing: then it holds until the next start."""
        try:
            self.file.touch()
        except OSError:
            self._latched = True


PATIENCE_S = 1.0
LAST_PATIENCE_S = 5.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class EndedGuest:
    """Record of one guest's end; `seconds` from the order on."""

    name: str
    pid: int
    seconds: float
    gone: bool

    @property
    def outcome(self) -> str:
        """For a person."""
        if self.gone:
            return f"is gone after {self.seconds:.2f} s"
        return f"still runs after {self.seconds:.1f} s; end it with `kill -9 -{self.pid}` as root"


def end_guests(run_dir: Path, kill_file: Path) -> list[EndedGuest]:
    """Set the kill file and see every guest of the node gone.

    Where the file cannot be written the daemon is told by signal; ConfigError when there is none.
    """
    began_s = time.monotonic()
    guests = running_guests(run_dir)
    _order(run_dir, kill_file)
    return [_seen_gone(name, t.identity.pid, began_s) for name, t in guests.items()]


def _order(run_dir: Path, kill_file: Path) -> None:
    try:
        kill_file.touch()
    except OSError as error:
        daemon = holder_of(run_dir / "daemon.lock")
        if daemon is None:
            raise ConfigError(
                f"{kill_file} cannot be written ({error.strerror}); check its owner"
            ) from error
        os.kill(daemon, signal.SIGUSR1)


def _seen_gone(name: str, pid: int, began_s: float) -> EndedGuest:
    if not _gone_by(pid, began_s + PATIENCE_S):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill_group(pid)
            os.killpg(pid, signal.SIGKILL)
    gone = _gone_by(pid, began_s + LAST_PATIENCE_S)
    return EndedGuest(name, pid, time.monotonic() - began_s, gone)


def _gone_by(pid: int, deadline_s: float) -> bool:
    while group_alive(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True
