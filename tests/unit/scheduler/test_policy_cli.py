"""`rose policy` and the operator's stops, against a scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cli_cases import rose, serving
from service_cases import Bench, FakeNode, running

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy
from rose.cli.main import main
from rose.errors import UnavailableError
from rose.operate.client import PolicyClient
from rose.rpc import rose_pb2 as pb
from rose.scheduler.persistence import load
from rose.store import SqliteStore, StoreEntry
from tests.fakes.memory_store import InMemoryStore

POLICY = {"name": "serving", "mode": "Active", "slackShare": 0.5}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        yield bench


def write(folder: Path, *policies: dict[str, object]) -> str:
    path = folder / "policies.json"
    path.write_text(json.dumps(policies))
    return str(path)


async def test_a_policys_life_on_the_command_line(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, POLICY)
    assert await rose(bench, "policy", "diff", file) == 1
    assert capsys.readouterr().out == "policy serving: new\n"
    assert await rose(bench, "policy", "apply", file, "--dry-run") == 0
    assert capsys.readouterr().out == "policy serving: would change\n"
    assert await rose(bench, "policy", "apply", file) == 0
    assert await rose(bench, "policy", "apply", file) == 0
    assert capsys.readouterr().out == "policy serving: applied\npolicy serving: unchanged\n"
    assert await rose(bench, "policy", "diff", file) == 0
    changes = ["slackShare=0.2", "maxHarvest.nodes=25%", "mode=Advisory"]
    assert await rose(bench, "policy", "set", "serving", *changes) == 0
    capsys.readouterr()
    assert await rose(bench, "policy", "get", "serving", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "serving",
        "mode": "Advisory",
        "slackShare": 0.2,
        "maxHarvest": {"nodes": "25%"},
    }
    assert await rose(bench, "policy", "diff", file) == 1
    assert "policy serving: slackShare: 0.2 -> 0.5" in capsys.readouterr().out
    assert await rose(bench, "policy", "delete", "serving") == 0
    capsys.readouterr()
    assert await rose(bench, "policy", "get", "-o", "json") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["cli"]
    assert await rose(bench, "policy", "get") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["cli", "Active", "-", "all"]


async def test_a_selector_that_matches_no_node_is_said(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await serving(bench)
    labels = {"matchLabels": {"gpu": "a100"}}
    policies = [
        POLICY | {"name": "pattern", "nodeSelector": {"names": ["serving-*"]}},
        POLICY | {"name": "labels", "nodeSelector": labels},
        POLICY | {"name": "typo", "nodeSelector": {"names": ["serving-0", "servnig-1"]}},
        POLICY | {"name": "right", "nodeSelector": {"names": ["serving-0"]}},
        POLICY | {"name": "all"},
    ]
    file = write(tmp_path, *policies)
    assert await rose(bench, "policy", "apply", file, "--dry-run") == 0
    assert capsys.readouterr().err == ""
    none = "no attached node has the labels or names of its nodeSelector"
    lines = [
        f"policy pattern: {none}; 'serving-*' is compared as it stands, no pattern",
        f"policy labels: {none}",
        "policy typo: no node 'servnig-1' is attached (1 such)",
    ]
    for words in (["apply", file], ["get"]):
        assert await rose(bench, "policy", *words) == 0
        said = capsys.readouterr().err
        assert sorted(line in said for line in lines) == [True] * 3
        assert "right" not in said
        assert "all:" not in said
    assert await rose(bench, "policy", "set", "right", 'nodeSelector.names=["x"]') == 0
    assert f"policy right: {none}" in capsys.readouterr().err


async def test_a_policy_without_a_mode_says_that_it_lends_nothing(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await rose(bench, "policy", "apply", write(tmp_path, POLICY)) == 0
    assert capsys.readouterr().err == ""
    for words in (["--dry-run"], []):
        assert await rose(bench, "policy", "apply", write(tmp_path, {"name": "quiet"}), *words) == 0
        assert "policy quiet has no mode: it is Advisory, which" in capsys.readouterr().err


async def test_a_mode_for_a_replica_that_is_not_there_is_said(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    await serving(bench)
    for words in (["harvest", "off"], ["hold"]):
        assert await rose(bench, *words, "--replica", "guest-1") == 0
        assert "no replica 'guest-1' is there now (did you mean 'guest-0'?)" in (
            capsys.readouterr().err
        )


async def test_a_policy_goes_out_as_yaml_and_back_in(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blackout = {"from": "22:00", "to": "06:00", "timeZone": "Europe/Berlin"}
    file = write(tmp_path, {**POLICY, "blackoutWindows": [blackout]})
    assert await rose(bench, "policy", "apply", file) == 0
    capsys.readouterr()
    assert await rose(bench, "policy", "get", "serving", "-o", "yaml") == 0
    again = tmp_path / "serving.yaml"
    again.write_text(capsys.readouterr().out)
    assert await rose(bench, "policy", "diff", str(again)) == 0
    again.write_text("name: [")
    assert await rose(bench, "policy", "diff", str(again)) == 2
    assert "is no YAML" in capsys.readouterr().err


async def test_a_dry_run_says_what_would_change_and_changes_nothing(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await rose(bench, "policy", "apply", write(tmp_path, POLICY))
    capsys.readouterr()
    assert await rose(bench, "policy", "set", "serving", "slackShare=0.2", "--dry-run") == 0
    assert capsys.readouterr().out == "policy serving: slackShare: 0.5 -> 0.2\n"
    assert await rose(bench, "policy", "delete", "serving", "--dry-run") == 0
    assert "serving: would be deleted; it holds for 0 nodes" in capsys.readouterr().out
    [_, serving] = bench.core.capacity.gate.policies
    assert (serving.name, serving.slack_share) == ("serving", 0.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "cli", "slackShare"], "write FIELD=VALUE"),
        (["set", "cli", "slackShre=1"], "did you mean slackShare?"),
        (["set", "cli", "mode.deep=1"], "set it whole"),
        (["set", "other", "mode=Off"], "in force: cli"),
        (["delete", "other"], "in force: cli"),
        (["get", "other"], "in force: cli"),
        (["explain", "nowhere"], "rose status"),
        (["apply", "/nowhere.json"], "check the path"),
    ],
)
async def test_a_mistake_is_one_line_and_changes_nothing(
    bench: Bench, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await rose(bench, "policy", *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


async def test_a_file_with_one_bad_policy_puts_none_in_force(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, POLICY, {"name": "bad", "slackShare": 9})
    assert await rose(bench, "policy", "apply", file) == 2
    assert "slackShare" in capsys.readouterr().err
    assert [each.name for each in bench.core.capacity.gate.policies] == ["cli"]


async def test_an_apply_that_is_cut_off_says_what_is_not_known_to_be_in_force(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    apply = PolicyClient.apply

    def cut_off(client: PolicyClient, policy: CapacityPolicy, *, dry_run: bool = False) -> bool:
        if policy.name == "second" and not dry_run:
            raise UnavailableError("no scheduler answers")
        return apply(client, policy, dry_run=dry_run)

    monkeypatch.setattr(PolicyClient, "apply", cut_off)
    names = ("first", "second", "third")
    file = write(tmp_path, *({**POLICY, "name": name} for name in names))
    assert await rose(bench, "policy", "apply", file) == 4
    out, err = capsys.readouterr()
    assert out == "policy first: applied\n"
    assert "not known to be in force: second, third: apply the file again" in err


async def test_explain_says_what_holds_and_whose_each_field_is(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(bench.stub)
    await node.hears("harvest")
    await rose(bench, "policy", "apply", write(tmp_path, {"name": "careful", "cooldown": "1m"}))
    capsys.readouterr()
    assert await rose(bench, "policy", "explain", "n0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "n0: would harvest what its node has not said yet; held back by mode Advisory (careful)",
        "  lends nothing; an Active policy would: lends",
    ]
    assert "  cooldown: 60 (careful)" in lines
    await node.leave()


async def test_stops_and_resume_change_no_policy(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = bench.core.capacity.stop
    for word, mode in (
        ("hold", HarvestMode.HOLD),
        ("drain", HarvestMode.HOLD_AND_DRAIN),
        ("resume", HarvestMode.ACTIVE),
    ):
        assert await rose(bench, word) == 0
        assert stop.mode is mode
        assert f"{word} of all replicas" in capsys.readouterr().out
    assert await rose(bench, "hold", "--replica", "g0") == 0
    assert stop.overrides == {"g0": HarvestMode.HOLD}


async def test_stop_all_returns_when_every_guest_is_measured_to_be_gone(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(bench.stub)
    node.offer()
    there = {"replica": "g0", "state": "healthy", "duty": 0.4}
    node.say(telemetry=pb.Telemetry(guests=[pb.GuestTelemetry(**there, held_bytes=1 << 20)]))
    await node.hears("harvest")
    stopping = asyncio.create_task(rose(bench, "stop-all", "--within", "20"))
    while (await node.hears("harvest")).harvest.mode != pb.HARVEST_MODE_OFF:
        continue
    gone = pb.GuestTelemetry(replica="g0", state="stopped", held_bytes=0)
    node.say(telemetry=pb.Telemetry(guests=[gone]))
    assert await stopping == 0
    assert "stopped 1/1 guests" in capsys.readouterr().out
    await node.leave()


async def test_stop_all_says_what_is_left_at_the_deadline(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(bench.stub)
    left = pb.GuestTelemetry(replica="g0", state="healthy", duty=0.4, held_bytes=3 << 20)
    node.say(telemetry=pb.Telemetry(guests=[left]))
    async with asyncio.timeout(20):
        while not (await bench.stub.Snapshot(pb.SnapshotRequest())).guests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await rose(bench, "stop-all", "--within", "0.1") == 1
    said = capsys.readouterr().out
    assert "g0: healthy, holds 3.0 MiB, duty 40%" in said
    assert "stopped 0/1 guests" in said
    await node.leave()


async def test_stop_all_names_known_nodes_that_are_not_attached(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(bench.stub)
    node.offer()
    await node.hears("harvest")
    await node.leave()
    async with asyncio.timeout(20):
        while not (await bench.stub.Snapshot(pb.SnapshotRequest())).away:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await rose(bench, "stop-all", "--within", "0.1") == 3
    said = capsys.readouterr().out
    assert "unproved: node n0 is not attached" in said
    assert "1 known nodes are not attached" in said


async def test_a_guest_that_nobody_measured_is_not_proved_gone(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(bench.stub)
    node.offer()
    node.say(telemetry=pb.Telemetry(guests=[pb.GuestTelemetry(replica="g0", state="stopped")]))
    async with asyncio.timeout(20):
        while not (await bench.stub.Snapshot(pb.SnapshotRequest())).guests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await rose(bench, "stop-all", "--within", "0.1") == 3
    assert "unproved: g0: nobody measured what is left" in capsys.readouterr().out
    await node.leave()


def test_without_a_scheduler_the_stop_is_left_in_its_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.sqlite"
    asyncio.run(SqliteStore(path).close())
    words = ["stop-all", "--scheduler", "127.0.0.1:1", "--store", str(path)]
    assert main(words) == 3
    said = capsys.readouterr().out
    assert "the next one obeys it" in said
    assert "nothing is proved" in said
    assert load(asyncio.run(_entries(path))).mode is HarvestMode.OFF
    assert main([*words[:-1], str(tmp_path / "none")]) == 2


async def _entries(path: Path) -> tuple[StoreEntry, ...]:
    store = SqliteStore(path)
    try:
        return (await store.list("")).entries
    finally:
        await store.close()


async def test_a_running_scheduler_obeys_a_stop_that_another_wrote(tmp_path: Path) -> None:
    bench = Bench(InMemoryStore(), tmp_path)
    async with running(bench):
        watching = asyncio.create_task(bench.service.watch_stop())
        node = FakeNode(bench.stub)
        assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_ACTIVE
        bench.store.write("stop", b'{"mode": "off"}')
        assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_OFF
        bench.store.write("stop", b'{"mode": "active"}')
        assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_ACTIVE
        watching.cancel()
        await node.leave()


async def test_a_stop_that_was_compacted_away_is_obeyed_and_an_older_one_is_not(
    tmp_path: Path,
) -> None:
    bench = Bench(InMemoryStore(), tmp_path)
    async with running(bench):
        watching = asyncio.create_task(bench.service.watch_stop())
        node = FakeNode(bench.stub)
        assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_ACTIVE
        # Both at once, and their history gone: the newer one counts, and only it.
        bench.store.write("stop", b'{"mode": "hold_and_drain"}')
        newest = bench.store.write("stop", b'{"mode": "off"}')
        await bench.store.compact(newest)
        assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_OFF
        watching.cancel()
        await node.leave()
