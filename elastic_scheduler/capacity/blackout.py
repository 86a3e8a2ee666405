"""Blackout windows: hours of a week, in a time zone, in which nothing is lent.

A moment lies in a window by what a clock on the wall of that zone shows. So an hour that a change
to summer time skips is in no window, one that comes twice in autumn is in it both times, and a
window that crosses midnight belongs to the day on which it begins.
"""

import re
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Annotated, Final, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel

_CLOCK = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])|24:00")


class Day(StrEnum):
    """Day of the week on which a window begins."""

    MON = "Mon"
    TUE = "Tue"
    WED = "Wed"
    THU = "Thu"
    FRI = "Fri"
    SAT = "Sat"
    SUN = "Sun"


DAYS: Final = tuple(Day)


def minutes_of(clock: str) -> int:
    """Return minutes since midnight of `HH:MM`, up to 24:00. Raises ValueError for another text."""
    if not _CLOCK.fullmatch(clock):
        raise ValueError(f"{clock!r} is no time of day; write one as 07:30, up to 24:00")
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def _clock(text: str) -> str:
    minutes_of(text)
    return text


@cache
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(
            f"time zone {name!r} is unknown here; write an IANA name as Europe/Berlin, or install"
            " the system's tzdata"
        ) from None


def _known_zone(name: str) -> str:
    _zone(name)
    return name


Clock = Annotated[
    str,
    AfterValidator(_clock),
    WithJsonSchema({"type": "string", "pattern": f"^({_CLOCK.pattern})$", "maxLength": 5}),
]


class BlackoutWindow(BaseModel):
    """Hours in which nothing is lent: lent capacity is returned when they begin."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )

    days: tuple[Day, ...] = Field(
        default=DAYS, description="days on which it begins (all): Mon, Tue, Wed, Thu, Fri, Sat, Sun"
    )
    begin: Clock = Field(alias="from", description="time of day at which it begins, HH:MM")
    end: Clock = Field(
        alias="to", description="time of day at which it ends; earlier than `from`: the next day"
    )
    time_zone: Annotated[str, AfterValidator(_known_zone)] = Field(
        description="IANA name, as Europe/Berlin or UTC"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.days:
            raise ValueError("a window on no day never begins; name days, or leave `days` out")
        if len(set(self.days)) < len(self.days):
            raise ValueError("a day is there twice; name each once")
        if self.begin == self.end:
            raise ValueError(
                f"a window from {self.begin} to {self.end} is empty; write 00:00 to 24:00 for"
                " whole days"
            )
        if self.begin == "24:00":
            raise ValueError("a window cannot begin at 24:00; write 00:00 of the next day")
        return self

    def holds_at(self, wall_s: float) -> bool:
        """Return True if a moment, in Unix seconds, lies in it."""
        local = datetime.fromtimestamp(wall_s, UTC).astimezone(_zone(self.time_zone))
        minute = local.hour * 60 + local.minute
        begin, end = minutes_of(self.begin), minutes_of(self.end)
        today = local.date()
        if end > begin:
            return self._begins(today) and begin <= minute < end
        yesterday = today - timedelta(days=1)
        return (self._begins(today) and minute >= begin) or (
            self._begins(yesterday) and minute < end
        )

    def _begins(self, day: date) -> bool:
        return DAYS[day.weekday()] in self.days

    def __str__(self) -> str:
        days = "daily" if len(self.days) == len(DAYS) else ",".join(self.days)
        return f"{days} {self.begin}-{self.end} {self.time_zone}"
