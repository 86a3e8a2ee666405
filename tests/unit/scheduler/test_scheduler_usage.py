"""Lent capacity is summed by owner and job; `rose usage` reads the sums back."""

import json
import time
from pathlib import Path

import pytest
from service_cases import Bench, FakeNode, running, shows

from rose.cli.main import main
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.usage import (
    KEPT_S,
    MOST_PAIRS,
    OTHERS,
    GuestReading,
    Lent,
    UsageBook,
    UsageLog,
    owner_of,
)
from tests.fakes.memory_store import InMemoryStore


def guest(job: str, tokens: int = 0, duty: float = 0.5, replica: str = "g0") -> GuestReading:
    return GuestReading(replica, job, duty, 100, tokens)


def test_time_compute_memory_and_tokens_are_summed_between_two_looks() -> None:
    book = UsageBook()
    book.heard("n0", "chat", [guest("grpo", 10)], 0.0)
    assert book.sums(0.0) == {}
    book.heard("n0", "chat", [guest("grpo", 30)], 2.0)
    book.heard("n0", "chat", [guest("grpo", 35)], 3.0)
    assert book.sums(3.0) == {("chat", "grpo"): Lent(3.0, 1.5, 300.0, 25)}


def test_time_of_nobody_and_of_two_jobs_is_not_counted() -> None:
    book = UsageBook()
    book.heard("n0", "chat", [guest("")], 0.0)
    book.heard("n0", "chat", [guest("a")], 1.0)
    book.heard("n0", "chat", [guest("b")], 2.0)
    book.heard("n0", "chat", [guest("b")], 60.0)
    assert not any(lent.seconds for lent in book.sums(60.0).values()), "silence lends nothing"
    book.heard("n0", "chat", [guest("b")], 61.0)
    book.forget("n0")
    book.heard("n0", "chat", [guest("b")], 62.0)
    assert book.sums(62.0)["chat", "b"].seconds == 1.0


def test_an_engine_that_was_started_again_counts_from_0() -> None:
    book = UsageBook()
    for at_s, tokens in enumerate((100, 150, 7)):
        book.heard("n0", "", [guest("a", tokens)], float(at_s))
    assert book.sums(2.0)["", "a"].tokens == 57


def test_pairs_are_bounded_and_old_ones_are_forgotten() -> None:
    book = UsageBook()
    for number in range(MOST_PAIRS + 5):
        for at_s in (0.0, 1.0):
            book.heard(f"n{number}", f"o{number}", [guest("a")], at_s)
    sums = book.sums(1.0)
    assert len(sums) == MOST_PAIRS + 1
    assert sums[OTHERS, OTHERS].seconds == 5.0
    assert book.sums(2.0 + KEPT_S) == {}


def test_the_owner_is_a_label_or_else_the_deployment() -> None:
    assert owner_of({"rose.dev/owner": "team", "rose.dev/deployment": "chat"}) == "team"
    assert owner_of({"rose.dev/deployment": "chat"}) == "chat"
    assert owner_of({}) == ""


def test_the_log_has_what_came_on_top_each_time() -> None:
    written: list[dict[str, object]] = []
    log = UsageLog(lambda record: written.append(dict(record)))
    log.take({("chat", "a"): Lent(60.0, 30.0, 600.0, 5)}, 100.0)
    log.take({("chat", "a"): Lent(60.0, 30.0, 600.0, 5), ("chat", "b"): Lent(1.0)}, 160.0)
    log.take({("chat", "a"): Lent(90.0, 30.0, 600.0, 9)}, 220.0)
    assert [(each["t"], each["job"], each["seconds"]) for each in written] == [
        (100.0, "a", 60.0),
        (160.0, "b", 1.0),
        (220.0, "a", 30.0),
    ]
    assert written[-1]["tokens"] == 4


@pytest.fixture
def records(tmp_path: Path) -> Path:
    file = tmp_path / "usage.jsonl"
    log: list[str] = []
    book = UsageLog(lambda record: log.append(json.dumps(record) + "\n"))
    now_s = time.time()
    sums = {("chat", "a"): Lent(3_600.0, 1_800.0, float(3_600 << 30), 50)}
    book.take(sums, now_s - 7_200.0)
    sums |= {("code", "a"): Lent(7_200.0, 7_200.0, 0.0, 7)}
    book.take(sums, now_s - 60.0)
    file.with_name("usage.jsonl.1").write_text(log[0])
    file.write_text(log[1] + '{"t": 1')
    return file


def test_usage_prints_sums_of_the_time_that_was_asked_for(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--since", "1d", str(records)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["chat", "a", "1.00", "0.50", "1.00", "50"]
    assert lines[2] == ["code", "a", "2.00", "2.00", "0.00", "7"]
    assert main(["usage", "--since", "1h", "--by", "job", "-o", "json", str(records)]) == 0
    row = {"job": "a", "leased_s": 7200.0, "gpu_s": 7200.0, "byte_s": 0, "tokens": 7}
    assert json.loads(capsys.readouterr().out) == [row]
    with records.with_name("usage.jsonl.1").open("a") as file:
        file.write('{"records_dropped": 3, "t_s": 1.0}\n')
    assert main(["usage", "--since", "1s", str(records)]) == 0
    assert "lacks 3 records" in capsys.readouterr().err
    assert main(["usage", "--since", "1s", str(records)]) == 0
    assert "nothing was lent" in capsys.readouterr().out


def test_usage_refuses_what_is_no_record_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("hello\n")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\n")
    no_record = "line 1, is no record"
    for file, said in ((other, no_record), (binary, no_record), (tmp_path / "none", "is no file")):
        assert main(["usage", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_a_record_that_is_cut_within_a_character_is_left_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "usage.jsonl"
    records.write_bytes('{"t": 1, "job": "модель'.encode()[:-1])
    assert main(["usage", str(records)]) == 0
    assert "nothing was lent" in capsys.readouterr().out


async def test_a_leased_guests_telemetry_is_counted_for_its_job(tmp_path: Path) -> None:
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        await bench.stub.RegisterJob(pb.RegisterJobRequest(job="grpo", max_staleness=1))
        node = FakeNode(bench.stub)
        node.offer()
        await node.hears("lease")
        await shows(bench, lambda reply: bool(reply.leases))

        def tell(tokens: int) -> None:
            said = pb.GuestTelemetry(replica="g0", duty=1.0, kv_bytes=64, tokens_total=tokens)
            node.say(telemetry=pb.Telemetry(guests=[said]))

        tell(10)
        await shows(bench, lambda reply: any(g.tokens_total == 10 for g in reply.guests))
        tell(30)
        await shows(bench, lambda reply: any(g.tokens_total == 30 for g in reply.guests))
        usage = bench.service.figures().core.usage
        assert usage["", "grpo"].tokens == 20
        assert usage["", "grpo"].seconds > 0
        await node.leave()
