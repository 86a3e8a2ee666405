"""Commands of `rose` against a scheduler in this process: views, policies, and the examples."""

import asyncio
import json
import re
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from service_cases import Bench, FakeNode, running, shows

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy
from rose.cli import options
from rose.cli.cluster import explain, stops, top
from rose.cli.main import every_command, main, whole_parser
from rose.command_line import output
from rose.command_line.examples import EXAMPLES, SERVES
from rose.command_line.output import View
from rose.errors import UnavailableError
from rose.operate.client import PolicyClient, SchedulerClient
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from rose.scheduler.persistence import load, save_epoch_floor
from rose.security.audit_log import AuditLog, audit_file
from rose.store import SqliteStore, StoreEntry
from tests.fakes.memory_store import InMemoryStore

HOST: dict[str, Any] = {
    "busy_share": 0.31, "kv_share": 0.83, "running": 3, "waiting": 1, "window_requests": 40,
    "window_s": 10.0, "ttft_p95_s": 0.41, "ttft_target_s": 0.5, "tpot_p95_s": 0.2,
    "tpot_target_s": 0.15, "source": "plugin",
}  # fmt: skip
AT_WORK: dict[str, Any] = {
    "state": "healthy", "mode": "run", "reason": "ok", "duty": 0.6, "tokens_total": 900,
    "kv_bytes": 2 << 30,
}  # fmt: skip


async def rose(bench: Bench, *words: str) -> int:
    return await asyncio.to_thread(main, [*words, "--scheduler", bench.address])


async def serving(bench: Bench, number: int = 0, *, obeys: bool = True) -> FakeNode:
    """A node whose host serves and whose guest works."""
    node = FakeNode(bench.stub, f"serving-{number}", obeys=obeys, release="0.3.0.dev0")
    guest = f"guest-{number}"
    node.offer(replica=guest)
    host = pb.HostTelemetry(node=node.node, **HOST)
    node.say(
        telemetry=pb.Telemetry(host=host, guests=[pb.GuestTelemetry(replica=guest, **AT_WORK)])
    )
    await node.hears("harvest")
    await shows(bench, lambda now: guest in [each.replica for each in now.guests])
    return node


def gone(node: FakeNode, number: int = 0) -> None:
    """Its guest ended, as it measured."""
    guest = pb.GuestTelemetry(replica=f"guest-{number}", state="stopped", held_bytes=0)
    node.say(telemetry=pb.Telemetry(guests=[guest]))


async def told_off(node: FakeNode) -> None:
    while (await node.hears("harvest")).harvest.mode != pb.HARVEST_MODE_OFF:
        continue


# ---- fleet ----


# ---- looking ----


async def test_every_view_shows_one_fleet(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "ONCE_S", 0.0)
    node = await serving(bench)
    for words, cells in {
        ("status",): ("harvest ACTIVE", "serving-0", "guest-0"),
        ("nodes",): ("410 / 500 ms", "200.0 / 150 ms MISSED", "31%", "83%", "3+1", "attached"),
        ("replicas",): ("guest-0", "run", "60%", "2.0 GiB", "900", "ok (its grant holds"),
        ("top",): ("serves 3+1", "███·······", "██████····", "ok (its grant holds"),
    }.items():
        assert await rose(bench, *words) == 0
        out = capsys.readouterr().out
        for cell in cells:
            assert cell in out
    assert await rose(bench, "nodes", "serving-0", "-o", "json") == 0
    [said] = json.loads(capsys.readouterr().out)
    assert (said["hosts"][0]["kv_share"], said["release"]) == (0.83, "0.3.0.dev0")
    await node.leave()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nodes", "servin-0"], "did you mean 'serving-0'?"),
        (["replicas", "--node", "x"], "there is no node 'x'; `rose nodes` lists them"),
        (["replicas", "x"], "there is no replica 'x'; `rose replicas` lists them"),
        (["top", "--node", "x"], "there is no node 'x'"),
        (["policy", "explain", "x"], "no node 'x' is attached"),
        (["revoke", "x", "--dry-run"], "x has no lease"),
        (["jobs", "end", "x", "--dry-run"], "job x is not registered"),
    ],
)
async def test_a_name_that_nothing_has_is_one_line(
    bench: Bench, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = await serving(bench)
    assert await rose(bench, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    await node.leave()


async def test_nodes_of_other_releases_and_silent_ones_are_said_first(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.scheduler.service.release", lambda: "0.9.0")
    node = await serving(bench)
    assert await rose(bench, "status") == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("harvest ACTIVE")
    assert second == (
        "1 nodes are not of the scheduler's release (0.9.0): 0.3.0.dev0: serving-0; upgrade them,"
        " or the scheduler"
    )
    await node.leave()


async def test_a_standby_alone_is_told_from_a_scheduler_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Standby(SchedulerServicer):
        leader = ""

        async def Snapshot(self, request: Any, context: Any) -> None:  # type: ignore[override]
            context.set_trailing_metadata((("rose-leader", self.leader),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this scheduler stands by")

    standby, server = Standby(), make_server()
    add_SchedulerServicer_to_server(standby, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        for leader, hint in (
            ("", "and knows of no leader"),
            ("127.0.0.1:1", "for 127.0.0.1:1.*port-forward.*svc/rose-leader"),
        ):
            standby.leader = leader
            client = SchedulerClient(f"127.0.0.1:{port}", timeout_s=0.3)
            with pytest.raises(UnavailableError, match=f"stands by.*{hint}") as caught:
                await asyncio.to_thread(client.snapshot)
            assert "\n" not in str(caught.value)
    finally:
        await server.stop(0)


# ---- stopping ----


async def test_stop_all_says_how_many_held_and_how_long_the_slowest_took(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [await serving(bench, number) for number in range(3)]
    stopping = asyncio.create_task(rose(bench, "stop-all"))
    for number, node in enumerate(nodes):
        await told_off(node)
        gone(node, number)
    assert await stopping == 0
    held, stopped = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"held 3/3 nodes, slowest \d+ ms", held)
    assert stopped.startswith("stopped 3/3 guests in")
    for node in nodes:
        await node.leave()


async def test_stop_all_names_the_nodes_that_confirm_nothing(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await serving(bench, 0)
    mute = FakeNode(bench.stub, "mute", obeys=True)
    monkeypatch.setattr(mute, "say", lambda **_: None)
    await mute.hears("harvest")
    stopping = asyncio.create_task(rose(bench, "stop-all", "--within", "0.3", "-o", "json"))
    await told_off(node)
    gone(node)
    assert await stopping == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["held"], said["nodes"], said["exit_code"]) == (1, 2, 3)
    assert [each["node"] for each in said["unheard"]] == ["mute"]
    await node.leave()
    await mute.leave()


async def test_a_stop_that_was_taken_is_said_though_its_scheduler_dies(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise UnavailableError("no scheduler answers")

    monkeypatch.setattr(stops, "_see_gone", dies)
    assert await rose(bench, "stop-all") == 3
    assert "the stop was taken, and nobody says what is left" in capsys.readouterr().err
    assert bench.core.capacity.stop.mode is HarvestMode.OFF


async def test_dry_runs_of_stops_say_what_would_end_and_change_nothing(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="grpo"))
    node = await serving(bench)
    await shows(bench, lambda now: bool(now.leases))
    for words, said in {
        ("hold",): "no new lease would be granted; 1 are kept (guest-0 of grpo)",
        ("drain",): "1 leases would be released (guest-0 of grpo)",
        ("stop-all",): "1 guests end; 1 nodes would be told",
        ("harvest", "off"): "1 leases would be released",
        ("resume",): "1 of 1 nodes would lend",
        ("revoke", "guest-0"): "lease of epoch 1 would be revoked",
        ("jobs", "end", "grpo"): "1 leases would be released",
        ("jobs", "drop", "grpo"): "would be dropped",
    }.items():
        assert await rose(bench, *words, "--dry-run") == 0
        assert said in capsys.readouterr().out
    assert bench.core.capacity.stop.mode is HarvestMode.ACTIVE
    assert len(bench.core.status(0.0).leases) == 1
    assert main(["kill", str(tmp_path), "--dry-run"]) == 0
    assert not (tmp_path / "KILL").exists()
    await node.leave()


async def test_a_stop_of_a_replica_that_is_not_there_is_kept_and_a_typo_is_said(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    node = await serving(bench)
    assert await rose(bench, "hold", "--replica", "gest-0") == 0
    assert "did you mean 'guest-0'?" in capsys.readouterr().err
    assert bench.core.capacity.stop.overrides == {"gest-0": HarvestMode.HOLD}
    await node.leave()


# ---- policies ----


POLICY = {"name": "serving", "mode": "Active", "slackShare": 0.5}


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
    assert capsys.readouterr().out == "policy serving: would change; selects 0 nodes\n"
    assert await rose(bench, "policy", "apply", file) == 0
    assert await rose(bench, "policy", "apply", file) == 0
    said = [line.partition(";")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["policy serving: applied", "policy serving: unchanged"]
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
    assert await rose(bench, "policy", "set", "--create", "serving", "mode=Off", "--dry-run") == 0
    assert 'policy serving: mode: null -> "Off"' in capsys.readouterr().out
    assert await rose(bench, "policy", "get", "-o", "json") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["cli"]
    assert await rose(bench, "policy", "get") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["cli", "Active", "-", "all"]


async def test_a_selector_that_matches_no_node_is_said(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await serving(bench)
    labels = {"matchLabels": {"gpu": "a1*"}}
    policies = [
        POLICY | {"name": "pattern", "nodeSelector": {"names": ["served-*"]}},
        POLICY | {"name": "labels", "nodeSelector": labels},
        POLICY | {"name": "typo", "nodeSelector": {"names": ["serving-0", "servnig-1"]}},
        POLICY | {"name": "right", "nodeSelector": {"names": ["serving-0"]}},
        POLICY | {"name": "all"},
    ]
    file = write(tmp_path, *policies)
    assert await rose(bench, "policy", "apply", file) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("rose: policy pattern: no attached node has the labels or names")
    assert "--allow-no-nodes" in refused
    allowed = "--allow-no-nodes"
    assert await rose(bench, "policy", "apply", file, "--dry-run", allowed) == 0
    out, err = capsys.readouterr()
    assert "policy right: would change; selects 1 node (serving-0)" in out
    assert err == ""
    none = "no attached node has the labels or names of its nodeSelector"
    lines = [
        f"policy pattern: {none}",
        f"policy labels: {none}; the label 'a1*' is compared as it stands: use matchExpressions",
        "policy typo: no node 'servnig-1' is attached (1 such)",
    ]
    for words in (["apply", file, allowed], ["get"]):
        assert await rose(bench, "policy", *words) == 0
        said = capsys.readouterr().err
        assert sorted(line in said for line in lines) == [True] * 3
        assert "right" not in said
        assert "all:" not in said
    change = ("policy", "set", "right", 'nodeSelector.names=["x"]')
    assert await rose(bench, *change) == 2
    assert await rose(bench, *change, allowed) == 0
    assert f"policy right: {none}" in capsys.readouterr().err


async def test_where_no_node_is_attached_no_selector_is_blamed(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    selecting = POLICY | {"name": "pool", "nodeSelector": {"names": ["serving-*"]}}
    assert await rose(bench, "policy", "apply", write(tmp_path, POLICY, selecting)) == 0
    out, err = capsys.readouterr()
    assert out.count("applied; selects 0 nodes") == 2
    assert err == "rose: policy pool: no node is attached\n"


async def test_a_policy_without_a_mode_says_that_it_lends_nothing(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await rose(bench, "policy", "apply", write(tmp_path, POLICY)) == 0
    assert capsys.readouterr().err == ""
    for words in (["--dry-run"], []):
        assert await rose(bench, "policy", "apply", write(tmp_path, {"name": "quiet"}), *words) == 0
        assert "policy quiet has no mode: it only bounds what" in capsys.readouterr().err


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
    change, effect = capsys.readouterr().out.splitlines()
    assert change == "policy serving: slackShare: 0.5 -> 0.2"
    assert effect == "policy serving: selects 0 nodes"
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
        (["set", "other", "mode=Off"], "in force: cli; `rose policy set --create` makes one"),
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

    def cut_off(client: PolicyClient, policy: CapacityPolicy) -> bool:
        if policy.name == "second":
            raise UnavailableError("no scheduler answers")
        return apply(client, policy)

    monkeypatch.setattr(PolicyClient, "apply", cut_off)
    names = ("first", "second", "third")
    file = write(tmp_path, *({**POLICY, "name": name} for name in names))
    assert await rose(bench, "policy", "apply", file) == 4
    out, err = capsys.readouterr()
    assert out == "policy first: applied; selects 0 nodes\n"
    assert "not known to be in force: second, third: apply the file again" in err


async def test_explain_says_what_holds_and_whose_each_field_is(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(bench.stub)
    await node.hears("harvest")
    await rose(
        bench,
        "policy",
        "apply",
        write(tmp_path, {"name": "careful", "mode": "Advisory", "cooldown": "1m"}),
    )
    capsys.readouterr()
    assert await rose(bench, "policy", "explain", "n0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "n0: would harvest what its node has not said yet; held back by mode Advisory (careful)",
        "  lends nothing: no host of it was heard; `rose doctor --config FILE` there says why",
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


# ---- examples ----


CHAT = {"name": "chat", "mode": "Active"}
# Other ends than 0: what a diff finds, the end of a watch, what is unproved of a guest.
ENDS = {"rose policy diff policy.json": 1, "rose status --watch 5": 130}
# Examples of `doctor` and `completion` look at the machine, or make every parser there is; those of
# `sim` take minutes.
ELSEWHERE = {"advise", "doctor", "completion", "init", "sim"}


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
async def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A scheduler at the default address, with what the examples name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "serving-0").mkdir(parents=True)
    (tmp_path / "run" / "s1").mkdir()
    (tmp_path / "policy.json").write_text(json.dumps({**CHAT, "cooldown": "1m"}))
    log = AuditLog(audit_file(tmp_path / "run" / "s1", "scheduler"), "scheduler")
    log.write("started", {})
    log.close()
    lent = {"seconds": 1.0, "compute_s": 1.0, "byte_s": 1.0, "tokens": 9}
    record = {"t": time.time(), "owner": "chat", "job": "grpo", **lent}
    (tmp_path / "run" / "s1" / "usage.jsonl").write_text(json.dumps(record) + "\n")
    store = SqliteStore(tmp_path / "run" / "rose.sqlite")
    floor = save_epoch_floor(7)
    await store.txn((), (floor,))
    await store.close()
    async with running(Bench(InMemoryStore(), tmp_path)) as prepared:
        monkeypatch.setattr(options, "DEFAULT_SCHEDULER", prepared.address)
        yield prepared


def interrupted(_: float) -> None:
    raise KeyboardInterrupt


async def test_examples_run_to_their_end(
    prepared: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "ONCE_S", 0.0)
    monkeypatch.setattr(output.show, "__defaults__", (interrupted,))
    monkeypatch.setattr(explain, "explain", lambda *_: View([], ("12.0 s ago q1 -> guest-0",)))
    await prepared.stub.ApplyPolicy(pb.ApplyPolicyRequest(policy=json.dumps(CHAT)))
    await prepared.stub.RegisterJob(pb.RegisterJobRequest(job="grpo"))
    node = await serving(prepared)
    await shows(prepared, lambda now: bool(now.leases))
    for path, examples in _in_order():
        for line in examples:
            words = shlex.split(line.partition(" > ")[0])[1:]
            here = {"127.0.0.1:7400": prepared.address, "/run/rose/node": "run/serving-0"}
            words = [here.get(word, word) for word in words]
            if line == "rose revoke guest-0 --reason stuck":
                await shows(prepared, lambda now: bool(now.leases))
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
    serves = ("certs sign-nodes", "plugin webhook")
    found = [path for path in EXAMPLES if path.split()[0] not in SERVES | ELSEWHERE]
    middle = [path for path in found if path not in (*first, *last, *twice, *serves)]
    return [(path, EXAMPLES[path]) for path in (*first, *middle, *last)]


async def test_a_verb_finds_its_scheduler_by_itself(prepared: Bench) -> None:
    assert await rose(prepared, "status") == 0
