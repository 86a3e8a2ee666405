"""The examples in every command's help do what they say."""

import asyncio
import json
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cli_cases import gone, rose, serving, told_off
from service_cases import Bench, running, shows

from rose.cli import options
from rose.cli.cluster import explain, top
from rose.cli.main import every_command, main, whole_parser
from rose.command_line import output
from rose.command_line.examples import EXAMPLES, SERVES
from rose.command_line.output import View
from rose.rpc import rose_pb2 as pb
from rose.scheduler.persistence import save_epoch_floor
from rose.security.audit_log import AuditLog, audit_file
from rose.store import SqliteStore
from rose.store.protocol import Put
from tests.fakes.memory_store import InMemoryStore

POLICY = {"name": "chat", "mode": "Active"}
# Other ends than 0: what a diff finds, the end of a watch, what is unproved of a guest.
ENDS = {"rose policy diff policy.json": 1, "rose status --watch 5": 130}
# Examples of `doctor` and `completion` look at the machine, or make every parser there is; those of
# `sim` take minutes.
ELSEWHERE = {"doctor", "completion", "sim"}


def test_every_command_has_an_example_of_itself() -> None:
    assert {path for path, _ in every_command(whole_parser())} == EXAMPLES.keys()
    for path, examples in EXAMPLES.items():
        assert examples
        for each in examples:
            assert each.startswith(f"rose {path}"), each


def test_help_ends_with_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("stop-all", "policy explain", "certs issue"):
        with pytest.raises(SystemExit):
            main([*path.split(), "--help"])
        text = capsys.readouterr().out
        assert all(f"  {each}\n" in text for each in EXAMPLES[path])


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A scheduler at the default address, with what the examples name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "serving-0").mkdir(parents=True)
    (tmp_path / "run" / "s1").mkdir()
    (tmp_path / "policy.json").write_text(json.dumps({**POLICY, "cooldown": "1m"}))
    log = AuditLog(audit_file(tmp_path / "run" / "s1", "scheduler"), "scheduler")
    log.write("started", {})
    log.close()
    lent = {"seconds": 1.0, "compute_s": 1.0, "byte_s": 1.0, "tokens": 9}
    record = {"t": time.time(), "owner": "chat", "job": "grpo", **lent}
    (tmp_path / "run" / "s1" / "usage.jsonl").write_text(json.dumps(record) + "\n")
    store = SqliteStore(tmp_path / "run" / "rose.sqlite")
    floor = save_epoch_floor(7)
    assert floor.value is not None
    await store.txn((), (Put(floor.key, floor.value),))
    await store.close()
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        monkeypatch.setattr(options, "DEFAULT_SCHEDULER", bench.address)
        yield bench


def interrupted(_: float) -> None:
    raise KeyboardInterrupt


async def test_examples_run_to_their_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "ONCE_S", 0.0)
    monkeypatch.setattr(output.show, "__defaults__", (interrupted,))
    monkeypatch.setattr(explain, "explain", lambda *_: View([], ("12.0 s ago q1 -> guest-0",)))
    await bench.stub.ApplyPolicy(pb.ApplyPolicyRequest(policy=json.dumps(POLICY)))
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="grpo"))
    node = await serving(bench)
    await shows(bench, lambda now: bool(now.leases))
    for path, examples in _in_order():
        for line in examples:
            words = shlex.split(line.partition(" > ")[0])[1:]
            here = {"127.0.0.1:7400": bench.address, "/run/rose/node": "run/serving-0"}
            words = [here.get(word, word) for word in words]
            if line == "rose revoke guest-0 --reason stuck":
                await shows(bench, lambda now: bool(now.leases))
            run = asyncio.create_task(asyncio.to_thread(main, words))
            if line == "rose stop-all":
                await told_off(node)
                gone(node)
            code = await run
            said = capsys.readouterr()
            assert code == ENDS.get(line, 0), f"`{line}` ({path}): {said.err}"
            assert said.out or "--out" in line
    await node.leave()


def _in_order() -> list[tuple[str, tuple[str, ...]]]:
    """Keys before tokens, certificates before they are shown; what ends things at last."""
    first = ("certs init", "certs issue", "token key", "revoke", "policy diff")
    last = ("policy delete", "hold", "drain", "stop-all", "resume", "kill", "unkill")
    twice = ("certs", "token")
    found = [path for path in EXAMPLES if path.split()[0] not in SERVES | ELSEWHERE]
    middle = [path for path in found if path not in (*first, *last, *twice)]
    return [(path, EXAMPLES[path]) for path in (*first, *middle, *last)]


async def test_a_verb_finds_its_scheduler_by_itself(bench: Bench) -> None:
    assert await rose(bench, "status") == 0
