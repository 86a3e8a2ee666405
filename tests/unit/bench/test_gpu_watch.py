"""What is seen of a card while a piece runs."""

import time
from typing import Any

from bench.gpu.machine import MachineWatch
from rose.nvml import CardError
from tests.fakes.gpu import StandInReader, card, usage

LOOKS = (
    usage(sm_mhz=345, power_w=75.0, slowed=()),
    usage(sm_mhz=1980, power_w=690.0, used_bytes=30 << 30, slowed=("power cap",)),
    usage(sm_mhz=1700, power_w=700.0, temperature_c=None, slowed=("power cap", "heat (driver)")),
)


def watched(reader: StandInReader, looks: int) -> dict[str, Any]:
    with MachineWatch(reader, card(), every_s=0.001) as watch:
        deadline_s = time.monotonic() + 5
        while reader.looked < looks and time.monotonic() < deadline_s:
            time.sleep(0.001)
    return watch.summary()


def test_ranges_and_all_reasons_for_low_clocks_are_kept() -> None:
    found = watched(StandInReader(card(), looks=LOOKS), 3)
    assert found["looks"] >= 3
    assert found["ended"] == ""
    assert found["sm_mhz"] == (345, 1980)
    assert found["power_w"] == (75.0, 700.0)
    assert found["temperature_c"] == (30, 30)
    assert found["used_bytes_most"] == 30 << 30
    assert found["slowed"] == ["heat (driver)", "power cap"]


def test_a_card_that_stops_answering_is_told_and_ends_nothing_else() -> None:
    class Lost(StandInReader):
        def usage(self, which: Any) -> Any:
            look = super().usage(which)
            if self.looked > 1:
                raise CardError("the card is lost")
            return look

    found = watched(Lost(card(), looks=LOOKS), 2)
    assert (found["looks"], found["ended"]) == (1, "the card is lost")
    assert found["sm_mhz"] == (345, 345)


def test_a_piece_that_was_over_at_once_was_not_seen() -> None:
    reader = StandInReader(card())
    with MachineWatch(reader, card(), every_s=60.0) as watch:
        pass
    assert watch.summary()["looks"] == 0
    assert watch.summary()["sm_mhz"] is None
