"""Record and lock of a running guest: its process, and the daemon that answers for it.

    run_dir/guests/ID.json   who runs; locked by the daemon that answers for it

    daemon dies ──► lock is free ──► the guest's keeper waits for orphan_s ──► ends the guest
                         └─► a new daemon takes the lock in time, and the guest with it

The keeper watches the file that it was started with, not its name. A new life of the guest gets a
new file, so a claim on it says nothing about what is left of an earlier life.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rose.engines import EngineSpec
from rose.process.child import Keep
from rose.process.filelock import HeldFile
from rose.process.procfs import ProcessIdentity

FOLDER = "guests"


@dataclass(frozen=True, slots=True)
class GuestRecord:
    """A guest's process, what it was started as, and the secret that controls it."""

    identity: ProcessIdentity
    spec: str
    secret: str = field(repr=False)


class GuestLock:
    """The record of one guest. Raises RefusedError where another daemon holds it."""

    def __init__(self, run_dir: Path, guest: str, kill_file: Path, orphan_s: float) -> None:
        self._path = run_dir / FOLDER / f"{guest}.json"
        self._kill_file = kill_file
        self._orphan_s = orphan_s
        self._held: HeldFile | None = None

    def found(self) -> GuestRecord | None:
        """Claim what an earlier daemon left running; None when there is nothing of it.

        What cannot be read is let go of again, and its keeper ends it.
        """
        if not self._path.exists():
            return None
        self._held = HeldFile.take(self._path)
        record = _parsed(self._held.read())
        if record is None or not record.identity.running:
            self.drop()
            return None
        return record

    def begin(self) -> Keep:
        """Claim a life that is about to start."""
        self.drop()
        self._held = HeldFile.take(self._path)
        return Keep(self._held.descriptor, self._kill_file, self._orphan_s)

    def record(self, pid: int, spec: EngineSpec, secret: str) -> None:
        """Write down who runs now, for the next daemon; only this user reads the file."""
        identity = ProcessIdentity.of(pid)
        if identity and self._held:
            record = {
                "identity": asdict(identity),
                "spec": fingerprint(spec),
                "secret": secret,
            }
            self._held.write(json.dumps(record).encode())

    def drop(self) -> None:
        """Answer for nothing any more; a keeper that still waits here ends its guest."""
        # A record that stays on a disk that takes nothing names a process that is gone.
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._held:
            self._held.close()
            self._held = None


def fingerprint(spec: EngineSpec) -> str:
    """Return a digest, equal for engines that are started alike."""
    return hashlib.sha256(repr(spec).encode()).hexdigest()[:16]


def running_guests(run_dir: Path) -> dict[str, GuestRecord]:
    """Return the running guests of a node by name."""
    found = {path.stem: _parsed(path.read_bytes()) for path in run_dir.glob(f"{FOLDER}/*.json")}
    return {name: record for name, record in found.items() if record and record.identity.running}


def _parsed(raw: bytes) -> GuestRecord | None:
    try:
        record = json.loads(raw)
        return GuestRecord(
            ProcessIdentity(**record["identity"]), str(record["spec"]), str(record["secret"])
        )
    except (ValueError, TypeError, KeyError):
        # Its daemon died between starting the guest and writing down whom it had started.
        return None
