"""`rose demo verify DIR`: recompute a report from its raw records and compare it field by field."""

from pathlib import Path

import msgspec

from rose.compare import Difference, compare
from rose.decoding import BAD_BYTES
from rose.demo import plots
from rose.demo.reading import read_records
from rose.demo.report import build_report, encode_report
from rose.demo.report_text import render_report
from rose.errors import RoseError


def verify(folder: Path) -> list[Difference]:
    """What differs between the report in `folder` and its raw records; empty when nothing does.

    Raises `RoseError` when a record or the report is missing or malformed.
    """
    report = build_report(read_records(folder))
    recomputed = msgspec.json.decode(encode_report(report))
    try:
        reported = msgspec.json.decode((folder / "report.json").read_bytes())
        page = (folder / "report.md").read_text(encoding="utf-8")
    except OSError as error:
        raise RoseError(f"{folder}: no report to verify ({error.strerror})") from error
    except BAD_BYTES as error:
        raise RoseError(f"{folder / 'report.json'}: {error}") from error
    differences = list(compare(reported, recomputed))
    if page != render_report(report, list(plots.PICTURES)):
        differences.append(Difference("report.md", "its text", "another text"))
    return differences
