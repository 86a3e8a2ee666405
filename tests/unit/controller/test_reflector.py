"""The list and watch: whatever is cut, lost or too old, in the end it knows what is there."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.controller.reflector import (
    DOUBTS,
    MAX_LINE_BYTES,
    MAX_PAUSE_S,
    STEADY_S,
    Action,
    AskList,
    AskWatch,
    Changed,
    Ended,
    Event,
    Listed,
    Opened,
    Pause,
    Probed,
    Received,
    Reflector,
    Start,
    StopWatch,
    Woke,
)

Object = dict[str, Any]


def obj(name: str, version: int, generation: int = 1) -> Object:
    metadata = {
        "name": name,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "generation": generation,
    }
    return {"metadata": metadata, "spec": {}}


def listing(version: int, *objects: Object) -> Listed:
    said = {"metadata": {"resourceVersion": str(version)}, "items": list(objects)}
    return Listed(json.dumps(said).encode())


def line(kind: str, each: Object) -> bytes:
    return json.dumps({"type": kind, "object": each}).encode() + b"\n"


def expired() -> bytes:
    return line("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})


class Bench:
    """A reflector with a hand-turned clock."""

    def __init__(self) -> None:
        self.core = Reflector()
        self.now_s = 100.0

    def step(self, *events: Event) -> list[Action]:
        return [action for event in events for action in self.core.step(event, self.now_s)]

    def later(self, seconds: float) -> "Bench":
        self.now_s += seconds
        return self

    def names(self) -> set[str]:
        return set(self.core.status().objects)

    def probe(self, *objects: Object, asked_s: float | None = None) -> list[Action]:
        body = json.dumps({"items": [{"metadata": each["metadata"]} for each in objects]})
        return self.step(Probed(body.encode(), self.now_s if asked_s is None else asked_s))


def watching(*objects: Object, version: int = 10) -> Bench:
    """One that lists these objects and watches."""
    bench = Bench()
    assert bench.step(Start()) == [AskList()]
    assert bench.step(listing(version, *objects))[-1] == AskWatch(str(version))
    assert bench.step(Opened()) == []
    return bench


def test_it_lists_then_watches_from_there() -> None:
    bench = Bench()
    bench.step(Start())
    assert bench.step(listing(7, obj("a", 3), obj("b", 5))) == [
        Changed("a"),
        Changed("b"),
        AskWatch("7"),
    ]
    assert bench.core.status().synced


def test_events_change_what_is_known() -> None:
    bench = watching(obj("a", 3))
    assert bench.step(Received(line("ADDED", obj("b", 11)))) == [Changed("b")]
    assert bench.step(Received(line("MODIFIED", obj("a", 12)))) == [Changed("a")]
    assert bench.step(Received(line("DELETED", obj("b", 13)))) == [Changed("b", gone=True)]
    assert bench.names() == {"a"}


def test_what_is_told_twice_changes_nothing() -> None:
    bench = watching(obj("a", 3))
    once = line("MODIFIED", obj("a", 12))
    assert bench.step(Received(once + once)) == [Changed("a")]
    gone = line("DELETED", obj("a", 13))
    assert bench.step(Received(gone + gone)) == [Changed("a", gone=True)]


def test_lines_may_be_cut_anywhere() -> None:
    data = line("ADDED", obj("b", 11)) + line("BOOKMARK", obj("", 15)) + line("ADDED", obj("c", 16))
    for cut in range(len(data)):
        bench = watching()
        actions = bench.step(Received(data[:cut]), Received(data[cut:]))
        assert actions == [Changed("b"), Changed("c")], cut


def test_a_torn_line_at_the_end_is_not_believed_and_comes_again() -> None:
    bench = watching(obj("a", 3))
    data = line("ADDED", obj("b", 11)) + line("ADDED", obj("c", 12))
    bench.step(Received(data[:-9]))
    assert bench.names() == {"a", "b"}
    [pause] = bench.later(STEADY_S).step(Ended("the watch broke"))
    assert isinstance(pause, Pause)
    assert bench.step(Woke()) == [AskWatch("11")], "from the last whole event on"
    bench.step(Opened(), Received(line("ADDED", obj("c", 12))))
    assert bench.names() == {"a", "b", "c"}


def test_a_bookmark_moves_only_where_it_resumes() -> None:
    bench = watching(obj("a", 3))
    mark = {"metadata": {"resourceVersion": "99"}}
    assert bench.step(Received(line("BOOKMARK", mark))) == []
    assert bench.later(STEADY_S).step(Ended()) == [AskWatch("99")], "it ended in order: no pause"


def test_what_was_deleted_in_a_gap_is_gone_after_the_next_list() -> None:
    bench = watching(obj("a", 3), obj("b", 4), obj("c", 5))
    assert bench.later(STEADY_S).step(Received(expired())) == [StopWatch(), AskList()]
    assert bench.step(listing(50, obj("b", 4), obj("c", 44), obj("d", 45))) == [
        Changed("a", gone=True),
        Changed("c"),
        Changed("d"),
        AskWatch("50"),
    ]


def test_a_410_as_the_answer_to_a_watch_lists_anew() -> None:
    bench = watching(obj("a", 3))
    assert bench.step(Ended("gone", 410)) == [AskList()]
    bench.step(listing(60))
    assert isinstance(bench.step(Ended("gone", 410))[0], Pause), "and not for ever without a pause"


@pytest.mark.parametrize(
    "said",
    [
        b"no json\n",
        b"[1]\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "9"}}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"name": "x"}}}\n',
        b'{"type": "SURPRISE", "object": {"metadata": {"name": "x", "resourceVersion": "9"}}}\n',
        b"[" * 5_000 + b"\n",
        b"\xff\n",
        line("ERROR", {"kind": "Status", "code": 500, "message": "etcd"}),
        b"x" * (MAX_LINE_BYTES + 1),
    ],
    ids=lambda said: repr(said[:40]),
)
def test_what_means_nothing_ends_the_watch_and_lists_anew(said: bytes) -> None:
    bench = watching(obj("a", 3))
    stop, pause = bench.later(STEADY_S).step(Received(said))
    assert stop == StopWatch()
    assert isinstance(pause, Pause)
    assert bench.step(Woke()) == [AskList()]
    assert bench.names() == {"a"}, "what was known holds until then"


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"metadata": {}, "items": [{}]}'], ids=repr)
def test_a_list_that_is_none_is_asked_for_again(body: bytes) -> None:
    bench = Bench()
    bench.step(Start())
    [pause] = bench.step(Listed(body))
    assert isinstance(pause, Pause)
    assert not bench.core.status().synced
    assert bench.step(Woke()) == [AskList()]


def test_pauses_double_and_end_with_a_watch_that_is_well() -> None:
    bench = watching()
    pauses = []
    for _ in range(8):
        [pause] = bench.step(Ended("refused"))
        assert isinstance(pause, Pause)
        pauses.append(pause.pause_s)
        bench.step(Woke())
    assert pauses[:4] == [0.2, 0.4, 0.8, 1.6]
    assert max(pauses) == MAX_PAUSE_S
    bench.step(Opened())
    [pause] = bench.later(STEADY_S).step(Ended("broken"))
    assert pause == Pause(0.2)


def test_a_server_that_ends_each_watch_at_once_is_not_hammered() -> None:
    bench = watching()
    assert bench.step(Ended()) == [Pause(0.2)]
    bench.step(Woke(), Opened())
    assert bench.step(Ended()) == [Pause(0.4)]


def test_expiry_again_and_again_is_paused() -> None:
    bench = watching()
    assert bench.later(STEADY_S).step(Received(expired())) == [StopWatch(), AskList()]
    bench.step(listing(60), Opened())
    actions = bench.step(Received(expired()))
    assert isinstance(actions[-1], Pause)


def test_events_of_a_watch_that_is_over_count_no_more() -> None:
    bench = watching(obj("a", 3))
    bench.step(Ended("broken"))
    assert bench.step(Received(line("DELETED", obj("a", 11))), Opened(), Ended()) == []
    assert bench.names() == {"a"}


def test_what_went_wrong_is_known_until_it_is_well_again() -> None:
    bench = Bench()
    bench.step(Start(), Ended("forbidden: no list", 403))
    status = bench.core.status()
    assert (status.code, status.trouble) == (403, "forbidden: no list")
    bench.step(Woke(), listing(3))
    assert bench.core.status().trouble == ""


# ---- how fresh it is ----


def test_a_probe_that_shows_the_same_proves_that_nothing_was_missed() -> None:
    bench = watching(obj("a", 3)).later(7.0)
    assert bench.core.status().heard_s == 100.0
    bench.probe(obj("a", 99), asked_s=106.0)
    assert bench.core.status().heard_s == 106.0, "as of when it was asked; a status changes no spec"


def test_probes_prove_nothing_while_no_watch_is_open() -> None:
    bench = watching(obj("a", 3))
    bench.later(1.0).step(Ended("broken"))
    bench.later(1.0).probe(obj("a", 3))
    bench.step(Woke())
    bench.later(1.0).probe(obj("a", 3))
    assert bench.core.status().heard_s == 100.0
    bench.step(Opened())
    bench.probe(obj("a", 3), asked_s=101.0)
    assert bench.core.status().heard_s == 100.0, "it was asked before the watch was open"
    bench.probe(obj("a", 3))
    assert bench.core.status().heard_s == bench.now_s


@pytest.mark.parametrize(
    "there",
    [[], [obj("a", 3, generation=2)], [obj("a", 3), obj("b", 4)]],
    ids=["gone", "new", "two"],
)
def test_a_watch_that_missed_a_change_is_given_up(there: list[Object]) -> None:
    bench = watching(obj("a", 3))
    for _ in range(DOUBTS - 1):
        assert bench.later(1.0).probe(*there) == [], "it may have overtaken the event"
    actions = bench.later(1.0).probe(*there)
    assert actions[0] == StopWatch()
    assert bench.core.status().heard_s == 100.0
    assert bench.step(Woke()) == [AskList()]


def test_a_probe_that_only_overtook_the_event_is_forgotten() -> None:
    bench = watching(obj("a", 3))
    for version in range(20, 30):
        there = obj("a", version, generation=version)
        assert bench.later(1.0).probe(there) == []
        bench.step(Received(line("MODIFIED", there)))
        bench.later(1.0).probe(there)
        assert bench.core.status().heard_s == bench.now_s


# ---- all of it ----


class Server:
    """Objects of an API server, and the lines of its watch."""

    def __init__(self) -> None:
        self.version, self.oldest = 1, 1
        self.objects: dict[str, Object] = {}
        self.log: list[tuple[int, bytes]] = []

    def write(self, name: str) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        before = self.objects[name]["metadata"]["generation"] if name in self.objects else 0
        self.objects[name] = obj(name, self.version, before + 1)
        self.log.append((self.version, line(kind, self.objects[name])))

    def delete(self, name: str) -> None:
        if name in self.objects:
            self.version += 1
            self.log.append((self.version, line("DELETED", obj(name, self.version))))
            del self.objects[name]

    def compact(self) -> None:
        self.oldest = self.version
        self.log.clear()

    def since(self, version: int) -> bytes:
        if version < self.oldest:
            return expired()
        return b"".join(said for at, said in self.log if at > version)


Move = tuple[str, str]
MOVES = st.tuples(
    st.sampled_from(["write", "delete", "compact", "deliver", "cut", "probe", "tear"]),
    st.sampled_from(["a", "b", "c"]),
)


class Driven:
    """A reflector whose calls a server answers at once."""

    def __init__(self) -> None:
        self.server, self.bench, self.told = Server(), Bench(), 0
        self.serve(self.bench.step(Start()))

    def serve(self, actions: list[Action]) -> None:
        for action in actions:
            self.bench.later(STEADY_S)
            match action:
                case AskList():
                    there = self.server.objects.values()
                    self.serve(self.bench.step(listing(self.server.version, *there)))
                case AskWatch(version):
                    self.told = int(version)
                    self.serve(self.bench.step(Opened()))
                case Pause():
                    self.serve(self.bench.step(Woke()))

    def deliver(self, cut: int = 0) -> None:
        data = self.server.since(self.told)
        self.told = self.server.version
        self.serve(self.bench.step(Received(data[: len(data) - cut])))

    def move(self, move: str, name: str) -> None:
        match move:
            case "write":
                self.server.write(name)
            case "delete":
                self.server.delete(name)
            case "compact":
                self.server.compact()
            case "deliver":
                self.deliver()
            case "tear":
                self.deliver(cut=7)
                self.serve(self.bench.step(Ended("torn")))
            case "cut":
                self.serve(self.bench.step(Ended("cut")))
            case "probe":
                self.serve(self.bench.probe(*self.server.objects.values()))


@given(st.lists(MOVES, max_size=40))
def test_in_the_end_it_knows_what_is_there(moves: list[Move]) -> None:
    driven = Driven()
    for move, name in moves:
        driven.move(move, name)
    for _ in range(DOUBTS + 1):
        driven.move("deliver", "")
        driven.move("probe", "")
    known = driven.bench.core.status().objects
    there = driven.server.objects
    assert {name: generation(each) for name, each in known.items()} == {
        name: generation(each) for name, each in there.items()
    }


def generation(each: Mapping[str, Any]) -> int:
    return int(each["metadata"]["generation"])
