"""Policies that operators ask for, from a file to a verdict, and their mistakes."""

import asyncio
from datetime import datetime
from pathlib import Path

import pytest
from service_cases import Bench

from elastic_scheduler import HarvestMode, HarvestModes, Offer, ReplicaKind
from elastic_scheduler.capacity import CLI, CapacityGate, NodeFacts
from rose.cli.main import main

# Berlin's clocks are an hour ahead of UTC on these days, and two from March 29 on.
FRIDAY_NOON, FRIDAY_NIGHT = "2026-12-18T11:00Z", "2026-12-18T22:30Z"
FLEET = (
    NodeFacts("chat-0", {"pool": "chat", "model": "qwen"}),
    NodeFacts("chat-1", {"pool": "chat", "model": "llama"}),
    NodeFacts("code-0", {"pool": "code", "model": "qwen"}),
)
ALL = "chat-0 chat-1 code-0"
LENDS = "- { name: base, mode: Active }\n"


async def applied(bench: Bench, folder: Path, text: str) -> int:
    """Run `rose policy apply` with a file of this text; return its exit code."""
    file = folder / "policy.yaml"
    file.write_text(text)
    words = ["policy", "apply", str(file), "--allow-no-nodes", "--scheduler", bench.address]
    return await asyncio.to_thread(main, words)


def gate_of(bench: Bench) -> CapacityGate:
    """Return a gate of the policies in force, but for the one that lends without bounds."""
    policies, _ = bench.service.policies_in_force()
    named = [each for each in policies.values() if each.name != CLI]
    return CapacityGate(HarvestModes(HarvestMode.ACTIVE), named)


def judge(
    core: CapacityGate, moment: str = FRIDAY_NOON, nodes: tuple[NodeFacts, ...] = FLEET
) -> None:
    core.changed()
    core.judge(lambda: nodes, 0.0, datetime.fromisoformat(moment).timestamp())


WINDOW = "timeZone: Europe/Berlin } ] }\n"
NIGHTS = "- { name: nights, mode: Active, allowedWindows: [ { from: 22:00, to: 06:00, " + WINDOW
PAUSE = LENDS + "- { name: incident, stopPolicy: HoldAndDrain, until: 2026-12-18T12:00Z }\n"
FREEZE = LENDS + (
    "- { name: release, stopPolicy: HoldAndDrain,"
    " from: 2026-12-18T22:00Z, until: 2026-12-27T08:00:00+01:00 }\n"
)
POOL = "- { name: p, mode: Active, nodeSelector: { matchLabels: { pool: chat } } }\n"
NOT_IN = """
- name: p
  mode: Active
  nodeSelector: { matchExpressions: [ { key: model, operator: NotIn, values: [ qwen ] } ] }
"""
CANARY = "- { name: p, mode: Active, canary: { percent: 5% } }\n"
MANIFEST = """
apiVersion: v1
kind: List
items:
- apiVersion: rose.dev/v1alpha1
  kind: RoseCapacityPolicy
  metadata: { name: chat, labels: { argocd.argoproj.io/instance: rose } }
  spec: { mode: Active, nodeSelector: { names: [ "chat-*" ] } }
"""


@pytest.mark.parametrize(
    ("text", "moment", "lending"),
    [
        pytest.param(NIGHTS, FRIDAY_NOON, "", id="nights: not by day"),
        pytest.param(NIGHTS, FRIDAY_NIGHT, ALL, id="nights: at night"),
        pytest.param(NIGHTS, "2026-03-28T20:30Z", "", id="nights: 21:30 in winter"),
        pytest.param(NIGHTS, "2026-03-29T20:30Z", ALL, id="nights: 22:30 in summer"),
        pytest.param(POOL, FRIDAY_NOON, "chat-0 chat-1", id="a pool by its label"),
        pytest.param(
            '- { name: p, mode: Active, nodeSelector: { names: [ "chat-*" ] } }\n',
            FRIDAY_NOON, "chat-0 chat-1", id="a pool by names",
        ),
        pytest.param(PAUSE, "2026-12-18T11:59Z", "", id="incident: a pause"),
        pytest.param(PAUSE, "2026-12-18T12:00Z", ALL, id="incident: that ends by itself"),
        pytest.param(FREEZE, FRIDAY_NOON, ALL, id="a freeze: before"),
        pytest.param(FREEZE, FRIDAY_NIGHT, "", id="a freeze: begun"),
        pytest.param(FREEZE, "2026-12-27T07:00Z", ALL, id="a freeze: over"),
        pytest.param(NOT_IN, FRIDAY_NOON, "chat-1", id="all models but one"),
        pytest.param(MANIFEST, FRIDAY_NOON, "chat-0 chat-1", id="a manifest of Argo or Flux"),
    ],
)  # fmt: skip
async def test_nodes_lend_as_the_file_says(
    bench: Bench, tmp_path: Path, text: str, moment: str, lending: str
) -> None:
    assert await applied(bench, tmp_path, text) == 0
    core = gate_of(bench)
    judge(core, moment)
    found = [each.node for each in core.verdicts() if each.mode is HarvestMode.ACTIVE]
    assert " ".join(sorted(found)) == lending


DAY = "- { name: day, maxHarvest: { compute: 20% }, during: [ { from: 07:00, to: 22:00, " + WINDOW


@pytest.mark.parametrize(
    ("moment", "compute"), [(FRIDAY_NOON, 0.2), (FRIDAY_NIGHT, 0.8)], ids=["day", "night"]
)
async def test_a_fifth_of_compute_by_day_and_four_fifths_at_night(
    bench: Bench, tmp_path: Path, moment: str, compute: float
) -> None:
    whole = (
        "- { name: p, mode: Active, maxHarvest: { compute: 80% }, reserve: { kvHeadroom: 30% } }\n"
    )
    assert await applied(bench, tmp_path, whole + DAY) == 0
    core = gate_of(bench)
    judge(core, moment)
    policy = core.verdict("chat-0").policy
    assert (policy.compute, policy.kv_headroom) == (compute, 0.3)


async def test_a_pause_without_a_mode_keeps_guests_and_off_ends_them(
    bench: Bench, tmp_path: Path
) -> None:
    for stop, mode in (
        ("stopPolicy: Hold", HarvestMode.HOLD),
        ("stopPolicy: HoldAndDrain", HarvestMode.HOLD_AND_DRAIN),
        ("mode: Off", HarvestMode.OFF),
    ):
        text = LENDS + "- { name: incident, until: 2027-01-01T00:00Z, " + stop + " }\n"
        assert await applied(bench, tmp_path, text) == 0
        core = gate_of(bench)
        judge(core)
        assert core.verdict("chat-0").mode is mode


async def test_five_percent_of_a_fleet_are_its_canary(bench: Bench, tmp_path: Path) -> None:
    assert await applied(bench, tmp_path, CANARY) == 0
    core = gate_of(bench)
    judge(core, nodes=tuple(NodeFacts(f"n{number}") for number in range(1_000)))
    lend = sum(each.mode is HarvestMode.ACTIVE for each in core.verdicts())
    assert 35 <= lend <= 65


def guest(node: str) -> Offer:
    kind = ReplicaKind.GUEST
    return Offer(f"g-{node}", kind, "http://h:1", node, 4096, 1e3, 1e4, 0, True, 2.0, 0, 8)


async def test_most_guests_and_a_jobs_priority(bench: Bench, tmp_path: Path) -> None:
    most, jobs = "maxHarvest: { guests: 2 }", "tenants: [ { job: a, priority: 4 } ]"
    text = f"{{ name: p, mode: Active, {most}, {jobs} }}"
    assert await applied(bench, tmp_path, text) == 0
    core = gate_of(bench)
    judge(core)
    assert (core.weight_of("a"), core.weight_of("b")) == (4.0, 1.0)
    assert core.admits("a", guest("chat-1"), [("b", "chat-0")])
    assert not core.admits("a", guest("code-0"), [("b", "chat-0"), ("a", "chat-1")])


async def test_the_list_of_policies_says_which_nodes_each_is_for(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await applied(bench, tmp_path, NOT_IN.replace("name: p", "name: but-qwen") + POOL) == 0
    words = ["policy", "get", "--scheduler", bench.address]
    assert await asyncio.to_thread(main, words) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " model NotIn qwen " in rows["but-qwen"]
    assert " pool=chat " in rows["p"]


MODES = "'Off', 'Advisory' or 'Active'"
OBJECT = "apiVersion: rose.dev/v1alpha1\nkind: RoseCapacityPolicy\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{ name: p, canary: 5% }", "canary: '5%' should be an object with percent"),
        ("{ name: p, mode: active }", f"mode: 'active' should be {MODES}"),
        (
            "{ name: p, maxGuests: 8 }",
            "maxGuests: there is no such field; maxHarvest.guests bounds all jobs,"
            " tenants[].maxGuests one",
        ),
        (
            "name: p\ntenants:\n- { job: '*', priority: 2 }",
            "tenants[0].job: '*' is no job, and no pattern either; name each job, or"
            " write maxHarvest.guests for all of them",
        ),
        (
            "{ name: p, excludeModels: [ qwen ] }",
            "excludeModels: there is no such field; label nodes by model, and write"
            " nodeSelector.matchExpressions with NotIn",
        ),
        (
            "{ name: p, nodeSelector: { pool: chat } }",
            "nodeSelector.pool: there is no such field; write matchLabels,"
            " matchExpressions, names",
        ),
        (
            "{ name: p, nodeSelector: { names: chat-* } }",
            "nodeSelector.names: 'chat-*' should be a list, as [a, b]",
        ),
        (
            "{ name: p, maxHarvest: { compute: 20 } }",
            "maxHarvest.compute: 20 should be less than or equal to 1; write a share, as"
            " 0.2 or 20%",
        ),
        (
            "name: p\nmaxHarvest:\n  memory: 8GB",
            "maxHarvest.memory: '8GB' is no number of bytes; write one as 8Gi, 512Mi or"
            " 1073741824",
        ),
        (
            "{ name: p, mode: Active, maxHarvest: { nodes: 0 } }",
            "maxHarvest.nodes 0 lends nothing, though mode is Active; raise it, or write"
            " mode Off",
        ),
        (
            "{ name: p, allowedWindow: [] }",
            "allowedWindow: there is no such field; did you mean allowedWindows?",
        ),
        (
            "{ name: p, allowedWindows: [ { from: 22:00, to: 06:00, timeZone: CEST } ] }",
            "allowedWindows[0].timeZone: time zone 'CEST' is unknown here; write an IANA"
            " name as Europe/Berlin, or install the system's tzdata",
        ),
        ("{ name: p, ttl: 2h }", "ttl: there is no such field; write until"),
        (
            "{ name: p, until: tomorrow }",
            "until: 'tomorrow' should be a moment, as 2026-12-27T08:00:00Z",
        ),
        (
            OBJECT + "metadata: { name: p }\nspec: { name: q }",
            "spec.name: the name is metadata.name; leave this one out",
        ),
        (
            (OBJECT + "spec: { mode: Off }").replace("\n", ", ").join("{}"),
            "a RoseCapacityPolicy needs metadata.name and a spec; write both",
        ),
        ("kind: ConfigMap", "kind: 'ConfigMap' is no RoseCapacityPolicy; leave it out"),
        ("[ { name: p }, { name: p } ]", "policy p is there twice; write it once"),
        ("{ name: p, cooldown: 25h }", "cooldown: 90000 s; write 0s to 24h, or a blackout"
         " window, or mode Off"),
        ("{ name: p, reserve: { kvHeadroom: 120% } }",
         "reserve.kvHeadroom: '120%' is more than all; write 100% or less"),
        ("just text", "'just text' should be an object with a name; see"
         " docs/capacity-policy.md"),
        (
            "{ name: p, sloBudget: { bad: 1 } }",
            "sloBudget.bad: there is no such field; write objective, minBad,"
            " releaseAfter",
        ),
    ],
)  # fmt: skip
async def test_a_mistake_is_one_line_that_says_what_to_write(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    assert await applied(bench, tmp_path, text) == 2
    number = text.count("\n") + 1
    assert capsys.readouterr().err == f"rose: {tmp_path / 'policy.yaml'}:{number}: {line}\n"
    policies, _ = bench.service.policies_in_force()
    assert list(policies) == [CLI]


@pytest.mark.parametrize("text", ["", "# nothing", "[]", "kind: List"])
async def test_a_file_without_a_policy_is_refused(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert await applied(bench, tmp_path, text) == 2
    assert capsys.readouterr().err.endswith("policy.yaml has no policy; write one, or a list\n")
