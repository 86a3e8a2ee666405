"""Files and folders that appear whole or not at all, and those that are their owner's alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weight_transfer.errors import StoreError

DRAFT = ".tmp-"


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
        made = path / out.name
        if folder:
            made.mkdir()
        yield made
        made.rename(out)
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
