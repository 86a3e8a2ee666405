"""File of a backup: all entries of a store at one revision, with a version and a checksum.

    {"format": "rose-store-backup", "version": 1, "revision": 57, "taken_s": …, "entries": 2, …}
    {"key": "epochs/guest-0", "value": "eyJlcG9jaCI6IDV9"}          base64, one line an entry
    {"key": "stop", "value": "…"}
    {"sha256": "…"}                                                 of all bytes before this line

It is written beside its name and linked to it once it is whole and on the disk, so a file of that
name is a whole one. What was cut or changed since is refused.
"""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.store.protocol import StoreEntry

FORMAT, VERSION = "rose-store-backup", 1
# A store holds some kilobytes of state for each job and replica.
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Backup:
    """Entries of a store at `revision`. taken_s: Unix seconds. release: the ROSE version, or ""."""

    entries: tuple[StoreEntry, ...]
    revision: int
    taken_s: float
    release: str = ""


def encoded(backup: Backup) -> bytes:
    """Return the backup as the bytes of its file, with a checksum in the last line."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "revision": backup.revision,
        "taken_s": round(backup.taken_s, 3),
        "entries": len(backup.entries),
        "release": backup.release,
    }
    lines = [json.dumps(head)]
    lines += [
        json.dumps({"key": each.key, "value": base64.b64encode(each.value).decode()})
        for each in backup.entries
    ]
    body = "".join(f"{line}\n" for line in lines).encode()
    return body + json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n"


def decoded(raw: bytes) -> Backup:
    """Return the backup in the bytes of a file.

    Raises `ConfigError` if they are damaged or another's.

    All entries have the backup's revision; a store to which they are written gives them others.
    """
    head = _head(raw)
    body, _, last = raw.removesuffix(b"\n").rpartition(b"\n")
    body += b"\n"
    said = _object(last).get("sha256")
    if not raw.endswith(b"\n") or said != hashlib.sha256(body).hexdigest():
        raise ConfigError("it was cut off or changed: its checksum is another; take another backup")
    try:
        revision, count = int(head["revision"]), int(head["entries"])
        entries = tuple(_entry(line, revision) for line in body.splitlines()[1:])
        backup = Backup(entries, revision, float(head["taken_s"]), str(head.get("release", "")))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConfigError(f"it is whole, yet no release wrote it ({error!r:.80})") from error
    if not count == len(entries) == len({each.key for each in entries}):
        raise ConfigError(f"it is whole, yet has other entries than the {count} that it says")
    return backup


def _head(raw: bytes) -> dict[str, Any]:
    head = _object(raw.partition(b"\n")[0])
    if head.get("format") != FORMAT:
        raise ConfigError("it is no backup of a store; give a file of `rose store backup`")
    if head.get("version") != VERSION:
        raise ConfigError(
            f"it is of version {head.get('version')!r:.20}, this release reads {VERSION}; restore"
            " it with the release that wrote it"
        )
    return head


def _object(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _entry(line: bytes, revision: int) -> StoreEntry:
    said = json.loads(line)
    if not isinstance(said["key"], str) or not said["key"]:
        raise ValueError("an entry has no key")
    return StoreEntry(said["key"], base64.b64decode(said["value"], validate=True), revision)


def write_backup(path: Path, backup: Backup) -> int:
    """Write the backup to a new file that its owner alone can read; return its size in bytes.

    Raises `ConfigError` if the file exists, which is left as it is, or cannot be written.
    """
    raw = encoded(backup)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            # Unlike a rename this fails where the name is taken.
            os.link(part, path)
        finally:
            part.unlink()
        _sync_folder(path.parent)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already; give another name") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error
    return len(raw)


def read_backup(path: Path) -> Backup:
    """Return the backup in a file. Raises `ConfigError` with one line."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is longer than {MOST_BYTES} bytes, and no backup of a store")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check its name") from error
    try:
        return decoded(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def without(entries: Iterable[StoreEntry], keys: Iterable[str]) -> tuple[StoreEntry, ...]:
    """Return all entries except those of these keys."""
    left_out = frozenset(keys)
    return tuple(each for each in entries if each.key not in left_out)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
