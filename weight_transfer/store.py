"""Chunk store: `root/chunks/<blake3>` and `root/manifests/<version>.json`, durable and verified."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from weight_transfer.chunk import check_id, chunk_id
from weight_transfer.errors import ChunkMissingError, StoreError
from weight_transfer.manifest import Manifest

_DRAFT = ".tmp-"


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
        self.chunks_dir.mkdir(parents=True, exist_ok=True)
        self.manifests_dir.mkdir(parents=True, exist_ok=True)

    def put(self, encoded: bytes) -> str:
        """Store a chunk durably and return its name; storing it again costs nothing."""
        name = chunk_id(encoded)
        if not self.has(name):
            _write_durably(self.chunks_dir / name, encoded)
        return name

    def has(self, name: str) -> bool:
        """Whether a chunk is here; a file appears under its name only when it is durable."""
        return (self.chunks_dir / name).is_file()

    def get(self, name: str) -> bytes:
        """Return a chunk, verified against its name."""
        return read_chunk(self.chunks_dir, name)

    def put_manifest(self, manifest: Manifest) -> Path:
        """Publish a version: refused unless every chunk is durable, final once written."""
        missing = [chunk.id for chunk in manifest.chunks if not self.has(chunk.id)]
        if missing:
            raise StoreError(
                f"version {manifest.version}: {len(missing)} chunks are not stored, "
                f"first {missing[0]}; put them first"
            )
        path = self.manifest_path(manifest.version)
        raw = manifest.to_json()
        if path.exists():
            if path.read_bytes() != raw:
                raise StoreError(f"version {manifest.version} is published already; take the next")
            return path
        _write_durably(path, raw)
        return path

    def get_manifest(self, version: int) -> Manifest:
        """Return a published manifest; its signature is the reader's to check."""
        path = self.manifest_path(version)
        if not path.is_file():
            raise StoreError(f"version {version} is not in this store")
        return Manifest.from_json(path.read_bytes())

    def manifest_path(self, version: int) -> Path:
        """Return where a version's manifest is, or would be."""
        return self.manifests_dir / f"{version}.json"

    def versions(self) -> tuple[int, ...]:
        """Return the published versions, ascending."""
        return tuple(sorted(int(path.stem) for path in self.manifests_dir.glob("*.json")))

    def files(self) -> list[StoredFile]:
        """Everything here that is whole."""
        paths = [*self.chunks_dir.iterdir(), *self.manifests_dir.iterdir()]
        return [_stored(path) for path in paths if not path.name.startswith(_DRAFT)]

    def discard(self, file: StoredFile) -> None:
        """Remove one; whoever needs it again fetches it again."""
        file.path.unlink(missing_ok=True)


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


def _write_durably(path: Path, raw: bytes) -> None:
    """Write a temporary file, sync it, rename it, sync the directory: all or nothing."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_DRAFT)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
