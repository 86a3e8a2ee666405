"""CapacityPolicy: the operator's limits on lending: which nodes, under which conditions.

It is the one description of a policy: files, the CRD's schema, the table in the docs and the checks
come from it. Fields are camelCase in files and snake_case here, with units in the names. Durations
(`5s`), bytes (`8Gi`) and counts that may be shares (`25%`) are plain numbers here, and in files the
strings that Kubernetes users write. A `ValueError` says what to write instead.

A moment lies in a blackout window by what a clock on the wall of its zone shows. So an hour that a
change to summer time skips is in no window, one that comes twice in autumn is in it both times, and
a window that crosses midnight belongs to the day on which it begins.

Nothing in a policy lends by itself: without a mode it only bounds what others allow, and nodes
that no policy with a mode selects compute and report what they would do.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, Final, Self
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

from elastic_scheduler.leases.lease_table import MAX_NAME_CHARS

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}
_BYTES = re.compile(r"(\d+)(Ki|Mi|Gi|Ti)?")
_FACTORS: Final = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_MOST_CHARS: Final = 32
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)%")
# A pattern holds for the string, a bound for the number.
_INT_OR_STRING: Final = {"x-kubernetes-int-or-string": True, "minimum": 0, "maxLength": _MOST_CHARS}
MAX_WINDOWS: Final = 64
MAX_TENANTS: Final = 256
# Life of an unrenewed lease: beyond it a cut-off node harvests nothing in any case.
LEASE_TTL_S: Final = 5.0


def seconds_of(value: object) -> float:
    """Return the seconds in a text as `500ms`, `5s`, `2m` or `1h`; a number is seconds already.

    Raises ValueError for anything else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no duration; write one as 500ms, 5s, 2m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def duration_text(seconds: float) -> str:
    """Return seconds as a policy file writes them: `5s`, `2m`."""
    for unit, factor in (("h", 3_600.0), ("m", 60.0), ("s", 1.0)):
        if seconds >= factor and (seconds / factor).is_integer():
            return f"{seconds / factor:.0f}{unit}"
    return f"{seconds * 1e3:.0f}ms"


def bytes_of(value: object) -> int:
    """Return the bytes in a text as `8Gi` or `512Mi`, or in a plain number.

    Raises ValueError for anything else.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = _BYTES.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no number of bytes; write one as 8Gi, 512Mi or 1073741824")
    return int(match[1]) * _FACTORS[match[2]]


def bytes_text(count: int) -> str:
    """Return bytes as a policy file writes them, in the largest unit that is exact: `8Gi`."""
    for unit, factor in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def count_or_share(value: object) -> int | str:
    """Return the value if it is a count as `3` or a share as `25%`. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) > 100:
        raise ValueError(f"{value!r} is neither; write a number as 3, or a share as 25%")
    assert isinstance(value, str)
    return value


def most_of(limit: int | str, count: int) -> int:
    """Return how many of `count` a limit, `3` or `25%`, allows; a share is rounded down."""
    if isinstance(limit, int):
        return min(limit, count)
    # 0.29 × 100 is a little less than 29 in floating point.
    return int(count * float(limit.removesuffix("%")) / 100 + 1e-9)


def share_of(value: object) -> object:
    """Return a share as `20%` as a number of 0 to 1; another value as it is, to be checked next."""
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match and float(match[1]) > 100:
        raise ValueError(f"{value!r} is more than all; write 100% or less")
    return float(match[1]) / 100 if match else value


def _schema(kind: str, pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, "pattern": f"^{pattern}$", "maxLength": _MOST_CHARS})


Seconds = Annotated[
    float,
    BeforeValidator(seconds_of),
    PlainSerializer(duration_text, str, when_used="json"),
    _schema("string", r"[0-9]+(\.[0-9]+)?(ms|s|m|h)"),
]
Bytes = Annotated[
    int,
    BeforeValidator(bytes_of),
    PlainSerializer(bytes_text, str, when_used="json"),
    WithJsonSchema(_INT_OR_STRING | {"pattern": "^[0-9]+(Ki|Mi|Gi|Ti)?$"}),
]
CountOrShare = Annotated[
    Any,
    BeforeValidator(count_or_share),
    WithJsonSchema(_INT_OR_STRING | {"pattern": r"^([0-9]{1,2}(\.[0-9]+)?|100(\.0+)?)%$"}),
]
Share = Annotated[float, Field(ge=0.0, le=1.0), BeforeValidator(share_of)]


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


def _zoned(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError("a moment without a zone; write one as 2026-12-27T08:00:00Z or …+01:00")
    return moment


Moment = Annotated[
    datetime,
    AfterValidator(_zoned),
    WithJsonSchema({"type": "string", "format": "date-time", "maxLength": _MOST_CHARS}),
]
Clock = Annotated[
    str,
    AfterValidator(_clock),
    WithJsonSchema({"type": "string", "pattern": f"^({_CLOCK.pattern})$", "maxLength": 5}),
]


class DailyWindow(BaseModel):
    """Hours of a day, on some days of the week, by the clocks of a time zone."""

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
    time_zone: Annotated[str, AfterValidator(lambda name: _zone(name).key)] = Field(
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
        """Return True if a time, in Unix seconds, lies in the window."""
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


_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


class PolicyMode(StrEnum):
    """Mode of a policy, strictest first."""

    OFF = "Off"
    ADVISORY = "Advisory"
    ACTIVE = "Active"


class StopPolicy(StrEnum):
    """Stop in a policy: none, no new leases, or also giving back what is lent."""

    NONE = "None"
    HOLD = "Hold"
    HOLD_AND_DRAIN = "HoldAndDrain"


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        populate_by_name=True,
    )


def _policy_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is no name; write lower-case letters, digits, - and .")
    return name


class LabelOperator(StrEnum):
    """Comparison of a node's label with values, as in Kubernetes."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(_Part):
    """Requirement on one label of a node."""

    key: str = Field(min_length=1, max_length=317, description="the label's key")
    operator: LabelOperator = Field(description="In, NotIn, Exists or DoesNotExist")
    values: tuple[str, ...] = Field(default=(), description="values, for In and NotIn alone")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        compares = self.operator in (LabelOperator.IN, LabelOperator.NOT_IN)
        if compares is not bool(self.values):
            does = "needs values; write them" if compares else "takes no values; leave them out"
            raise ValueError(f"operator {self.operator} {does}")
        return self

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return True if these labels meet the requirement; NotIn holds without the label."""
        value = labels.get(self.key)
        match self.operator:
            case LabelOperator.IN:
                return value in self.values
            case LabelOperator.NOT_IN:
                return value not in self.values
            case LabelOperator.EXISTS:
                return value is not None
        return value is None


class NodeSelector(_Part):
    """Nodes of a policy: those with all of the labels, and of the names if there are."""

    match_labels: dict[str, str] = Field(
        default={}, description="labels that a node must have, all of them"
    )
    match_expressions: tuple[LabelRequirement, ...] = Field(
        default=(), description="requirements on labels, all of them"
    )
    names: tuple[str, ...] = Field(
        default=(),
        description="names of nodes, or patterns as serving-*, any of them; none: all nodes",
    )

    def matches(self, node: str, labels: Mapping[str, str]) -> bool:
        """Return True if a node with this name and these labels is selected."""
        return (
            (not self.names or any(fnmatchcase(node, name) for name in self.names))
            and all(labels.get(key) == value for key, value in self.match_labels.items())
            and all(each.holds(labels) for each in self.match_expressions)
        )

    def no_nodes(self) -> str:
        """Return a line for people that says that the selector matches no attached node."""
        line = "no attached node has the labels or names of its nodeSelector"
        texts = (*self.match_labels, *self.match_labels.values())
        pattern = next((text for text in texts if set(text) & set("*?[")), None)
        if pattern is None:
            return line
        return f"{line}; the label {pattern[:80]!r} is compared as it stands: use matchExpressions"


class MaxHarvest(_Part):
    """Caps of what may be lent; a field that is left out does not bound it."""

    compute: Share | None = Field(
        default=None, description="share of each second in which a guest may begin steps"
    )
    memory: Annotated[Bytes, Field(gt=0)] | None = Field(
        default=None, description="KV memory that a guest may keep, as 8Gi"
    )
    nodes: CountOrShare | None = Field(
        default=None, description="nodes of this policy that lend at once, as 3 or 25%"
    )
    guests: int | None = Field(
        default=None, ge=0, description="guests that have leases at once on nodes of this policy"
    )
    deployment_share: Share | None = Field(
        default=None,
        description="share of the hosts of one deployment (label rose.dev/deployment) that lend"
        " at once",
    )


class HostReserve(_Part):
    """Memory of the host that stays free."""

    kv_headroom: Annotated[float, Field(ge=0.0, lt=1.0), BeforeValidator(share_of)] = Field(
        default=0.0, description="share of the host's KV memory that is neither used nor lent"
    )


class Watermarks(_Part):
    """Shares of the host's KV memory in use between which guests give way."""

    high: Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(share_of)] = Field(
        default=0.90, description="above it a guest's KV memory is halved"
    )
    low: Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(share_of)] = Field(
        default=0.80, description="below it a guest may grow again"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}; swap them")
        return self


def _job(name: str) -> str:
    if "*" in name:
        raise ValueError(
            f"{name!r} is no job, and no pattern either; name each job, or write maxHarvest.guests"
            " for all of them"
        )
    return name


class TenantLimit(_Part):
    """Priority and quota of one job."""

    job: Annotated[str, AfterValidator(_job)] = Field(
        min_length=1, max_length=MAX_NAME_CHARS, description="name of the job"
    )
    priority: float = Field(
        default=1.0, gt=0.0, le=1_000.0, description="its weight when jobs share, beside its own"
    )
    max_guests: int | None = Field(
        default=None, ge=0, description="guests that it may have at once on nodes of this policy"
    )


def _percent_of(value: object) -> object:
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) if match else value


class Canary(_Part):
    """Share of the policy's nodes that act while the others only advise."""

    percent: Annotated[float, Field(ge=0.0, le=100.0), BeforeValidator(_percent_of)] = Field(
        default=100.0,
        description="percent of all names of nodes; the same nodes each time, more as it grows."
        " When a host burns its SLO budget while it lends, the policy halts",
    )


class SloBudget(_Part):
    """Error budget of each host, which lending must not burn."""

    objective: Annotated[float, Field(gt=0.0, lt=1.0), BeforeValidator(share_of)] = Field(
        default=0.99, description="share of the host's requests that must meet its targets"
    )
    min_bad: int = Field(
        default=10,
        ge=1,
        description="requests that must have missed, in the window, before it counts",
    )
    release_after_s: Seconds = Field(
        default=300.0,
        alias="releaseAfter",
        description="how long a host must burn no faster than allowed before it lends again",
    )


class MaxHostBusy(_Part):
    """Busy share of a host above which it lends nothing."""

    share: Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(share_of)] = Field(
        default=0.85, description="busy share at which it is held"
    )
    resume: Share = Field(default=0.70, description="busy share below which it lends again")
    over_s: Seconds = Field(
        default=10.0, alias="over", description="time over which the share is averaged, 1s to 10m"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.resume >= self.share:
            raise ValueError(
                f"resume {self.resume} is not below share {self.share}; lower it, so that a host"
                " does not change each second"
            )
        if not 1.0 <= self.over_s <= 600.0:
            raise ValueError(f"over is {self.over_s:g} s; write 1s to 10m")
        return self


def _mode(value: object) -> object:
    if value is None:
        raise ValueError("write Off, Advisory or Active, or leave it out")
    # YAML 1.1, and with it kubectl and Helm, reads an unquoted Off as false.
    return PolicyMode.OFF if value is False else value


class CapacityPolicy(_Part):
    """Policy for the nodes that its selector names. Of several the strictest wins, by field."""

    name: Annotated[str, AfterValidator(_policy_name)] = Field(
        description="its name; applying another of the same name replaces it"
    )
    node_selector: NodeSelector = Field(
        default=NodeSelector(), description="nodes that it is for (all)"
    )
    mode: Annotated[PolicyMode | None, BeforeValidator(_mode)] = Field(
        default=None,
        description="Off lends nothing; Advisory computes and says what it would do, and lends"
        " nothing; Active lends. Without one it has no opinion: other policies decide, and where"
        " none of them has a mode it is Advisory",
    )
    stop_policy: StopPolicy = Field(
        default=StopPolicy.NONE,
        description="Hold grants no new leases; HoldAndDrain also gives back those that live",
    )
    max_harvest: MaxHarvest = Field(default=MaxHarvest(), description="caps of what is lent")
    reserve: HostReserve = Field(default=HostReserve(), description="what stays free")
    slack_share: Share | None = Field(
        default=None,
        description="most of a busy host's slack that a guest may use; 0: idle time alone. A"
        " node's own `slack_share` may be lower",
    )
    watermarks: Watermarks | None = Field(
        default=None, description="when guests give KV memory back"
    )
    cooldown_s: Seconds = Field(
        default=0.0,
        alias="cooldown",
        description="least pause between a revocation and the next lease of the replica",
    )
    blackout_windows: Annotated[tuple[DailyWindow, ...], Field(max_length=MAX_WINDOWS)] = Field(
        default=(), description="hours in which nothing is lent"
    )
    allowed_windows: Annotated[tuple[DailyWindow, ...], Field(max_length=MAX_WINDOWS)] = Field(
        default=(), description="hours outside of which nothing is lent"
    )
    during: Annotated[tuple[DailyWindow, ...], Field(max_length=MAX_WINDOWS)] = Field(
        default=(), description="hours in which this policy counts at all"
    )
    begin: Moment | None = Field(
        default=None, alias="from", description="moment from which it counts, with its zone"
    )
    until: Moment | None = Field(
        default=None, description="moment until which this policy counts, as 2026-12-27T08:00:00Z"
    )
    tenants: Annotated[tuple[TenantLimit, ...], Field(max_length=MAX_TENANTS)] = Field(
        default=(), description="priorities and quotas of jobs; others have 1 and none"
    )
    canary: Canary = Field(default=Canary(), description="how many of its nodes act")
    stale_after_s: Seconds = Field(
        default=LEASE_TTL_S,
        alias="staleAfter",
        description="a node that has not heard a scheduler for so long harvests nothing, 2s to 5s:"
        " a lease lives no longer unrenewed",
    )
    reclaim_deadline_s: Seconds = Field(
        default=5.0,
        alias="reclaimDeadline",
        description="by when what was lent is back after a stop or a demand, 1s to 10m. A node's"
        " own `reclaim_s` may be shorter",
    )
    max_host_busy: MaxHostBusy | None = Field(
        default=MaxHostBusy(), description="when a host is too busy to lend; null: never"
    )
    slo_budget: SloBudget | None = Field(
        default=SloBudget(),
        description="when a host has missed too many targets to lend; null: never",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not 2.0 <= self.stale_after_s <= LEASE_TTL_S:
            raise ValueError(
                f"staleAfter: {self.stale_after_s:g} s; write 2s to {LEASE_TTL_S:.0f}s, since"
                " leases are renewed each second and live no longer"
            )
        if not 1.0 <= self.reclaim_deadline_s <= 600.0:
            raise ValueError(f"reclaimDeadline: {self.reclaim_deadline_s:g} s; write 1s to 10m")
        if not 0 <= self.cooldown_s <= 86_400.0:
            raise ValueError(
                f"cooldown: {self.cooldown_s:g} s; write 0s to 24h, or a blackout window, or mode"
                " Off"
            )
        if self.begin and self.until and self.until <= self.begin:
            raise ValueError("until: not after from, so the policy never counts; swap them")
        jobs = [tenant.job for tenant in self.tenants]
        twice = next((job for job in jobs if jobs.count(job) > 1), None)
        if twice is not None:
            raise ValueError(f"tenants: job {twice!r} is there twice; write it once")
        nothing = self._lends_nothing()
        if self.mode is PolicyMode.ACTIVE and nothing:
            raise ValueError(
                f"{nothing} lends nothing, though mode is Active; raise it, or write mode Off"
            )
        return self

    def _lends_nothing(self) -> str | None:
        most = self.max_harvest
        for path, cap in (
            ("maxHarvest.compute", most.compute),
            ("maxHarvest.nodes", most.nodes),
            ("maxHarvest.guests", most.guests),
            ("maxHarvest.deploymentShare", most.deployment_share),
        ):
            if cap in (0, "0%"):
                return f"{path} {cap}"
        return None

    @property
    def is_timed(self) -> bool:
        """True if there are times at which the policy does not count."""
        return bool(self.during or self.begin or self.until)

    def counts_at(self, wall_s: float) -> bool:
        """Return True if the policy counts at a time, in Unix seconds."""
        return (
            (self.begin is None or wall_s >= self.begin.timestamp())
            and (self.until is None or wall_s < self.until.timestamp())
            and (not self.during or any(window.holds_at(wall_s) for window in self.during))
        )

    def to_json(self) -> str:
        """Return the policy as JSON: its name, and the fields that are not at their defaults."""
        said = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return json.dumps({"name": self.name} | said, separators=(",", ":"))


# Objects within a policy, by their paths.
PARTS: Final[dict[str, type[BaseModel]]] = {
    "nodeSelector": NodeSelector,
    "nodeSelector.matchExpressions[]": LabelRequirement,
    "maxHarvest": MaxHarvest,
    "reserve": HostReserve,
    "watermarks": Watermarks,
    "blackoutWindows[]": DailyWindow,
    "allowedWindows[]": DailyWindow,
    "during[]": DailyWindow,
    "tenants[]": TenantLimit,
    "canary": Canary,
    "maxHostBusy": MaxHostBusy,
    "sloBudget": SloBudget,
}
