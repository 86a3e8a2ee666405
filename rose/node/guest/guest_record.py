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
    """Record of a running guest: its process, a digest of the engine settings it was started with,
    and the secret that its control requests bear.
    """

    identity: ProcessIdentity
    spec: str
    secret: str = field(repr=False)


class GuestLock:
    """Lock and file of one guest's record; the daemon that holds the lock answers for the guest.
    Raises RefusedError if another daemon holds it.
    """

    def __init__(self, run_dir: Path, guest: str, kill_file: Path, orphan_s: float) -> None:
        self._path = run_dir / FOLDER / f"{guest}.json"
        self._kill_file = kill_file
        self._orphan_s = orphan_s
        self._held: HeldFile | None = None

    def found(self) -> GuestRecord | None:
        """Lock the record of a guest that an earlier daemon left running and return it; None if
        there is none.

        A record that cannot be read, or whose process ended, is deleted and unlocked, so that its
        keeper ends the guest.
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
        """Create and lock a new record file for a guest that is about to start; return the options
        of its keeper process, which ends the guest once the lock is released.
        """
        self.drop()
        self._held = HeldFile.take(self._path)
        return Keep(self._held.descriptor, self._kill_file, self._orphan_s)

    def record(self, pid: int, spec: EngineSpec, secret: str) -> None:
        """Write process, settings digest and secret of the running guest to the locked file, for
        the next daemon; only this user can read it.
        """
        identity = ProcessIdentity.of(pid)
        if identity and self._held:
            record = {
                "identity": asdict(identity),
                "spec": fingerprint(spec),
                "secret": secret,
            }
            self._held.write(json.dumps(record).encode())

    def drop(self) -> None:
        """Delete the record and release its lock; a keeper that still watches the file ends its
        guest.
        """
        # A record that cannot be deleted is harmless: it names a process that is gone.
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._held:
            self._held.close()
            self._held = None


def fingerprint(spec: EngineSpec) -> str:
    """Return a 16-digit hex digest of an engine's settings, equal if two engines are
    started alike.
    """
    return hashlib.sha256(repr(spec).encode()).hexdigest()[:16]


def running_guests(run_dir: Path) -> dict[str, GuestRecord]:
    """Return the records of a node's running guests by guest name; those that cannot be read are
    left out.
    """
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
