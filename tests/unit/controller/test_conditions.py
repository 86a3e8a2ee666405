"""Status of an object: conditions, limits, figures, and the events of their changes."""

from collections import Counter
from typing import Any

import pytest
from jsonschema import Draft4Validator

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import crd, policy_of
from rose.controller.conditions import (
    INVALID,
    MAX_DETAIL,
    MAX_LIMITS,
    ObjectRefusal,
    differs,
    dumped,
    events_of,
    is_news,
    judged,
)
from rose.scheduler.core.observed import PolicyView

NOON_S = 1_700_000_000.0
THEN = "2023-11-14T22:13:20Z"


def obj(generation: int = 3, **status: Any) -> dict[str, Any]:
    metadata = {"name": "chat", "uid": "u", "resourceVersion": "7", "generation": generation}
    return {"metadata": metadata, "spec": {}, **({"status": status} if status else {})}


def view(mode: str = "Active", stop: HarvestMode = HarvestMode.ACTIVE, **more: Any) -> PolicyView:
    said = more.pop("policy", {})
    seen: dict[str, Any] = {"nodes": 2, "seen": 2, **more}
    return PolicyView(policy_of({"name": "chat", "mode": mode, **said}), True, stop, **seen)


def conditions(
    found: PolicyView | None, refusal: ObjectRefusal | None = None
) -> dict[str, tuple[str, str]]:
    said = judged(obj(), refusal, found, NOON_S).conditions
    return {each.type: (each.status, each.reason) for each in said}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (view(), "Active"),
        (view("Advisory"), "Advisory"),
        (view("Off"), "Off"),
        (view(nodes=0), "NoNodesSelected"),
        (view(policy={"stopPolicy": "Hold"}), "Held"),
        (view(policy={"stopPolicy": "HoldAndDrain"}), "Draining"),
        (view(stop=HarvestMode.HOLD), "Held"),
        (view(stop=HarvestMode.OFF), "Draining"),
        (view(limits={"blackout": (2, "blackout daily")}), "Blackout"),
        (view(limits={"slo_budget": (2, "SLO budget burns")}), "BudgetSpent"),
        (view(limits={"slo_budget": (1, "SLO budget burns")}), "Active"),
        (view(halted="n0: burns"), "CanaryHalted"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_ready_says_in_one_word_what_the_policy_does_now(found: PolicyView, reason: str) -> None:
    assert conditions(found)["Ready"] == ("True", reason)


def test_an_object_that_cannot_be_taken_says_why_and_what_holds_meanwhile() -> None:
    refusal = ObjectRefusal(
        INVALID, "blackoutWindows[0].timeZone: time zone 'Mars' is unknown here"
    )
    said = judged(obj(), refusal, view(), NOON_S)
    ready = said.conditions[0]
    assert (ready.type, ready.status, ready.reason) == ("Ready", "False", "Invalid")
    assert ready.message == f"{refusal.line}; what it said before is held"
    assert conditions(None, refusal)["Enforced"] == ("Unknown", "Missing")


def test_telemetry_is_fresh_stale_or_missing() -> None:
    assert conditions(view())["TelemetryFresh"] == ("True", "Fresh")
    assert conditions(view(silent={"n0": 9.0}))["TelemetryFresh"] == ("False", "Stale")
    assert conditions(view(nodes=0))["TelemetryFresh"] == ("Unknown", "Missing")


def test_a_conflict_names_the_other_policy_and_the_field() -> None:
    found = view(stricter=Counter({("everywhere", "mode"): 2}))
    said = judged(obj(), None, found, NOON_S)
    conflict = said.conditions[2]
    assert (conflict.status, conflict.reason) == ("True", "LimitedByOther")
    assert conflict.message == "stricter is everywhere in mode on 2 nodes"


def test_a_stop_is_enforced_when_the_last_node_has_answered() -> None:
    assert conditions(view())["Enforced"] == ("True", "Observed")
    behind = view(seen=1, behind={"n1": "g1 is being given back"})
    assert conditions(behind)["Enforced"] == ("False", "Pending")
    assert judged(obj(), None, behind, NOON_S).conditions[3].message == (
        "observed on 1 of 2 nodes; n1: g1 is being given back"
    )
    assert conditions(view(seen=1, silent={"n1": 9.0}))["Enforced"] == ("Unknown", "Silent")


def test_what_holds_most_nodes_back_comes_first() -> None:
    limits = {"busy": (1, "busy: 90%"), "advisory": (2, "mode Advisory (chat)")}
    assert [each.limit for each in judged(obj(), None, view(limits=limits), NOON_S).limited_by] == [
        "advisory",
        "busy",
    ]


def test_whatever_is_said_fits_the_definition() -> None:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    long = "x" * 5_000
    found = view(
        limits={f"kind-{n}": (n, long) for n in range(2 * MAX_LIMITS)},
        stricter=Counter({(long, f"f{n}"): n for n in range(20)}),
        silent={f"node-{n}": 1.0 for n in range(500)},
        behind={"n1": long},
        halted=long,
    )
    for status in (
        dumped(judged(obj(), None, found, NOON_S)),
        dumped(judged(obj(), ObjectRefusal(INVALID, long), None, NOON_S)),
        dumped(judged(obj(), None, None, NOON_S)),
    ):
        Draft4Validator(schema).validate({"spec": {}, "status": status})
        assert all(len(each["detail"]) <= MAX_DETAIL for each in status["limitedBy"])


def test_a_status_is_written_when_it_differs_and_figures_can_wait() -> None:
    before = dumped(judged(obj(), None, view(), NOON_S))
    there = obj(**before)
    same = dumped(judged(there, None, view(), NOON_S + 60))
    assert not differs(there, same), "a transition that did not happen has no new time"
    figures = dumped(judged(there, None, view(lent_bytes=5), NOON_S + 60))
    assert differs(there, figures)
    assert not is_news(there, figures)
    held = dumped(judged(there, None, view(stop=HarvestMode.HOLD), NOON_S + 60))
    assert is_news(there, held)
    assert is_news(there, dumped(judged({**there, **obj(4)}, None, view(), NOON_S)))


def test_the_time_of_a_transition_is_that_of_the_status_alone() -> None:
    there = obj(**dumped(judged(obj(), None, view(), NOON_S)))
    held = judged(there, None, view(stop=HarvestMode.HOLD), NOON_S + 60)
    assert held.conditions[0].last_transition_time == THEN, "Ready is still True"
    stale = judged(there, None, view(silent={"n0": 9.0}), NOON_S + 60)
    assert stale.conditions[1].last_transition_time == "2023-11-14T22:14:20Z"


def test_there_is_one_event_for_each_change() -> None:
    first = judged(obj(), None, view(), NOON_S)
    [new] = events_of(obj(), first, NOON_S)
    assert (new["reason"], new["type"]) == ("Active", "Normal")
    there = obj(**dumped(first))
    assert [*events_of(there, first, NOON_S)] == []
    stale = judged(there, None, view(silent={"n0": 9.0}, seen=1), NOON_S)
    told = [*events_of(there, stale, NOON_S)]
    assert [(each["reason"], each["type"]) for each in told] == [
        ("Stale", "Warning"),
        ("Silent", "Normal"),
    ]
    again = [*events_of(there, stale, NOON_S + 1)]
    assert [e["metadata"]["name"] for e in again] == [e["metadata"]["name"] for e in told]
