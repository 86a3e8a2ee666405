"""Valid capacity policies, and the one line for an invalid one."""

import json
import math
from datetime import datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler.capacity import (
    CapacityPolicy,
    EffectivePolicy,
    PolicyMode,
    crd_schema,
    docs_table,
    effective,
    in_canary,
    parse_policy,
    policies_of,
    policy_of,
)
from elastic_scheduler.capacity.effective import NO_MODE, NO_POLICY
from elastic_scheduler.capacity.policy import DailyWindow, MaxHostBusy, most_of
from elastic_scheduler.errors import PolicyError

FULL = {
    "name": "serving",
    "nodeSelector": {"matchLabels": {"pool": "chat"}, "names": ["a", "b"]},
    "mode": "Active",
    "stopPolicy": "Hold",
    "maxHarvest": {"compute": 0.5, "memory": "8Gi", "nodes": "25%", "deploymentShare": 0.5},
    "reserve": {"kvHeadroom": 0.2},
    "slackShare": 0.3,
    "watermarks": {"high": 0.8, "low": 0.7},
    "cooldown": "30s",
    "blackoutWindows": [
        {"days": ["Mon", "Fri"], "from": "08:00", "to": "20:00", "timeZone": "Europe/Berlin"}
    ],
    "tenants": [{"job": "grpo", "priority": 2.0, "maxGuests": 4}],
    "canary": {"percent": 10.0},
    "staleAfter": "3s",
    "reclaimDeadline": "8s",
    "maxHostBusy": {"share": 0.8, "resume": 0.6, "over": "20s"},
    "sloBudget": {"objective": 0.999, "minBad": 5, "releaseAfter": "10m"},
}


def test_a_policy_says_the_same_after_it_was_written() -> None:
    policy = policy_of(FULL)
    assert parse_policy(policy.to_json()) == policy
    assert json.loads(policy.to_json()) == FULL


def test_a_policy_without_a_mode_only_bounds_what_others_allow() -> None:
    quiet = policy_of({"name": "quiet", "maxHarvest": {"compute": "20%"}})
    alone = effective([quiet], "n", {})
    assert (alone.mode, alone.decided_by["mode"]) == ("Advisory", "no policy has a mode")
    both = effective([quiet, policy_of({"name": "a", "mode": "Active"})], "n", {})
    assert (both.mode, both.decided_by["mode"], both.compute) == ("Active", "a", 0.2)
    assert policy_of({"name": "yaml", "mode": False}).mode == "Off"


HOURS = {"from": "22:00", "to": "06:00", "timeZone": "UTC"}


@pytest.mark.parametrize(
    ("said", "moment", "counts"),
    [
        ({}, "2026-12-24T12:00:00", True),
        ({"during": [HOURS]}, "2026-12-24T12:00:00", False),
        ({"during": [HOURS]}, "2026-12-24T23:00:00", True),
        ({"until": "2026-12-24T13:00:00+01:00"}, "2026-12-24T11:59:59", True),
        ({"until": "2026-12-24T13:00:00+01:00"}, "2026-12-24T12:00:00", False),
        ({"from": "2026-12-24T12:00:00Z"}, "2026-12-24T11:59:59", False),
        ({"from": "2026-12-24T12:00:00Z", "during": [HOURS]}, "2026-12-24T22:00:00", True),
    ],
)
def test_a_policy_counts_at_its_times_alone(
    said: dict[str, object], moment: str, counts: bool
) -> None:
    policy = policy_of({"name": "p", **said})
    assert policy.counts_at(datetime.fromisoformat(f"{moment}+00:00").timestamp()) is counts
    assert parse_policy(policy.to_json()) == policy


@pytest.mark.parametrize(
    ("selector", "nodes"),
    [
        ({"names": ["serving-*", "x"]}, {"serving-0", "serving-1"}),
        ({"names": ["serving-?"], "matchLabels": {"pool": "chat"}}, {"serving-0"}),
        ({"matchExpressions": [{"key": "pool", "operator": "Exists"}]}, {"serving-0", "other"}),
        ({"matchExpressions": [{"key": "pool", "operator": "DoesNotExist"}]}, {"serving-1"}),
        (
            {"matchExpressions": [{"key": "pool", "operator": "NotIn", "values": ["code"]}]},
            {"serving-0", "serving-1"},
        ),
        (
            {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["code", "x"]}]},
            {"other"},
        ),
    ],
)
def test_a_selector_takes_patterns_and_requirements(
    selector: dict[str, object], nodes: set[str]
) -> None:
    chosen = policy_of({"name": "p", "nodeSelector": selector}).node_selector
    fleet = {"serving-0": {"pool": "chat"}, "serving-1": {}, "other": {"pool": "code"}}
    assert {node for node, labels in fleet.items() if chosen.matches(node, labels)} == nodes


@pytest.mark.parametrize(
    ("said", "path", "hint"),
    [
        ({"maxHarvst": {}}, "maxHarvst", "did you mean maxHarvest?"),
        (
            {"maxHarvest": {"computer": 1}},
            "maxHarvest.computer",
            "mean maxHarvest.compute?",
        ),
        ({"maxHarvest": {"maxGuests": 1}}, "maxGuests", "maxHarvest.guests bounds all jobs"),
        ({"mode": None}, "mode", "leave it out"),
        ({"canary": {"percent": "101%"}}, "canary.percent", "less than or equal to 100"),
        ({"until": "2026-12-24"}, "until", "without a zone"),
        ({"from": "2026-12-24T12:00:00Z", "until": "2026-12-24T12:00:00Z"}, "until", "swap"),
        (
            {"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "nodeSelector.matchExpressions[0]",
            "needs values",
        ),
        ({"slackShare": 1.5}, "slackShare", "less than or equal to 1"),
        ({"watermarks": {"high": 0.5, "low": 0.6}}, "watermarks", "swap them"),
        ({"maxHostBusy": {"share": 0.5, "resume": 0.5}}, "maxHostBusy", "lower it"),
        ({"mode": "Active", "maxHarvest": {"nodes": 0}}, "maxHarvest.nodes", "write mode Off"),
        ({"mode": "Active", "maxHarvest": {"nodes": "0%"}}, "maxHarvest.nodes", "write mode Off"),
        ({"maxHarvest": {"nodes": "101%"}}, "maxHarvest.nodes", "a share as 25%"),
        ({"maxHarvest": {"memory": "8GB"}}, "maxHarvest.memory", "8Gi"),
        ({"staleAfter": "30s"}, "staleAfter", "2s to 5s"),
        ({"cooldown": "soon"}, "cooldown", "500ms"),
        ({"cooldown": -1}, "cooldown", "0s to 24h"),
        ({"tenants": [{"job": "a"}, {"job": "a"}]}, "tenants", "write it once"),
        ({"name": "No Name"}, "name", "lower-case"),
    ],
)
def test_what_cannot_be_is_one_line_with_its_path(
    said: dict[str, object], path: str, hint: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        policy_of({"name": "p", **said})
    line = str(caught.value)
    assert path in line
    assert hint in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ({"from": "09:00", "to": "09:00"}, "00:00 to 24:00"),
        ({"from": "24:00", "to": "06:00"}, "00:00 of the next day"),
        ({"from": "9:00", "to": "10:00"}, "07:30"),
        ({"days": [], "from": "09:00", "to": "10:00"}, "name days"),
        ({"days": ["Mon", "Mon"], "from": "09:00", "to": "10:00"}, "once"),
        ({"from": "09:00", "to": "10:00", "timeZone": "Berlin"}, "Europe/Berlin"),
        ({"from": "09:00", "to": "10:00", "timeZone": "../passwd"}, "IANA"),
    ],
)
def test_an_impossible_window_is_refused(said: dict[str, object], hint: str) -> None:
    with pytest.raises(PolicyError, match="blackoutWindows") as caught:
        policy_of({"name": "p", "blackoutWindows": [{"timeZone": "UTC", **said}]})
    assert hint in str(caught.value)


def at(text: str, zone: str = "Europe/Berlin", fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


@pytest.mark.parametrize(
    ("moment", "inside"),
    [
        ("2026-11-20T21:59", False),
        ("2026-11-20T22:00", True),  # a Friday
        ("2026-11-21T05:59", True),
        ("2026-11-21T06:00", False),
        ("2026-11-21T23:00", False),  # Saturday's night is nobody's
        ("2026-11-20T03:00", False),  # Thursday's night too
    ],
)
def test_a_window_that_crosses_midnight_belongs_to_the_day_it_begins(
    moment: str, inside: bool
) -> None:
    window = DailyWindow.model_validate(
        {"days": ["Fri"], "from": "22:00", "to": "06:00", "timeZone": "Europe/Berlin"}
    )
    assert window.holds_at(at(moment)) is inside


def test_a_window_goes_by_the_clock_on_the_wall_when_that_changes() -> None:
    window = DailyWindow.model_validate(
        {"from": "02:30", "to": "03:30", "timeZone": "Europe/Berlin"}
    )
    # Autumn: 02:30 to 03:00 comes twice, and the window with it.
    assert window.holds_at(at("2026-10-25T02:45", fold=0))
    assert window.holds_at(at("2026-10-25T02:45", fold=1))
    assert not window.holds_at(at("2026-10-25T02:15", fold=1))
    # Spring: after 01:59 comes 03:00, so it begins half way.
    before = at("2026-03-29T01:59")
    assert not window.holds_at(before)
    assert window.holds_at(before + 60)
    assert not window.holds_at(before + 60 + 30 * 60)


def test_whole_days_end_at_midnight() -> None:
    window = DailyWindow.model_validate(
        {"days": ["Sun"], "from": "00:00", "to": "24:00", "timeZone": "America/New_York"}
    )
    assert window.holds_at(at("2026-11-22T23:59", "America/New_York"))
    assert not window.holds_at(at("2026-11-23T00:00", "America/New_York"))


def test_of_several_policies_the_strictest_wins_field_by_field() -> None:
    wide = policy_of({"name": "wide", "mode": "Active", "slackShare": 0.5, "cooldown": "1s"})
    tight = policy_of(
        {
            "name": "tight",
            "mode": "Active",
            "slackShare": 0.1,
            "watermarks": {"high": 0.7, "low": 0.6},
            "stopPolicy": "Hold",
        }
    )
    advisory = policy_of(
        {"name": "careful", "mode": "Advisory", "cooldown": "1m", "canary": {"percent": 5}}
    )
    both = effective([wide, tight], "n", {})
    assert (both.mode, both.slack_share, both.cooldown_s) == ("Active", 0.1, 1.0)
    assert both.decided_by["slackShare"] == both.decided_by["stopPolicy"] == "tight"
    assert both.decided_by["cooldown"] == "wide"
    all_three = effective([wide, tight, advisory], "n", {})
    assert all_three.mode == "Advisory"
    assert all_three.decided_by["mode"] == "careful"
    assert all_three.canary_percent == 5
    assert all_three.slack_share == 0.1


def test_a_node_that_no_policy_matches_advises_by_the_defaults_and_says_so() -> None:
    chat = policy_of(
        {"name": "chat", "mode": "Active", "nodeSelector": {"matchLabels": {"pool": "chat"}}}
    )
    assert effective([chat], "n", {"pool": "chat"}).mode == "Active"
    other = effective([chat], "n", {"pool": "code"})
    assert other.mode == "Advisory"
    assert (other.policies, other.decided_by) == ((), {"mode": NO_POLICY})
    assert other.max_host_busy == MaxHostBusy()


def test_every_field_that_a_policy_bounds_is_explained_with_its_policy() -> None:
    held = effective(
        [policy_of({**FULL, "nodeSelector": {}}), policy_of({"name": "z", "mode": "Advisory"})],
        "n",
        {},
    )
    said = {path: (value, policy) for path, value, policy in held.fields()}
    assert said["mode"] == ("Advisory", "z")
    assert said["maxHarvest.nodes"] == ("25% (serving)", "serving")
    assert said["tenants"] == ("grpo: priority 2, at most 4 guests (serving)", "serving")
    assert said["blackoutWindows"] == ("Mon,Fri 08:00-20:00 Europe/Berlin (serving)", "serving")
    assert said["watermarks"] == ("high 0.8, low 0.7", "serving")
    assert said["staleAfter"] == ("3", "serving")
    assert said["maxHostBusy"][0] == "0.8 over 20 s, again below 0.6"


def test_a_larger_canary_contains_the_smaller_one() -> None:
    nodes = [f"node-{n}" for n in range(2_000)]
    shares = (1, 5, 25, 100)
    chosen = [{n for n in nodes if in_canary(n, share)} for share in shares]
    for fewer, more in pairwise(chosen):
        assert fewer < more
    for share, some in zip(shares, chosen, strict=True):
        assert abs(len(some) / len(nodes) - share / 100) < 0.02


def test_a_share_of_nodes_is_rounded_down() -> None:
    assert [most_of("25%", n) for n in (3, 4, 100)] == [0, 1, 25]
    assert most_of("29%", 100) == 29
    assert most_of(7, 3) == 3


def test_policies_of_a_file_are_read_and_the_path_leads_to_a_fault() -> None:
    both = {"kind": "List", "items": [FULL, {"name": "other"}]}
    assert [policy.name for policy in policies_of([both])] == ["serving", "other"]
    both["items"] = [FULL, {"name": "p", "mod": "Off"}]
    with pytest.raises(PolicyError, match=r"mod: .*did you mean mode") as caught:
        policies_of([both])
    assert caught.value.path == (0, "items", 1, "mod")


def test_the_schema_is_structural_as_a_crd_must_be() -> None:
    schema = crd_schema()
    text = json.dumps(schema)
    for forbidden in ('"$ref"', '"anyOf"', '"null"', '"title"', '"$defs"'):
        assert forbidden not in text
    fields = {field.alias or name for name, field in CapacityPolicy.model_fields.items()}
    assert set(schema["properties"]) == fields - {"name"}
    assert schema["properties"]["mode"]["enum"] == ["Off", "Advisory", "Active"]
    assert schema["properties"]["maxHarvest"]["properties"]["nodes"] == {
        "description": "nodes of this policy that lend at once, as 3 or 25%",
        "x-kubernetes-int-or-string": True,
        "minimum": 0,
        "maxLength": 32,
        "pattern": r"^([0-9]{1,2}(\.[0-9]+)?|100(\.0+)?)%$",
    }


def test_the_table_has_every_field() -> None:
    table = docs_table()
    for path in ("mode", "maxHarvest.deploymentShare", "blackoutWindows[].timeZone", "staleAfter"):
        assert f"`{path}`" in table


SHARE = st.none() | st.sampled_from([0.1, 0.3, 0.5, 0.9])
DURATION = st.sampled_from(["2s", "3s", "5s"])
SAID = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["Off", "Advisory", "Active"]),
        "stopPolicy": st.sampled_from(["None", "Hold", "HoldAndDrain"]),
        "maxHarvest": st.fixed_dictionaries(
            {}, optional={"compute": SHARE, "memory": st.integers(1, 99), "deploymentShare": SHARE}
        ),
        "reserve": st.fixed_dictionaries({"kvHeadroom": st.sampled_from([0.0, 0.2, 0.5])}),
        "slackShare": SHARE,
        "cooldown": DURATION,
        "staleAfter": DURATION,
        "reclaimDeadline": DURATION,
        "canary": st.fixed_dictionaries({"percent": st.sampled_from([0, 10, 100])}),
    },
)
MODES, STOPS = ["Off", "Advisory", "Active"], ["HoldAndDrain", "Hold", "None"]


def room(held: EffectivePolicy) -> list[float]:
    """Return how much each field allows: more is laxer."""
    bounds = (held.compute, held.memory_bytes, held.deployment_share, held.slack_share)
    return [
        MODES.index(held.mode),
        STOPS.index(held.stop_policy),
        *(math.inf if bound is None else bound for bound in bounds),
        -held.kv_headroom,
        -held.cooldown_s,
        held.canary_percent,
        held.stale_after_s,
        math.inf if held.reclaim_deadline_s is None else held.reclaim_deadline_s,
    ]


@pytest.mark.parametrize(
    ("strict", "lax"),
    [
        ({"mode": "Advisory"}, {"mode": "Active"}),
        ({"stopPolicy": "HoldAndDrain"}, {"stopPolicy": "Hold"}),
        ({"maxHarvest": {"compute": 0.1}}, {"maxHarvest": {"compute": 0.5}}),
        ({"maxHarvest": {"memory": 1}}, {"maxHarvest": {"memory": 2}}),
        ({"maxHarvest": {"deploymentShare": 0.1}}, {"maxHarvest": {"deploymentShare": 0.5}}),
        ({"reserve": {"kvHeadroom": 0.5}}, {"reserve": {"kvHeadroom": 0.2}}),
        ({"slackShare": 0.1}, {"slackShare": 0.5}),
        ({"cooldown": "5s"}, {"cooldown": "2s"}),
        ({"staleAfter": "2s"}, {"staleAfter": "3s"}),
        ({"reclaimDeadline": "2s"}, {"reclaimDeadline": "5s"}),
        ({"canary": {"percent": 10}}, {"canary": {"percent": 100}}),
    ],
)
def test_of_two_bounds_of_a_field_the_stricter_one_holds(
    strict: dict[str, object], lax: dict[str, object]
) -> None:
    alone = policy_of({"name": "strict", **strict})
    both = effective([alone, policy_of({"name": "lax", **lax})], "n", {})
    assert room(both) == room(effective([alone], "n", {}))


@given(st.lists(SAID, min_size=1, max_size=4))
def test_no_policy_ever_gives_more_than_another_one_allows(said: list[dict[str, object]]) -> None:
    policies = [policy_of({"name": f"p{n}", **each}) for n, each in enumerate(said)]
    together = effective(policies, "n", {})
    unset = PolicyMode.ACTIVE if any(policy.mode for policy in policies) else PolicyMode.ADVISORY
    alone = [
        room(effective([policy.model_copy(update={"mode": policy.mode or unset})], "n", {}))
        for policy in policies
    ]
    assert room(together) == [min(column) for column in zip(*alone, strict=True)]
    assert effective(policies[::-1], "n", {}) == together, "whatever their order"
    names = {policy.name for policy in policies}
    for path, whose in together.decided_by.items():
        assert set(whose.split(", ")) <= names or (path, whose) == ("mode", NO_MODE)
