"""Objects compared with the policies in force."""

from typing import Any

from elastic_scheduler.capacity import CapacityPolicy, policy_of
from rose.controller.reconciler import ObjectReader, plan


def obj(name: str, generation: int = 1, /, **spec: object) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "generation": generation}, "spec": spec}


def policy(name: str, **said: object) -> CapacityPolicy:
    return policy_of({"name": name, **said})


def test_new_and_other_objects_are_applied_and_what_is_gone_is_deleted() -> None:
    read = ObjectReader().read({"a": obj("a"), "b": obj("b", mode="Active"), "c": obj("c")})
    in_force = {
        each.name: each for each in (policy("a"), policy("b"), policy("old"), policy("own"))
    }
    todo = plan(read, in_force, {"a", "b", "old"})
    assert [each.name for each in todo.apply] == ["b", "c"]
    assert todo.delete == ("old",), "and not what an operator applied"


def test_an_object_with_the_name_of_an_operators_policy_is_offered_to_the_scheduler() -> None:
    todo = plan(ObjectReader().read({"own": obj("own")}), {"own": policy("own")}, set())
    assert [each.name for each in todo.apply] == ["own"], "which refuses it, in words"


def test_an_object_that_cannot_be_read_is_refused_in_one_line_and_nothing_is_deleted() -> None:
    objects = {
        "zone": obj("zone", blackoutWindows=[{"from": "1:00", "to": "2:00", "timeZone": "Mars"}]),
        "typo": obj("typo", slackshare=0.5),
        "name": obj("name", name="other"),
        "none": {"metadata": {"name": "none"}},
        "B@D": obj("B@D"),
    }
    todo = plan(ObjectReader().read(objects), {"zone": policy("zone")}, {"zone"})
    assert todo.apply == ()
    assert todo.delete == ()
    assert todo.refused is not None
    assert set(todo.refused) == set(objects)
    assert "did you mean slackShare?" in todo.refused["typo"]
    assert all("\n" not in line and len(line) < 300 for line in todo.refused.values())


def test_an_object_is_read_once_for_each_spec() -> None:
    reader = ObjectReader()
    first = reader.read({"a": obj("a")})["a"]
    assert reader.read({"a": {**obj("a"), "status": {}}})["a"] is first
    assert reader.read({"a": obj("a", 2, mode="Active")})["a"] == policy("a", mode="Active")
    assert reader.read({}) == {}
