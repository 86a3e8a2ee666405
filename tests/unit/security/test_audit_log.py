"""An audit log that was edited, cut or swapped says so; one that lived on is whole."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.cli.main import main
from rose.logs.rotating_jsonl import LogLimits, log_parts
from rose.security.audit_log import START, AuditLog, opened, sealed, verify

SMALL = LogLimits(4 << 10, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "audit-scheduler.jsonl"


def write(path: Path, count: int, limits: LogLimits = SMALL, **fields: object) -> None:
    log = AuditLog(path, "scheduler", limits)
    for number in range(count):
        log.write("lease_granted", {"replica": f"g{number}", "epoch": number, **fields}, "node n0")
    log.close()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for part in log_parts(path) for line in part.open()]


def test_a_record_says_what_was_decided_by_whom(path: Path) -> None:
    write(path, 1, figures={"gain_s": 1.5})
    (record,) = lines(path)
    assert record["event"] == "lease_granted"
    assert record["by"] == "node n0"
    assert record["fields"] == {"replica": "g0", "epoch": 0, "figures": {"gain_s": 1.5}}
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}


def test_the_chain_goes_on_over_restarts_and_rotation(path: Path) -> None:
    for _ in range(4):
        write(path, 20)
    verdict = verify(path)
    assert verdict.wrong == ""
    assert verdict.head.n == 80
    assert len(log_parts(path)) == 3
    # The number of the oldest records is left, which proves that they were there.
    assert verdict.head.first > 1
    assert verdict.records == 80 - verdict.head.first + 1


def edit(path: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    text = path.read_bytes().splitlines(keepends=True)
    text[number] = change(text[number])
    path.write_bytes(b"".join(text))


def renamed(line: bytes) -> bytes:
    return line.replace(b'"node n0"', b'"node n1"')


def reordered(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(b"".join(change(path.read_bytes().splitlines(True))))


def removed(path: Path) -> None:
    path.unlink()
    write(path, 1)


EDITED = "audit-scheduler.jsonl:{}: its hash is another one: it was edited"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "the first edited": (lambda path: edit(path, 0, renamed), EDITED.format(1)),
    "one edited": (lambda path: edit(path, 3, renamed), EDITED.format(4)),
    "the last edited": (lambda path: edit(path, 9, renamed), EDITED.format(10)),
    "the first removed": (lambda path: edit(path, 0, lambda line: b""), "missing"),
    "one removed": (lambda path: edit(path, 3, lambda line: b""), "missing"),
    "the last removed": (lambda path: edit(path, 9, lambda line: b""), "missing"),
    "swapped": (reordered(lambda text: [text[1], text[0], *text[2:]]), ""),
    "repeated": (reordered(lambda text: [*text[:5], text[4], *text[5:]]), ""),
    "put in": (reordered(lambda text: [*text[:5], b"{}\n", *text[5:]]), ""),
    "no text": (reordered(lambda text: [*text[:5], b"\xff" * 9 + b"\n", *text[5:]]), ""),
    "the log removed": (removed, "records 1 to 10 are missing at the beginning"),
    "the head removed": (
        lambda path: path.with_suffix(".head").unlink(),
        "is missing: nobody knows which record is the last",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_found(path: Path, damage: str) -> None:
    write(path, 10)
    assert verify(path).wrong == ""
    act, line = DAMAGES[damage]
    act(path)
    wrong = verify(path).wrong
    assert wrong
    assert line in wrong


def test_a_part_that_was_removed_is_found(path: Path) -> None:
    write(path, 40)
    log_parts(path)[0].unlink()
    assert "are missing at the beginning" in verify(path).wrong


def test_a_log_that_was_cut_is_found_by_its_head_and_stays_found(path: Path) -> None:
    write(path, 10)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:7]))
    assert "records 8 to 10 are missing at the end" in verify(path).wrong
    # A process that starts on it does not paper it over.
    write(path, 3)
    assert "record 11 does not follow record 7" in verify(path).wrong


def test_a_chain_that_was_made_anew_is_found_by_who_knows_a_record(path: Path) -> None:
    write(path, 5)
    known = verify(path).head
    for each in path.parent.iterdir():
        each.unlink()
    write(path, 9)
    assert verify(path).wrong == ""
    assert "is not the one you know" in verify(path, (known.n, known.hash)).wrong
    assert "record 99, which you know, is not in it" in verify(path, (99, known.hash)).wrong


def test_what_a_killed_process_did_not_finish_is_no_damage(path: Path) -> None:
    write(path, 3)
    with path.open("ab") as file:
        file.write(b'{"n":4,"t":1,"sour')
    write(path, 2)
    verdict = verify(path)
    assert (verdict.wrong, verdict.head.n) == ("", 5)


def test_a_record_that_was_written_before_its_head_is_taken_over(path: Path) -> None:
    write(path, 3)
    head = path.with_suffix(".head").read_bytes()
    write(path, 1)
    path.with_suffix(".head").write_bytes(head)
    write(path, 1)
    verdict = verify(path)
    assert (verdict.wrong, verdict.head.n) == ("", 5)


def test_records_that_a_full_disk_refused_are_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(path, "scheduler", SMALL)
    log.write("lease_granted", {"replica": "g0"})
    assert log.flush()
    write_to, full = os.write, True

    def refuse(descriptor: int, data: bytes) -> int:
        if full and b"audited" in data:
            write_to(descriptor, data[:20])
            raise OSError(28, "No space left on device")
        return write_to(descriptor, data)

    monkeypatch.setattr(os, "write", refuse)
    for _ in range(3):
        log.write("audited", {})
    assert log.flush()
    assert log.troubles() == ["log audit-scheduler.jsonl: No space left on device"]
    full = False
    log.write("audited", {})
    assert log.flush()
    assert log.troubles() == []
    log.close()
    verdict = verify(path)
    assert (verdict.wrong, verdict.head.n, verdict.lost) == ("", 2, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"x": float("nan")},
        {"x": float("inf")},
        {"x": "\ud800"},
        {"x": 'a","hash":"' + "0" * 64 + '"}'},
        {"x": "y" * 100_000},
        {"x": Path("/x"), "y": None, "z": [1, {"a": 2**64}]},
    ],
)
def test_whatever_is_recorded_the_chain_holds(path: Path, fields: dict[str, object]) -> None:
    log = AuditLog(path, "scheduler")
    log.write("odd", fields, "\udfff")
    log.write("even", {})
    log.close()
    verdict = verify(path)
    assert (verdict.wrong, verdict.records) == ("", 2)


def test_fields_are_as_they_were_when_they_were_written(path: Path) -> None:
    log, fields = AuditLog(path, "scheduler"), {"replica": "g0"}
    log.write("x", fields)
    fields["replica"] = "g1"
    log.close()
    assert lines(path)[0]["fields"] == {"replica": "g0"}


def test_two_writers_of_one_name_have_a_chain_each(path: Path) -> None:
    first, second = AuditLog(path, "scheduler"), AuditLog(path, "scheduler")
    assert second.path.name == "audit-scheduler-2.jsonl"
    for log in (first, second, first):
        log.write("x", {})
        log.flush()
    for log in (first, second):
        log.close()
    assert [verify(log.path).records for log in (first, second)] == [2, 1]
    third = AuditLog(path, "scheduler")
    third.close()
    assert third.path == path


def test_a_line_that_is_none_is_refused() -> None:
    for line in (b"", b"{}", b"[" * 9_999, b'{"hash":"' + b"0" * 64 + b'"}', b"\xff" * 200_000):
        with pytest.raises(ValueError, match=r"no record|edited"):
            opened(line)


def test_the_command_line_verifies_and_shows(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, 5)
    assert main(["audit", "verify", str(path)]) == 0
    said = capsys.readouterr().out
    assert "records 1 to 5 are whole; head 5:" in said
    head = said.split("head ")[1].strip()
    assert main(["audit", "verify", str(path), "--head", head]) == 0
    assert main(["audit", "tail", str(path), "-n", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()[-2:]
    assert "4 scheduler lease_granted by node n0" in shown[0]
    assert main(["audit", "verify", str(path), "--head", "5:" + "0" * 64]) == 1
    edit(path, 1, lambda line: line.replace(b"g1", b"g9"))
    assert main(["audit", "verify", str(path)]) == 1
    assert "NOT WHOLE after 1 good records" in capsys.readouterr().out
    assert main(["audit", "verify", str(path.with_name("none"))]) == 2
    assert main(["audit", "verify", str(path), "--head", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_record_with_an_impossible_time_is_one_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"n": 1, "t": 1e300, "source": "s", "event": "e", "fields": {}}
    path.write_bytes(sealed(record, START)[0])
    assert main(["audit", "tail", str(path)]) == 0
    assert "audit-scheduler.jsonl:1: 1e+300 is no time" in capsys.readouterr().out
