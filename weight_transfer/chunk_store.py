"""Chunk store: immutable chunks and manifests in one folder, durable and verified.

root/chunks/<blake3>              encoded chunks
root/parts/<blake3>               chunks that are on their way, from the first byte on
root/manifests/<version>.manifest       how a version follows from its parent
root/manifests/<version>.base.manifest  all of a version, where it was published so too
root/manifests/<job>@<version>….manifest  of a reader, whose store has that number of another job

All of it is its owner's alone: folders are 0700 and files 0600. Files and folders appear whole or
not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from weight_transfer.catalog import Catalog, Published, ReaderPin
from weight_transfer.errors import (
    ChunkDigestError,
    ChunkMissingError,
    ManifestError,
    StoreError,
)
from weight_transfer.format.chunk import check_id, chunk_id
from weight_transfer.format.manifest import Manifest, head_of

DRAFT = ".tmp-"
_log = logging.getLogger(__name__)
_DELTA, _BASE, _APART = ".manifest", ".base.manifest", "@"


@contextmanager
def draft(out: Path, *, folder: bool = False) -> Iterator[Path]:
    """A path to write a file or a folder to; it becomes `out` when the block ends well.

    Raises StoreError when `out` exists or has no place. Nothing is left of a block that fails.
    """
    if out.exists():
        raise StoreError(f"{out} exists; remove it or choose another name")
    if not out.parent.is_dir():
        raise StoreError(f"{out.parent} is no folder; make it first")
    path = Path(tempfile.mkdtemp(dir=out.parent, prefix=DRAFT))
    try:
        target = path / out.name
        if folder:
            target.mkdir()
        yield target
        target.rename(out)
        sync(out.parent)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Make what was renamed in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private(path: str, flags: int) -> int:
    """Open a file, as `open(..., opener=private)` asks for it; a new one is its owner's alone."""
    return os.open(path, flags, 0o600)


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, whatever an older version made of it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A chunk (`name` is its own) or a manifest (`name` is its file's)."""

    name: str
    path: Path
    size: int
    written_ns: int


class ChunkStore:
    """Immutable chunks and manifests under one directory; safe for one writer per name."""

    def __init__(self, root: Path) -> None:
        self.chunks_dir = root / "chunks"
        self.manifests_dir = root / "manifests"
        self._parts_dir = root / "parts"
        self._published: dict[str, tuple[tuple[int, int], Published | None]] = {}
        self.damaged_files = 0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._parts_dir, self.chunks_dir, self.manifests_dir):
            private_folder(folder)

    def put(self, encoded: bytes) -> str:
        """Store a chunk durably and return its name; one that is here and sound is not written."""
        name = chunk_id(encoded)
        if not self.sound(name):
            _write_durably(self.chunks_dir / name, (encoded,))
        return name

    def part_path(self, name: str) -> Path:
        """Return the path of a chunk that is being received."""
        return self._parts_dir / name

    def open_part(self, name: str) -> BinaryIO:
        """The file of a chunk that is on its way, to be read and appended to."""
        return open(self.part_path(name), "a+b", opener=private)

    def adopt(self, name: str, part: BinaryIO) -> None:
        """Store the chunk whose part file, open here, the caller has proved whole."""
        part.flush()
        os.fsync(part.fileno())
        self.part_path(name).replace(self.chunks_dir / name)
        sync(self.chunks_dir)

    def has(self, name: str) -> bool:
        """Return True if a chunk is stored; a file has its name only once it is durable."""
        return (self.chunks_dir / name).is_file()

    def get(self, name: str) -> bytes:
        """Return a chunk, verified against its name."""
        return read_chunk(self.chunks_dir, name)

    def sound(self, name: str) -> bool:
        """Return True if a chunk is stored and has the bytes that its name promises."""
        try:
            self.get(name)
        except (ChunkMissingError, ChunkDigestError):
            return False
        return True

    def mend(self, name: str) -> bool:
        """Remove a chunk that is not what its name says, for it to be fetched again.

        Returns whether it was so.
        """
        damaged = self.has(name) and not self.sound(name)
        if damaged:
            self.damaged_files += 1
            _log.warning("chunk %s is damaged and removed, to be fetched again", name)
            (self.chunks_dir / name).unlink(missing_ok=True)
        return damaged

    def put_manifest(
        self, manifest: Manifest, origin: int | None = None, *, jobs: bool = False
    ) -> Path:
        """Publish a version: refused unless every chunk is durable, final once written.

        The same version may come again, signed anew: the one that expires last is kept.
        Chunks of other origins than this store's are vouched for by the ranks that put them there.
        jobs: the store of a reader, where a version of another job may have the same number.
        """
        missing = [c.id for c in manifest.chunks if c.origin == origin and not self.has(c.id)]
        if missing:
            raise StoreError(
                f"version {manifest.version}: {len(missing)} chunks are not stored, "
                f"first {missing[0]}; put them first"
            )
        path = self.manifest_path(manifest.version, base=manifest.is_base)
        known = _readable(path)
        if known and jobs and known.job != manifest.job:
            path = self.apart_path(manifest)
            known = _readable(path)
        if known and not known.says_as_much_as(manifest):
            raise StoreError(f"version {manifest.version} is published already; take the next")
        if known and known.expires_s >= manifest.expires_s:
            return path
        _write_durably(path, manifest.parts())
        return path

    def get_manifest(self, version: int, *, base: bool = False) -> Manifest:
        """Return a published manifest; its signature is the reader's to check."""
        path = self.manifest_path(version, base=base)
        if not path.is_file():
            raise StoreError(f"version {version} is not in this store")
        return Manifest.from_bytes(path.read_bytes())

    def find_manifest(self, version: int, *, base: bool = False) -> Manifest | None:
        """Return a published manifest, None when it is not here or is damaged."""
        manifest = _readable(self.manifest_path(version, base=base))
        # A file under another version's name is damage too.
        fits = manifest and (manifest.version, manifest.is_base) == (version, base)
        return manifest if fits else None

    def manifest_path(self, version: int, *, base: bool = False) -> Path:
        """Return where a version's manifest is, or would be."""
        return self.manifests_dir / f"{version}{_BASE if base else _DELTA}"

    def apart_path(self, manifest: Manifest) -> Path:
        """Return where a version is whose number another job's version has here."""
        return self._apart(manifest.job, manifest.version, base=manifest.is_base)

    def manifest_bytes(self, job: str, version: int, *, base: bool = False) -> bytes | None:
        """Return a version's manifest as it is stored, of whichever job for ""; None without."""
        paths = [self.manifest_path(version, base=base)]
        if job:
            paths.append(self._apart(job, version, base=base))
        for path in paths:
            try:
                raw = path.read_bytes()
            except FileNotFoundError:
                continue
            if not job or _is_of(raw, job):
                return raw
        return None

    def _apart(self, job: str, version: int, *, base: bool) -> Path:
        digest = hashlib.blake2b(job.encode(), digest_size=8).hexdigest()
        return self.manifests_dir / f"{digest}{_APART}{version}{_BASE if base else _DELTA}"

    def versions(self) -> tuple[int, ...]:
        """Return the versions that follow a parent, ascending."""
        return self._numbers(_DELTA)

    def bases(self) -> tuple[int, ...]:
        """Return the versions that are here as a whole, ascending."""
        return self._numbers(_BASE)

    def _numbers(self, suffix: str) -> tuple[int, ...]:
        names = [path.name.removesuffix(suffix) for path in self.manifests_dir.glob(f"*{suffix}")]
        return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))

    def catalog(self) -> Catalog:
        """Return what is published here; a manifest is read again only where its file changed.

        A version whose manifest is damaged is left out and logged once.
        """
        bases = [self._summary(version, base=True) for version in self.bases()]
        deltas = [self._summary(version, base=False) for version in self.versions()]
        return Catalog({b.version: b.wire_bytes for b in bases if b}, tuple(filter(None, deltas)))

    def _summary(self, version: int, *, base: bool) -> Published | None:
        path = self.manifest_path(version, base=base)
        try:
            status = path.stat()
        except FileNotFoundError:  # It was collected meanwhile.
            return None
        state = status.st_mtime_ns, status.st_size
        known_state, known = self._published.get(path.name, (None, None))
        if known_state != state:
            manifest = self.find_manifest(version, base=base)
            if manifest is not None:
                known = Published(manifest.version, manifest.parent, manifest.wire_bytes)
            else:
                known = None
                self.damaged_files += 1
                _log.warning("version %d is left out: %s is damaged", version, path)
            self._published[path.name] = state, known
        return known

    def drop(self, name: str) -> tuple[int, ...]:
        """Remove a damaged or missing chunk and the manifests that name it; returns their versions.

        A chunk that is sound stays, and so do its versions.
        """
        if self.sound(name):
            return ()
        self.damaged_files += 1
        dropped = set()
        for version, manifest in self._manifests():
            if any(chunk.id == name for chunk in manifest.chunks):
                path = self.manifest_path(version, base=manifest.is_base)
                path.unlink(missing_ok=True)
                dropped.add(version)
                _log.warning("%s is removed: its chunk %s is damaged", path, name)
        (self.chunks_dir / name).unlink(missing_ok=True)
        return tuple(sorted(dropped))

    def drop_after(self, version: int) -> None:
        """Remove the manifests of all later versions, which were announced to no reader."""
        for later, base in self._published_parts():
            if later > version:
                self.manifest_path(later, base=base).unlink(missing_ok=True)

    def _manifests(self) -> Iterator[tuple[int, Manifest]]:
        """Yield the number and the manifest of each delta and base that can be read."""
        for version, base in self._published_parts():
            manifest = self.find_manifest(version, base=base)
            if manifest is not None:
                yield version, manifest

    def _published_parts(self) -> list[tuple[int, bool]]:
        """Return (version, True) of each base, then (version, False) of each delta."""
        return [(v, True) for v in self.bases()] + [(v, False) for v in self.versions()]

    def collect(self, leases: Iterable[ReaderPin], now_s: float) -> int:
        """Remove what no joiner and no leased reader needs; returns the bytes that this freed.

        Manifests go before their chunks, so that nobody is sent to a chunk that is gone. A chunk
        that no manifest has named yet stays: its version is being published.
        """
        needed = self.catalog().needed(leases, now_s)
        kept_of = {True: needed.bases, False: needed.deltas}
        gone = [(v, base) for v, base in self._published_parts() if v not in kept_of[base]]
        unneeded = set(gone)
        suspects, kept = set[str](), set[str]()
        for version, manifest in self._manifests():
            ids = suspects if (version, manifest.is_base) in unneeded else kept
            ids.update(chunk.id for chunk in manifest.chunks)
        freed = 0
        for version, base in gone:
            path = self.manifest_path(version, base=base)
            freed += _remove(path)
            self._published.pop(path.name, None)
        suspects -= kept
        return freed + sum(_remove(self.chunks_dir / name) for name in suspects if self.has(name))

    def files(self) -> list[StoredFile]:
        """Everything here that is whole."""
        paths = [*self.chunks_dir.iterdir(), *self.manifests_dir.iterdir()]
        return [_stored(path) for path in paths if not path.name.startswith(DRAFT)]

    def discard(self, file: StoredFile) -> None:
        """Remove one; whoever needs it again fetches it again."""
        file.path.unlink(missing_ok=True)


def _readable(path: Path) -> Manifest | None:
    """Return the manifest in a file, None when there is none or it is damaged."""
    try:
        return Manifest.from_bytes(path.read_bytes())
    except (ManifestError, FileNotFoundError):
        return None


def _remove(path: Path) -> int:
    size = path.stat().st_size
    path.unlink()
    return size


def _stored(path: Path) -> StoredFile:
    status = path.stat()
    return StoredFile(path.name, path, status.st_size, status.st_mtime_ns)


def read_chunk(chunks_dir: Path, name: str) -> bytes:
    """Return `chunks_dir/name`, verified against its name."""
    try:
        encoded = (chunks_dir / name).read_bytes()
    except FileNotFoundError as error:
        raise ChunkMissingError(f"chunk {name} is not in {chunks_dir}; fetch it first") from error
    check_id(name, encoded)
    return encoded


def _write_durably(path: Path, parts: Iterable[bytes]) -> None:
    """Write a temporary file, sync it, rename it, sync the directory: all or nothing."""
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=DRAFT)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"{path.parent} does not take {path.name}: {error.strerror}; make room and "
            "publish again"
        ) from error


def _is_of(raw: bytes, job: str) -> bool:
    """Return True for a manifest of the job, or one so damaged that its reader must raise."""
    try:
        return head_of(raw).job == job
    except ManifestError:
        return True
