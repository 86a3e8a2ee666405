"""Results as files: one for each piece, whole or not there.

PIECE.json          what was measured last
PIECE.failed.json   why it could not be, until it can
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from rose.errors import ConfigError

Record = dict[str, Any]
KEYS = {"piece", "sizes", "environment", "measured", "checks"}


def folder_of(out: Path, card_name: str) -> Path:
    """Where a card's results are: `NVIDIA H200` is `nvidia-h200`."""
    return out / (re.sub(r"[^a-z0-9]+", "-", card_name.lower()).strip("-") or "gpu")


def write_done(folder: Path, record: Record) -> Path:
    """Replace what was measured before."""
    path = folder / f"{record['piece']}.json"
    _write(path, record)
    _failed(folder, record["piece"]).unlink(missing_ok=True)
    return path


def write_failed(folder: Path, record: Record) -> Path:
    """Leave what was measured before."""
    path = _failed(folder, record["piece"])
    _write(path, record)
    return path


def read_done(folder: Path, piece: str) -> Record | None:
    """The last measured record, None without one. Raises ConfigError when damaged."""
    path = folder / f"{piece}.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); see --out") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it") from error
    if not isinstance(record, dict) or not record.keys() >= KEYS or record["piece"] != piece:
        raise ConfigError(f"{path} is no record of {piece}; delete it")
    return record


def _failed(folder: Path, piece: str) -> Path:
    return folder / f"{piece}.failed.json"


def _write(path: Path, record: Record) -> None:
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    try:
        _replace(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); see --out") from error


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
