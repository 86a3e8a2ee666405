"""Advice from usage: idle GPU-hours as measured, rollouts' tokens and users' p99 as simulated.

What is measured and what is modelled are kept apart. The simulator plays requests as dense as the
engines counted them, once with hosts alone and once with guests, on step times of published tables;
`sureness` says how far its hosts are from the measured ones.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.advise.usage import DeploymentUsage, UsageStep
from rose.errors import ConfigError, RoseError
from rose.simulation.fluid.what_if import WhatIfAnswer, WhatIfQuestion, what_if
from rose.simulation.workloads.traffic import DAY_S, HOUR_S, TraceTraffic, UserRequest
from slo import SloSpec

WEEK_DAYS: Final = 7.0
# More are thinned to hours spread evenly over the history: seconds of processor time in all.
MOST_REQUESTS: Final = 200_000
MOST_HOURS: Final = 24
# Sizes of models with a published table, in billions of parameters.
TABLES: Final = {"8b": 8.0, "32b": 32.0, "70b": 70.0}
CLOSE_BUSY: Final = 0.10
COVERED: Final = 0.95


@dataclass(frozen=True, slots=True)
class Assumed:
    """Facts that metrics do not have.

    cards: GPUs of one engine. tables: published table to use, by model; a model that is not named
    has that of "", or the one nearest to the size in its name. price: of a GPU-hour. ttft_s,
    tpot_s: promised to users. unsized: table of a model whose name has no size.
    """

    cards: int = 1
    card: str = "h200"
    guest: str = "8b"
    price: float | None = None
    ttft_s: float = 2.0
    tpot_s: float = 0.2
    tables: tuple[tuple[str, str], ...] = ()
    unsized: str = ""

    def __post_init__(self) -> None:
        if self.cards < 1:
            raise ConfigError(f"--cards is {self.cards}; give the GPUs of one engine, 1 or more")
        if self.price is not None and not (math.isfinite(self.price) and self.price >= 0):
            raise ConfigError(f"--price is {self.price}; give the price of a GPU-hour, 0 or more")

    def table(self, model: str) -> str:
        """Return the published table for a model. Raises ConfigError where its name has no size."""
        tables = dict(self.tables)
        given = tables.get(model, tables.get(""))
        if given is not None:
            return given
        size = re.search(r"(\d+(?:\.\d+)?)\s*b(?![a-z])", model, re.IGNORECASE)
        if size is None and self.unsized:
            return self.unsized
        if size is None:
            raise ConfigError(
                f"{model!r} does not say how many parameters it has; add --model"
                f" {model or 'NAME'}=TABLE with one of {', '.join(TABLES)}"
            )
        return min(TABLES, key=lambda name: abs(math.log(TABLES[name] / float(size[1]))))


@dataclass(frozen=True, slots=True)
class DeploymentAdvice:
    """Advice about one deployment. Days are the mean of its history.

    idle: share of the GPUs' time in which no request ran: measured, or simulated for a trace.
    answer: of the simulator; None where it has none, for the reason `trouble`. sure: statements
    that say how sure this is.
    """

    usage: DeploymentUsage
    gpus: float
    idle: float
    idle_gpu_hours_a_day: float
    answer: WhatIfAnswer | None
    trouble: str
    sure: tuple[str, ...]
    price: float | None

    @property
    def saved_a_day(self) -> float:
        """GPU-hours a day that the same rollouts would take on GPUs of their own."""
        return self.answer.gpu_hours_saved_a_day if self.answer else 0.0

    @property
    def money_a_day(self) -> float | None:
        """Price of `saved_a_day`; None without a price."""
        return None if self.price is None else self.price * self.saved_a_day

    def plain(self) -> dict[str, object]:
        """Return it in JSON's types, without the series."""
        return {
            "deployment": self.usage.name,
            "model": self.usage.model,
            "gpus": self.gpus,
            "days": self.usage.span_s / DAY_S,
            "covered": self.usage.covered,
            "idle": self.idle,
            "idle_gpu_hours_a_day": self.idle_gpu_hours_a_day,
            "measured_ttft_p99_s": self.usage.ttft_p99_s,
            "measured_tpot_p99_s": self.usage.tpot_p99_s,
            "money_a_day": self.money_a_day,
            "simulated": self.answer.plain() if self.answer else None,
            "trouble": self.trouble,
            "sure": list(self.sure),
        }


@dataclass(frozen=True, slots=True)
class LendingAdvice:
    """Advice about all deployments, and their sums."""

    deployments: tuple[DeploymentAdvice, ...]

    @property
    def gpus(self) -> float:
        """All GPUs that serve."""
        return sum(each.gpus for each in self.deployments)

    @property
    def idle_gpu_hours_a_day(self) -> float:
        """Measured idle time of all GPUs."""
        return sum(each.idle_gpu_hours_a_day for each in self.deployments)

    @property
    def tokens_a_day(self) -> float:
        """Tokens that rollouts could have, simulated."""
        return sum(each.answer.harvested_tokens_a_day for each in self.deployments if each.answer)

    @property
    def saved_a_day(self) -> float:
        """GPU-hours a day that rollouts would save."""
        return sum(each.saved_a_day for each in self.deployments)

    @property
    def money_a_day(self) -> float | None:
        """Price of what rollouts would save; None without a price."""
        known = [each.money_a_day for each in self.deployments if each.money_a_day is not None]
        return sum(known) if known else None

    def plain(self) -> dict[str, object]:
        """Return it in JSON's types."""
        return {
            "gpus": self.gpus,
            "idle_gpu_hours_a_day": self.idle_gpu_hours_a_day,
            "tokens_a_day": self.tokens_a_day,
            "gpu_hours_saved_a_day": self.saved_a_day,
            "money_a_day": self.money_a_day,
            "deployments": [each.plain() for each in self.deployments],
        }


def advice_of(usages: Sequence[DeploymentUsage], assumed: Assumed) -> LendingAdvice:
    """Return the advice about these deployments. Raises ConfigError for a model without a table."""
    return LendingAdvice(tuple(_of_deployment(usage, assumed) for usage in usages))


def _of_deployment(usage: DeploymentUsage, assumed: Assumed) -> DeploymentAdvice:
    gpus = usage.engines * assumed.cards
    table = assumed.table(usage.model)
    answer, trouble = None, ""
    if not any(each.requests > 0 for each in usage.moments):
        trouble = "no request finished in this time: there is nothing to simulate"
    elif not any(each.output_tokens > 0 for each in usage.moments):
        trouble = "nodes do not say how long requests are: there is nothing to simulate"
    else:
        engines = max(1, round(usage.engines))
        question = WhatIfQuestion(
            gpus=engines * assumed.cards,
            model=table,
            slo=SloSpec(usage.model or table, assumed.ttft_s, assumed.tpot_s),
            guest=assumed.guest,
            card=assumed.card,
            cards=assumed.cards,
            hold=MaxHostBusy(),
        )
        try:
            traffic = TraceTraffic(usage.trace) if usage.trace else None
            answer = what_if(question, traffic or UsageTraffic(usage.moments, usage.step_s))
        except RoseError as error:
            trouble = str(error)
    idle = usage.idle
    if usage.trace is not None:
        idle = 1 - answer.busy if answer else 0.0
    return DeploymentAdvice(
        usage,
        gpus,
        idle,
        idle * gpus * 24,
        answer,
        trouble,
        tuple(_sureness(usage, table, answer)),
        assumed.price,
    )


@dataclass(frozen=True, slots=True)
class UsageTraffic:
    """Traffic with requests as dense and as long as in these moments of `step_s` each.

    Within a step they come at random (Poisson). Of a history with more than MOST_REQUESTS or
    MOST_HOURS, hours that are spread evenly over it are played, one after the other.
    """

    moments: tuple[UsageStep, ...]
    step_s: float

    def requests(self, seed: int) -> Iterator[UserRequest]:
        """Yield requests in order of arrival; the same for the same seed."""
        rng = random.Random(f"rose-advise/{seed}")  # noqa: S311 - a load, not a secret
        total = sum(each.requests * self.step_s for each in self.moments)
        hour = max(1, round(HOUR_S / self.step_s))
        hours = len(self.moments) / hour
        every = math.ceil(max(1.0, total / MOST_REQUESTS, hours / MOST_HOURS))
        played = [each for n, each in enumerate(self.moments) if n // hour % every == 0]
        for number, moment in enumerate(played):
            if moment.requests <= 0:
                continue
            prompt = max(1, round(moment.prompt_tokens / moment.requests))
            output = max(1, round(moment.output_tokens / moment.requests))
            at_s = 0.0
            while (at_s := at_s + rng.expovariate(moment.requests)) < self.step_s:
                yield UserRequest(number * self.step_s + at_s, prompt, output)


def _sureness(usage: DeploymentUsage, table: str, answer: WhatIfAnswer | None) -> Iterator[str]:
    days = usage.span_s / DAY_S
    if days < WEEK_DAYS:
        yield f"{days:.2g} days were read: a week has days of both kinds"
    if usage.covered < COVERED:
        yield f"samples cover {usage.covered:.0%} of that time; the rest counts for nothing"
    if usage.trace is not None:
        yield f"all of it is simulated, with the published table of {table}: no engine was measured"
        return
    yield (
        "idle time is measured: the share of samples in which an engine ran no request"
        f" ({usage.idle:.0%})"
    )
    if answer is None:
        return
    busy = 1 - usage.idle
    near = "near" if abs(busy - answer.busy) <= CLOSE_BUSY else "far from"
    yield (
        f"tokens and p99 are simulated, with the published table of {table}: its hosts are busy"
        f" {answer.busy:.0%} of the time, {near} the measured {busy:.0%}"
        + ("" if near == "near" else "; take them as an order of magnitude")
    )
    yield "bursts within a step, prefix caches and request lengths beside their mean are not known"
