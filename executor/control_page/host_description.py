"""Description of a host beside its page: for nodes, which find hosts in a shared folder by it.

    DIR/NAME.page   the control page; the host is the process that holds its seat
    DIR/NAME.json   model, targets, GPUs and engine of the host that took the seat at `seated_ns`

The name of the page is the name of the host. A description counts for the life that wrote it: one
of an earlier life has another `seated_ns`. It is not trusted, since any user of a shared folder may
have written it.
"""

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from executor.control_page.page import group_id
from executor.errors import PageError

SUFFIX: Final = ".page"
"""File name suffix of the control pages that a node looks for."""
MOST_BYTES: Final = 16 << 10
MOST_DEVICES: Final = 64
MOST_TARGET_S: Final = 3_600.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEVICE: Final = re.compile(r"GPU-[0-9a-fA-F-]{1,60}")
TEXT_CHARS: Final = 253
MOST_LACKS: Final = 16
LENDING: Final = "lending"
"""Capability of a host that was asked to lend KV memory."""


@dataclass(frozen=True, slots=True)
class HostDescription:
    """Model, latency targets, GPUs and engine of a host, in a JSON file beside its control page.

    A target of 0 is unknown; `devices` are the UUIDs of its GPUs, by its ranks. seated_ns:
    CLOCK_MONOTONIC time at which the host took the page's seat. engine: its name and version.
    support: of that version, `tested` or `probed`. lacks: what the host was asked for and cannot,
    as `capability: reason`.
    """

    model: str
    ttft_s: float
    tpot_s: float
    devices: tuple[str, ...]
    seated_ns: int
    engine: str = ""
    support: str = ""
    lacks: tuple[str, ...] = ()

    def write(self, page: Path, group: str = "") -> None:
        """Write the description to the JSON file beside `page`, atomically. Raises PageError.

        group: name or number of a group that may read the file; empty for none.
        """
        target = path_of(page)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        gid = group_id(group)
        try:
            draft.unlink(missing_ok=True)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, json.dumps(asdict(self)).encode())
                if gid is not None:
                    os.fchown(fd, -1, gid)
                    os.fchmod(fd, 0o640)
            finally:
                os.close(fd)
            draft.replace(target)
        except OSError as error:
            raise PageError(f"cannot write {target}: {error.strerror}") from error

    @classmethod
    def read(cls, page: Path) -> Self | None:
        """Return the description of the host at `page`; None if the file does not exist.

        Raises PageError for a file that the owner of the page did not write, or that is invalid.
        """
        path = path_of(page)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PageError(f"{path} cannot be read: {error.strerror}") from error
        try:
            _check_file(path, os.fstat(fd), os.stat(page, follow_symlinks=False))
            raw = os.read(fd, MOST_BYTES + 1)
        except OSError as error:
            raise PageError(f"{path} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)
        try:
            if len(raw) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")  # noqa: TRY301
            return cls._parsed(json.loads(raw))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PageError(f"{path} describes no host: {error!r:.200}") from error

    @classmethod
    def current(cls, page: Path, seated_ns: int) -> Self | None:
        """Return the description by the host that took the seat at `seated_ns`; None without."""
        try:
            said = cls.read(page)
        except PageError:
            return None
        return said if said is not None and said.seated_ns == seated_ns else None

    @classmethod
    def _parsed(cls, said: Mapping[str, Any]) -> Self:
        """Return the description in decoded JSON; fields that a newer plugin adds are ignored."""
        model, devices, seated_ns = said["model"], said["devices"], said["seated_ns"]
        engine, support, lacks = (
            said.get("engine", ""),
            said.get("support", ""),
            said.get("lacks", []),
        )
        if not isinstance(lacks, list) or len(lacks) > MOST_LACKS:
            raise ValueError("lacks is no short list")
        for text in (model, engine, support, *lacks):
            if not (isinstance(text, str) and len(text) <= TEXT_CHARS and text.isprintable()):
                raise ValueError(f"{text!r:.80} is no short text")
        if not isinstance(devices, list) or len(devices) > MOST_DEVICES:
            raise ValueError("devices is no list of GPUs")
        for device in devices:
            if not (isinstance(device, str) and _DEVICE.fullmatch(device)):
                raise ValueError(f"{device!r:.80} is no UUID of a GPU")
        if len(set(devices)) < len(devices):
            raise ValueError("devices names a GPU twice")
        if not isinstance(seated_ns, int) or isinstance(seated_ns, bool):
            raise TypeError("seated_ns is no number")
        ttft_s, tpot_s = _target(said["ttft_s"]), _target(said["tpot_s"])
        return cls(model, ttft_s, tpot_s, tuple(devices), seated_ns, engine, support, tuple(lacks))


def path_of(page: Path) -> Path:
    """Return the path of the description beside a control page."""
    return (
        page.with_suffix(".json") if page.suffix == SUFFIX else page.with_name(f"{page.name}.json")
    )


def host_name(page: Path) -> str:
    """Return the name of the host with this control page. Raises PageError for an invalid one."""
    if page.suffix != SUFFIX or not _NAME.fullmatch(page.stem):
        raise PageError(
            f"{page.name!r:.120} names no host; up to 100 letters, digits, '.', '_' and '-',"
            f" then {SUFFIX}"
        )
    return page.stem


def page_of(folder: str, name: str) -> Path:
    """Return the path of the control page of the host `name` in `folder`.

    Raises PageError for an invalid name.
    """
    page = Path(folder) / f"{name}{SUFFIX}"
    if page.parent != Path(folder) or not _NAME.fullmatch(name):
        raise PageError(
            f"{name!r:.120} names no host; give ROSE_HOST_NAME up to 100 letters, digits, '.', '_'"
            " and '-'"
        )
    return page


def _check_file(path: Path, said: os.stat_result, page: os.stat_result) -> None:
    if not stat.S_ISREG(said.st_mode):
        raise PageError(f"{path} is not a regular file; delete it")
    if said.st_uid != page.st_uid:
        raise PageError(f"{path} belongs to uid {said.st_uid}, and its page to {page.st_uid}")
    if said.st_mode & 0o022:
        raise PageError(f"{path} may be written by others than its owner; chmod 640 it")


def _target(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a target is no number")
    if not (math.isfinite(value) and 0 <= value <= MOST_TARGET_S):
        raise ValueError(f"a target of {value} s")
    return float(value)
