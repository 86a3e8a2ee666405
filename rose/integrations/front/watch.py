"""Watcher of a folder in which a trainer saves checkpoints: each new one becomes a version.

    step_7/ ── whole, and settled or marked? ── newer than the last? ──► published, recorded, served
                no: looked at again               no: ignored

`checkpoint-N`, `global_step_N`, `step_N`, `weight_vN`: a name that ends with its number. If several
are new the newest wins: no replica needs the ones between. Newer means written later, so a trainer
that goes back to an earlier step and saves it anew is followed.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from rose.errors import ConfigError, NotAnnouncedError, RefusedError
from rose.integrations.front.checkpoint_folder import (
    SavedCheckpoint,
    Stamp,
    WeightRoots,
    look,
    named_tensors,
)
from rose.integrations.front.updates import FrontPublisher
from weight_transfer.format.checkpoint import SUFFIX

# Time for which a checkpoint may lack files, since it is being written, before a line is logged.
LACKING_S = 30.0
_STEP = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")


class Noted(msgspec.Struct, frozen=True):
    """Record of the last published checkpoint, saved for the next start.

    changed_ns: modification time of its newest file.
    """

    folder: str
    name: str
    number: int
    changed_ns: int
    version: int


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """Whole checkpoint in the watched folder.

    name: its step's folder. number: the number at the end of that name.
    """

    name: str
    number: int
    checkpoint: SavedCheckpoint

    @property
    def age_key(self) -> tuple[int, int]:
        """Sort key, oldest first: modification time of the newest file, then the step's number."""
        return self.checkpoint.changed_ns, self.number


def newest(saved: Sequence[ListedCheckpoint], last: Noted | None) -> ListedCheckpoint | None:
    """Return the newest of these checkpoints if it is newer than `last`, else None."""
    new = [s for s in saved if last is None or s.age_key > (last.changed_ns, last.number)]
    return max(new, key=lambda each: each.age_key, default=None)


@dataclass(slots=True)
class _Lacking:
    """Reason why a step's folder is not a whole checkpoint, and the clock's seconds since when."""

    why: str
    since_s: float
    logged: bool = False


class CheckpointWatcher:
    """Watcher of one folder, which publishes the newest checkpoint saved there; only one thread may
    use it.

    inside: subfolder of a step's folder that holds the weights. marker: name of the file that says
    a step is whole; without one a step's files must be unchanged for `settled_s` seconds. state:
    file that records the last publication.
    """

    def __init__(
        self,
        publisher: FrontPublisher,
        folder: Path,
        state: Path,
        *,
        inside: str = "",
        marker: str | None = None,
        settled_s: float = 2.0,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the record of the last publication.

        Raises ConfigError for a folder that cannot be watched or a record that cannot be read.
        """
        if not folder.is_dir():
            raise ConfigError(f"--watch {folder}: no such folder; make it, or start the trainer")
        if PurePosixPath(inside).is_absolute() or ".." in PurePosixPath(inside).parts:
            raise ConfigError(f"--inside {inside!r:.80}: give a path within a step's folder")
        self._publisher = publisher
        self._folder = folder.resolve()
        self._roots = WeightRoots([self._folder])
        self._state = state
        self._inside = inside
        self._marker = marker
        self._settled_s = settled_s
        self._say = say
        self._clock = clock
        self._seen: dict[str, tuple[Stamp, float]] = {}
        self._refused: dict[str, Stamp] = {}
        self._lacking: dict[str, _Lacking] = {}
        # Version that no scheduler knows yet, which the next look has announced.
        self._unannounced: int | None = None
        self.last = self._load()

    def step(self) -> Noted | None:
        """Look at the folder once; publish the newest checkpoint and return its record when it is
        served, or return None if nothing is new.

        Raises RefusedError for a checkpoint that cannot be published, which is not tried again
        until its files change, and UnavailableError if ROSE does not answer: then call again.
        """
        saved = newest(self._settled(), self.last)
        if saved is None:
            if self._unannounced is None:
                return None
            self._publisher.wait_served(self._unannounced)
            self._unannounced = None
            return self.last
        named = named_tensors(saved.checkpoint, self._roots)
        try:
            version = self._publisher.publish(named, wait=False)
            self._unannounced = None
        except NotAnnouncedError:
            self._unannounced = self._publisher.version
            self._note(saved, self._unannounced)
            raise
        except RefusedError:
            self._refused[saved.name] = saved.checkpoint.stamp
            raise
        self._note(saved, version)
        self._publisher.wait_served(version)
        return self.last

    def _note(self, saved: ListedCheckpoint, version: int) -> None:
        """Save the record before anything else may fail: the checkpoint is not published again."""
        self.last = Noted(
            str(self._folder), saved.name, saved.number, saved.checkpoint.changed_ns, version
        )
        self._keep(self.last)

    @property
    def waits(self) -> bool:
        """True if the last look saw a whole checkpoint whose files had been there unchanged for
        less than `settled_s` seconds.
        """
        return any(self._clock() - since_s < self._settled_s for _, since_s in self._seen.values())

    @property
    def lacks(self) -> str:
        """Reason why the highest-numbered step without a whole checkpoint is left out; "" if there
        is none.
        """
        names = dict(self._steps())
        left_out = [
            (names[name], each.why) for name, each in self._lacking.items() if name in names
        ]
        return max(left_out, default=(0, ""))[1]

    def _note_lacking(self, lacking: dict[str, str], now_s: float) -> None:
        """Report once, through `say`, each step's folder that has lacked the same thing for
        LACKING_S seconds.
        """
        before, self._lacking = self._lacking, {}
        for name, why in lacking.items():
            known = before.get(name)
            each = self._lacking[name] = (
                known if known is not None and known.why == why else _Lacking(why, now_s)
            )
            if not each.logged and now_s - each.since_s >= LACKING_S:
                each.logged = True
                self._say(f"{name} is left out: {why}")

    def _settled(self) -> list[ListedCheckpoint]:
        """Return the whole checkpoints that may be new, have settled (or are marked), and were not
        refused with these same files.
        """
        now_s = self._clock()
        found = []
        seen: dict[str, tuple[Stamp, float]] = {}
        lacking: dict[str, str] = {}
        for name, number in self._steps():
            try:
                if not self._may_be_new(name, number):
                    continue
                checkpoint = self._look(name)
            except (RefusedError, OSError) as error:
                # The folder may be of another kind, half written, or just deleted.
                lacking[name] = str(error)
                continue
            if self._refused.get(name) == checkpoint.stamp:
                continue
            stamp, since_s = self._seen.get(name, (checkpoint.stamp, now_s))
            seen[name] = stamp, since_s = (
                (stamp, since_s) if stamp == checkpoint.stamp else (checkpoint.stamp, now_s)
            )
            if self._marker or now_s - since_s >= self._settled_s:
                found.append(ListedCheckpoint(name, number, checkpoint))
        self._seen = seen
        self._note_lacking(lacking, now_s)
        return found

    def _may_be_new(self, name: str, number: int) -> bool:
        """Return True if a weight file of this step is newer than the last publication.

        It spares reading old steps.
        """
        last = self.last
        if last is None:
            return True
        with os.scandir(self._folder / name / self._inside) as entries:
            files = [e.stat().st_mtime_ns for e in entries if e.name.endswith(SUFFIX)]
        return max(((each, number) for each in files), default=(0, 0)) > (
            last.changed_ns,
            last.number,
        )

    def _look(self, name: str) -> SavedCheckpoint:
        step = self._folder / name
        weights = self._roots.folder(str(step / self._inside))
        # A trainer marks the step's folder, whatever subfolder has the weights.
        marked = self._marker is not None and (step / self._marker).exists()
        return look(weights, self._roots, None if marked else self._marker)

    def _steps(self) -> list[tuple[str, int]]:
        """Return the name and number of each folder whose name ends with a number."""
        steps = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                match = _STEP.fullmatch(entry.name)
                if match and not entry.name.startswith(".") and entry.is_dir():
                    steps.append((entry.name, int(match[1])))
        return steps

    def _load(self) -> Noted | None:
        try:
            noted = msgspec.json.decode(self._state.read_bytes(), type=Noted)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._state} does not say what was published last ({error}); remove it, and"
                " the newest checkpoint is published again"
            ) from error
        return noted if noted.folder == str(self._folder) else None

    def _keep(self, noted: Noted) -> None:
        part = self._state.with_name(self._state.name + ".part")
        try:
            self._state.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(msgspec.json.encode(noted))
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._state)
        except OSError as error:
            # After a restart the same weights are published again, as a version without changes.
            self._say(f"{self._state} cannot be written ({error.strerror}); make room")
