"""Root of a run: the folder of its versions, held by the one process that publishes from it.

A run lives where its versions are. `root/run` names it and is locked by the living trainer, so
whoever gets the lock knows that the trainer before it is dead, and is the same run: it need not
wait for anything. The kernel lets go of the lock however a process ends.
"""

import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rose.errors import RefusedError
from rose.process.filelock import HeldFile, holder_of

FILE = "run"
MAX_HOLDER_CHARS = 160
_RUN = re.compile(rb'"run": "([0-9a-f]{16})"')
# Record locks are a process's: two publishers in one process are told apart here.
_HELD: set[Path] = set()


@dataclass(frozen=True, slots=True)
class RunId:
    """One process of a run. `process` is drawn at each start; `holder` is for people."""

    run: str
    process: str
    holder: str


class RunRoot:
    """The lock of a root, held from `take` to `close`."""

    def __init__(self, place: Path, file: HeldFile, run: RunId) -> None:
        self.run = run
        self._place = place
        self._file = file

    @classmethod
    def take(cls, root: Path, name: str = "") -> Self:
        """Take the root for this process; `name`: what its user calls the run, for people.

        RefusedError names the process that has it; ConfigError says why it cannot be locked.
        """
        place = (root / FILE).resolve()
        if place in _HELD:
            raise RefusedError(f"{root} has a publisher in this process; close that one first")
        try:
            file = HeldFile.take(place)
        except RefusedError as error:
            raise RefusedError(
                f"{root} is in use by a trainer that lives, {_said_holder(place)}; stop that one,"
                " or give this one a root of its own"
            ) from error
        known = _RUN.search(file.read())
        run = known[1].decode() if known else secrets.token_hex(8)
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        holder = (f"run {name} on {holder}" if name else holder)[:MAX_HOLDER_CHARS]
        fields = {"run": run, "holder": holder, "since_s": round(time.time())}
        try:
            # The name stays where it is, whenever this process is killed.
            written = os.pwrite(file.descriptor, json.dumps(fields).encode(), 0)
            os.ftruncate(file.descriptor, written)
        except OSError as error:
            file.close()
            raise RefusedError(f"{place} cannot be written: {error.strerror}") from error
        _HELD.add(place)
        return cls(place, file, RunId(run, secrets.token_hex(4), holder))

    def close(self) -> None:
        """Let go of it; the run keeps its name."""
        if self._place in _HELD:
            _HELD.discard(self._place)
            self._file.close()


def _said(raw: bytes) -> dict[str, object]:
    """Return the fields of a root's file, none for one that is new or was cut off."""
    try:
        fields = json.loads(raw)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _said_holder(place: Path) -> str:
    try:
        holder = _said(place.read_bytes()).get("holder")
    except OSError:
        holder = None
    return str(holder or f"process {holder_of(place)}")[:MAX_HOLDER_CHARS]
