"""Each node hears which live nodes of its own cluster relay weights, whenever that changes."""

from rose.rpc import rose_pb2 as pb
from rose.scheduler import SchedulerCore
from rose.scheduler.core.fleet import LAPSED_S
from rose.scheduler.core.messages import Attached, Command, Detached, RatesMeasured, Tick
from rose.scheduler.persistence import load


class Told:
    """The last order of each stream."""

    def __init__(self) -> None:
        self.core = SchedulerCore(load(()))
        self.relays: dict[int, list[str]] = {}

    def step(self, event: Attached | Detached | RatesMeasured | Tick, now_s: float) -> None:
        for action in self.core.step(event, now_s):
            if isinstance(action, Command) and action.command.HasField("relays"):
                self.relays[action.stream] = list(action.command.relays.urls)


def test_neighbours_of_one_label_are_told_of_each_other_and_nobody_else() -> None:
    told = Told()
    told.step(Attached("a", 1, "lon", "http://a"), 0.0)
    told.step(Attached("b", 2, "lon", "http://b"), 0.0)
    told.step(Attached("c", 3, "fra", "http://c"), 0.0)
    told.step(Attached("d", 4, "lon", ""), 0.0)
    both = ["http://a", "http://b"]
    assert told.relays == {1: both, 2: both, 3: ["http://c"], 4: both}


def test_who_is_silent_or_gone_is_left_out_until_it_speaks() -> None:
    told = Told()
    told.step(Attached("a", 1, "lon", "http://a"), 0.0)
    told.step(Attached("b", 2, "lon", "http://b"), 0.0)
    told.step(RatesMeasured(1, pb.Telemetry()), LAPSED_S - 1)
    told.step(Tick(), LAPSED_S + 0.1)
    assert told.relays == {1: ["http://a"], 2: ["http://a"]}
    told.step(RatesMeasured(2, pb.Telemetry()), LAPSED_S + 0.2)
    assert told.relays[1] == ["http://a", "http://b"]
    told.step(Detached(1), LAPSED_S + 0.3)
    assert told.relays[2] == ["http://b"], "a broken stream ends it at once"


def test_nothing_is_said_twice() -> None:
    told = Told()
    told.step(Attached("a", 1, "", "http://a"), 0.0)
    told.relays.clear()
    told.step(RatesMeasured(1, pb.Telemetry()), 0.5)
    told.step(Tick(), 0.6)
    assert told.relays == {}
