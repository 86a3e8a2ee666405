"""Placeholder pods become a job's most guests, and nodes advertise what they may lend."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from rose.controller import quotas
from rose.controller.kube_api import ApiError
from rose.controller.quotas import QuotaController, advertise, guests_of
from tests.harness.waiting import PATIENCE_S, until_async

GPU = "rose.dev/borrowed-gpu"


def pod(job: str, *, deleted: bool = False) -> dict[str, Any]:
    said: dict[str, Any] = {"name": f"{job}-x", "labels": {"rose.dev/job": job}}
    return {**said, "deletionTimestamp": "2026-11-28T09:00:00Z"} if deleted else said


@pytest.mark.parametrize(
    ("pods", "guests"),
    [
        ([], {"a": 0, "b": 0}),
        ([pod("a"), pod("a"), pod("b")], {"a": 2, "b": 1}),
        ([pod("a"), pod("a", deleted=True)], {"a": 1, "b": 0}),
        ([pod("of-nobody"), pod("b")], {"a": 0, "b": 1}),
    ],
    ids=["no pod runs", "pods of two jobs", "a preempted pod", "a job without a quota"],
)
def test_a_job_has_as_many_guests_as_pods_of_it_run(
    pods: list[dict[str, Any]], guests: dict[str, int]
) -> None:
    assert guests_of(pods, ["a", "b"]) == guests


class StandInApi:
    """Pods by namespace, and numbers of nodes, "" for none; `down` refuses all calls."""

    def __init__(self) -> None:
        self.pods: dict[str, list[dict[str, Any]]] = {"x": [], "y": []}
        self.numbers: dict[str, str] = {"n0": "", "n1": "7"}
        self.written: dict[str, int] = {}
        self.down: ApiError | None = None
        self.unreadable = ""
        self.body = b""

    def placeholders(self, namespace: str) -> bytes:
        self._answer()
        if namespace == self.unreadable:
            raise ApiError(403, "cannot list pods; the chart's role RELEASE-controller has it")
        return (
            self.body
            or json.dumps(
                {"items": [{"metadata": each} for each in self.pods[namespace]] or None}
            ).encode()
        )

    def nodes(self) -> bytes:
        self._answer()
        said = [{"metadata": {"name": name, **each}} for name, each in self.labels().items()]
        return json.dumps({"items": said}).encode()

    def labels(self) -> dict[str, Any]:
        return {name: {"labels": {GPU: n}} if n else {} for name, n in self.numbers.items()}

    def advertise(self, node: str, number: int) -> None:
        self._answer()
        self.numbers[node] = str(number)
        self.written[node] = number

    def _answer(self) -> None:
        if self.down is not None:
            raise self.down


@pytest.mark.parametrize(
    ("said", "lent", "again", "written"),
    [
        ({}, {}, False, {}),
        ({}, {"n0": 2}, False, {"n0": 2}),
        ({"n0": "2"}, {"n0": 2}, False, {}),
        ({"n0": "2"}, {"n0": 1}, False, {"n0": 1}),
        ({"n0": "2", "n1": "0"}, {}, False, {"n0": 0}),
        ({"n0": "2", "n1": "0"}, {"n0": 2}, True, {"n0": 2, "n1": 0}),
        ({"n0": "many"}, {}, False, {"n0": 0}),
    ],
)
def test_a_node_is_written_where_its_number_differs(
    said: dict[str, str], lent: dict[str, int], again: bool, written: dict[str, int]
) -> None:
    api = StandInApi()
    api.numbers = {"n0": "", "n1": "", **said}
    assert advertise(cast("Any", api), lent, again=again) == ""
    assert api.written == written


def test_a_node_that_is_gone_keeps_no_other_from_its_number() -> None:
    api = StandInApi()
    write = api.advertise

    def refuse(node: str, number: int) -> None:
        if node == "n0":
            raise ApiError(404, "n0 is not found")
        write(node, number)

    api.advertise = refuse  # type: ignore[method-assign]
    assert "n0 is not found" in advertise(cast("Any", api), {"n0": 2, "n1": 3}, again=False)
    assert api.written == {"n1": 3}


class StandInScheduler:
    """Keeps what it is told; `lent`: guests that may be lent, by node."""

    def __init__(self) -> None:
        self.heard: dict[str, int] = {}
        self.times: list[float] = []
        self.lent: dict[str, int] = {"n0": 2}

    def quotas_heard(self, heard_s: float, pods: Mapping[str, int]) -> None:
        self.times.append(heard_s)
        self.heard |= pods

    def lendable(self) -> dict[str, int]:
        return dict(self.lent)


async def test_it_counts_and_advertises_and_says_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "COUNT_S", 0.01)
    monkeypatch.setattr(quotas, "ADVERTISE_S", 0.01)
    api, scheduler = StandInApi(), StandInScheduler()
    made = QuotaController(cast("Any", api), cast("Any", scheduler), {"a": "x", "b": "y"})
    task = asyncio.create_task(made.run())
    try:

        async def becomes(value: object, of: Any, what: str) -> None:
            await until_async(lambda: of() == value, PATIENCE_S, what)

        await becomes({"a": 0, "b": 0}, lambda: scheduler.heard, "both are counted")
        await becomes({"n0": "2", "n1": "0"}, lambda: api.numbers, "one that left lends nothing")
        api.pods["x"].append(pod("a"))
        api.pods["y"].append(pod("a"))
        await becomes({"a": 1, "b": 0}, lambda: scheduler.heard, "a pod counts in its namespace")
        assert made.troubles() == []

        api.unreadable, scheduler.lent = "x", {"n9": 1, "n1": 1}
        whys = [
            "quotas of namespace x: cannot list pods; the chart's role RELEASE-controller has it",
            "lent GPUs are not advertised: Kubernetes has no node n9; name it as Kubernetes does",
        ]
        await becomes(whys, made.troubles, "each fault is a line")
        await becomes({"n0": "0", "n1": "1"}, lambda: api.numbers, "other nodes are written")
        api.pods["y"].append(pod("b"))
        await becomes(1, lambda: scheduler.heard["b"], "the other namespace is counted")

        api.unreadable, scheduler.lent = "", {}
        await becomes([], made.troubles, "nothing is wrong any more")
        api.down = ApiError(0, "the API server does not answer (refused)")
        await becomes(3, lambda: len(made.troubles()), "nothing is read or written")
        counted = len(scheduler.times)
        await asyncio.sleep(0.1)
        assert len(scheduler.times) == counted, "and nothing is told"
        api.down, api.body = None, b'{"kind": "Status"}'
        await until_async(
            lambda: "list is none" in made.troubles()[0], PATIENCE_S, "what is no list is named"
        )
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
