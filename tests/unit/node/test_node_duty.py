"""Duty is the share of time in which the guest was let run."""

import pytest

from executor import GuestState
from rose.node.guest.guard import DutyMeter


def test_a_guest_held_back_half_of_the_time_has_duty_one_half() -> None:
    meter = DutyMeter()
    for tick in range(11):
        now_ns = tick * 100_000_000
        meter.update(now_ns, GuestState(step_seq=tick, yielded_ns=now_ns // 2))
    assert meter.value == pytest.approx(0.5)


def test_a_guest_that_does_not_step_has_no_duty() -> None:
    meter = DutyMeter()
    for tick in range(11):
        meter.update(tick * 100_000_000, GuestState(step_seq=7))
    assert meter.value == 0.0


def test_no_guest_no_duty() -> None:
    meter = DutyMeter()
    meter.update(0, None)
    assert meter.value == 0.0
