"""Chunk store: immutable chunks and manifests in one folder, durable and verified.

root/chunks/<blake3>              encoded chunks
root/parts/<blake3>               partial files of chunks that are being received
root/manifests/<version>.manifest       delta: how a version follows from its parent
root/manifests/<version>.base.manifest  base: all weights of a version
root/manifests/<job>@<version>….manifest  a reader's, if another job's version has that number

Folders have mode 0700 and files 0600. Files and folders appear whole or not at all; chunks that
were fetched are not durable, since their source has them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    """Yield a temporary path to write a file or folder to.

    Rename it to `out` if the block succeeds. Raises StoreError when `out` exists or its parent
    folder does not. After a failed block nothing is left on disk.
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
    """Flush a folder's entries to disk, so that files renamed into it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private(path: str, flags: int) -> int:
    """Open a file and return its descriptor; a new file gets mode 0600.

    Use it as `open(..., opener=private)`.
    """
    return os.open(path, flags, 0o600)


def private_folder(path: Path) -> None:
    """Create a folder with mode 0700; remove other users' access if the folder already exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the store: a chunk, named by its digest, or a manifest, named by its file name."""

    name: str
    path: Path
    size: int
    written_ns: int


class ChunkStore:
    """Immutable chunks and signed manifests in one folder; safe for one writer per name."""

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
        """Store a chunk durably and return its name, the BLAKE3 of its bytes.

        Skip a sound stored copy.
        """
        name = chunk_id(encoded)
        if not self.sound(name):
            _write_durably(self.chunks_dir / name, (encoded,))
        return name

    def part_path(self, name: str) -> Path:
        """Return the path of the partial file of a chunk that is being received."""
        return self._parts_dir / name

    def open_part(self, name: str) -> BinaryIO:
        """Open the partial file of a chunk that is being received, for reading and appending."""
        return open(self.part_path(name), "a+b", opener=private)

    def adopt(self, name: str, part: BinaryIO) -> None:
        """Move the partial file of a chunk into the store.

        The caller has verified its digest. A power cut may damage it: `mend` finds that, and the
        chunk is fetched again. Hundreds of an adapter's would each wait for the disk.
        """
        part.flush()
        self.part_path(name).replace(self.chunks_dir / name)

    def keep(self, name: str, encoded: bytes) -> bool:
        """Store a chunk that was received whole, as `adopt` does; return False, and store nothing,
        for bytes that are not the chunk's.
        """
        if chunk_id(encoded) != name:
            return False
        with open(self.part_path(name), "wb", opener=private) as part:
            part.write(encoded)
            self.adopt(name, part)
        return True

    def has(self, name: str) -> bool:
        """Return True if a chunk's file exists; its bytes are not verified."""
        return (self.chunks_dir / name).is_file()

    def get(self, name: str) -> bytes:
        """Return a chunk's bytes, verified against its name.

        Raises ChunkMissingError, ChunkDigestError.
        """
        return read_chunk(self.chunks_dir, name)

    def sound(self, name: str) -> bool:
        """Return True if a chunk is stored and its bytes have the digest that is its name."""
        try:
            self.get(name)
        except (ChunkMissingError, ChunkDigestError):
            return False
        return True

    def mend(self, name: str) -> bool:
        """Delete a stored chunk whose bytes are damaged, so that it is fetched again.

        Returns True if it was damaged and deleted, False if it is sound or not stored. A damaged
        one is counted and logged.
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
        """Publish a version by writing its manifest durably.

        Return the path of the manifest's file. Raises StoreError if a chunk of `origin` is not
        stored, or if the version is published with other weights. A manifest that differs in its
        times and signature alone replaces the stored one if it expires later. Chunks of other
        origins are not checked. jobs: True for a reader's store, where another job's version of the
        same number gets a file name of its own.
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
        """Return the manifest of a version's delta, or of its base; the signature is not verified.

        Raises StoreError when it is not stored, ManifestError when it is damaged.
        """
        path = self.manifest_path(version, base=base)
        if not path.is_file():
            raise StoreError(f"version {version} is not in this store")
        return Manifest.from_bytes(path.read_bytes())

    def find_manifest(self, version: int, *, base: bool = False) -> Manifest | None:
        """Return the manifest of a version's delta or base, None when it is missing or damaged."""
        manifest = _readable(self.manifest_path(version, base=base))
        # A file under another version's name is damage too.
        fits = manifest and (manifest.version, manifest.is_base) == (version, base)
        return manifest if fits else None

    def manifest_path(self, version: int, *, base: bool = False) -> Path:
        """Return the path of the manifest of a version's delta or base; the file may not exist."""
        return self.manifests_dir / f"{version}{_BASE if base else _DELTA}"

    def apart_path(self, manifest: Manifest) -> Path:
        """Return the path of a manifest whose version number is another job's in this store.

        The file may not exist.
        """
        return self._apart(manifest.job, manifest.version, base=manifest.is_base)

    def manifest_bytes(self, job: str, version: int, *, base: bool = False) -> bytes | None:
        """Return the stored bytes of the manifest of a job's version; None when there is none.

        An empty `job` accepts the version of any job.
        """
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
        """Return the numbers of the versions that have a delta here, ascending."""
        return self._numbers(_DELTA)

    def bases(self) -> tuple[int, ...]:
        """Return the numbers of the versions that have a base (all weights) here, ascending."""
        return self._numbers(_BASE)

    def _numbers(self, suffix: str) -> tuple[int, ...]:
        names = [path.name.removesuffix(suffix) for path in self.manifests_dir.glob(f"*{suffix}")]
        return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))

    def catalog(self) -> Catalog:
        """Return the catalog of the bases and deltas in this store, with their encoded bytes.

        Summaries of manifests are cached until the file changes. A version whose manifest is
        damaged is left out, counted and logged once.
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
        """Delete a damaged or missing chunk and all manifests that name it.

        Return their versions, sorted. A sound chunk and its manifests stay, and the result is ().
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
        """Delete the manifests of all versions above `version`; their chunks stay."""
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
        """Delete versions that no joining or leased reader needs, and their chunks.

        Return the freed bytes. Manifests are deleted before their chunks. A chunk that no manifest
        names stays, since its version may be about to be published.
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
        """Return all complete chunks and manifests of the store.

        Drafts and partial files are left out, and files that are deleted meanwhile.
        """
        found = []
        for path in (*self.chunks_dir.iterdir(), *self.manifests_dir.iterdir()):
            if not path.name.startswith(DRAFT):
                with suppress(FileNotFoundError):
                    found.append(_stored(path))
        return found

    def discard(self, file: StoredFile) -> None:
        """Delete a file of the store; a file that is gone already is ignored."""
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
    """Return the bytes of chunk `name` in `chunks_dir`, verified against its name.

    Raises ChunkMissingError, ChunkDigestError.
    """
    try:
        encoded = (chunks_dir / name).read_bytes()
    except FileNotFoundError as error:
        raise ChunkMissingError(f"chunk {name} is not in {chunks_dir}; fetch it first") from error
    check_id(name, encoded)
    return encoded


def _write_durably(path: Path, parts: Iterable[bytes]) -> None:
    """Write a temporary file, sync it, rename it to `path`, sync the folder.

    Raises StoreError; the file at `path` is then what it was.
    """
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
    """Return True if the manifest is of the job, or so damaged that its reader will reject it."""
    try:
        return head_of(raw).job == job
    except ManifestError:
        return True
