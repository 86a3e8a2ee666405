"""Shelf: the receiver's store within a cap; what nobody needs now goes first, the oldest first."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from rose.errors import RoseError
from weight_transfer import ChunkStore, Manifest, StoredFile


class ShelfFullError(RoseError):
    """A version does not fit, with everything gone that may go."""


def evictions(
    files: Collection[StoredFile], needed: Collection[str], room_bytes: int
) -> list[StoredFile]:
    """Which files to remove so that the others take at most `room_bytes`.

    Never one that is `needed`, even where that leaves too little room.
    """
    excess = sum(file.size for file in files) - room_bytes
    leaving: list[StoredFile] = []
    for file in sorted(files, key=lambda file: (file.written_ns, file.name)):
        if excess <= 0:
            break
        if file.name not in needed:
            leaving.append(file)
            excess -= file.size
    return leaving


class Shelf:
    """A chunk store of at most `cap_bytes`; None bounds nothing. Methods run in any thread."""

    def __init__(self, store: ChunkStore, cap_bytes: int | None) -> None:
        self.store = store
        self._cap_bytes = cap_bytes
        self._holds: dict[int, set[str]] = {}

    @contextmanager
    def hold(self) -> Iterator[set[str]]:
        """Names in the set that is handed out are needed until the block ends."""
        names: set[str] = set()
        self._holds[id(names)] = names
        try:
            yield names
        finally:
            del self._holds[id(names)]
            while names:  # All at once would hold the interpreter's lock.
                names.pop()

    def make_room(self, manifest: Manifest) -> None:
        """Make room for a version that is about to be fetched; ShelfFullError when it cannot be."""
        if self._cap_bytes is None:
            return
        absent = {ref.id: ref.encoded_bytes for ref in manifest.chunks}
        missing = sum(size for name, size in absent.items() if not self.store.has(name))
        files = self.store.files()
        kept = absent, *tuple(self._holds.values())
        # Of what is here alone: the union of all that is held would keep the interpreter's lock.
        needed = {file.name for file in files if any(file.name in names for names in kept)}
        room = self._cap_bytes - missing - manifest.size
        leaving = evictions(files, needed, room)
        for file in leaving:
            self.store.discard(file)
        staying = sum(f.size for f in files) - sum(f.size for f in leaving)
        if staying > room:
            raise ShelfFullError(
                f"version {manifest.version} needs {missing} bytes more than the cap of"
                f" {self._cap_bytes} leaves; raise `receiver.disk_bytes`"
            )
