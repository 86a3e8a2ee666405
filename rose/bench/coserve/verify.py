"""`verify DIR`: recompute every figure from the raw records, compare with what was written."""

import json
from pathlib import Path

from rose.bench.coserve.records import read_run
from rose.bench.coserve.result import RESULT, build_result
from rose.compare import FieldDifference, compare
from rose.errors import RoseError


def verify(folder: Path) -> list[FieldDifference]:
    """What differs; empty when nothing does. RoseError when a file is missing or malformed."""
    path = folder / RESULT
    try:
        reported = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RoseError(f"{path}: cannot be read ({error.strerror}); was the run ended?") from error
    except ValueError as error:
        raise RoseError(f"{path}: {error}") from error
    recomputed = json.loads(json.dumps(build_result(read_run(folder))))
    return list(compare(reported, recomputed))
