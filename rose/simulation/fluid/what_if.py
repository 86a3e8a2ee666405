"""Gain of lending for an operator, and its cost for their users, by their trace.

The trace is played twice by the fluid model: hosts alone, and with guests that always have turns.
The difference in latencies is the cost, the guests' tokens are the gain.
"""

import math
from dataclasses import asdict, dataclass, replace

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.errors import ConfigError
from rose.simulation.engine_specs import EngineFigures, published_engine, source
from rose.simulation.fluid.hosts import NO_GUEST, WINDOW_S, GuestDuty, ServingFluid, StepLine
from rose.simulation.results import UserLatencies, UseSlice
from rose.simulation.scenario import GuestSpec, HostPool
from rose.simulation.workloads.traffic import DAY_S, HOUR_S, ServingWorkload
from slo import SloSpec

# Defaults of a rollout's turns, if the operator gives none.
ROLLOUT_CONTEXT, PREFILL_PER_OUTPUT = 4_096, 0.15
KV_HEADROOM = 0.2
MOST_SEQUENCES = 128
# Shortest trace from which a day is extrapolated.
LEAST_S = 60.0
# Busy share above which a cluster cannot serve its trace.
OVERLOADED = 0.999


@dataclass(frozen=True, slots=True)
class WhatIfQuestion:
    """Operator's question: what lending would gain on `gpus` that serve `model`. guest: model of
    the rollouts.

    cards: of an engine, None for the fewest that a table has. slack_share, hold: limits of the
    capacity policy. slo: latencies promised to users. context: mean tokens of a rollout's context.
    """

    gpus: int
    model: str
    slo: SloSpec
    guest: str = "8b"
    card: str = "h200"
    engine: str = "vllm"
    cards: int | None = None
    slack_share: float = 0.0
    hold: MaxHostBusy | None = None
    context: int = ROLLOUT_CONTEXT

    def __post_init__(self) -> None:
        for key in ("gpus", "context"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} is {getattr(self, key)}; give 1 or more")
        if not 0 <= self.slack_share <= 1:
            raise ConfigError(f"slack_share is {self.slack_share}; give a share in 0..1")


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """Answer to a what-if question; a day is 24 h of such traffic.

    busy: share of its time that a host works for users, without guests. lent: share of a card that
    a guest has. held: share of time in which the hold forbade lending. gpu_hours_saved_a_day: time
    that the harvested tokens would take on GPUs of their own.
    """

    hosts: int
    hours: float
    requests: int
    busy: float
    lent: float
    held: float
    guest_sequences: int
    harvested_tokens_a_day: float
    gpu_hours_saved_a_day: float
    alone: UserLatencies
    lending: UserLatencies
    use: tuple[UseSlice, ...]
    assumptions: tuple[str, ...]

    @property
    def lost_points(self) -> float:
        """Percentage points of users' requests that meet their targets alone, and miss them with
        guests.
        """
        return 100 * (self.alone.attainment - self.lending.attainment)

    def plain(self) -> dict[str, object]:
        """Return the answer as a dictionary of JSON's types, without the series over time."""
        found = asdict(self) | {"lost_points": self.lost_points}
        del found["use"]
        for name in ("alone", "lending"):
            latencies: UserLatencies = getattr(self, name)
            found[name] = asdict(latencies) | {"attainment": latencies.attainment}
            del found[name]["series"]
        return found


def what_if(
    question: WhatIfQuestion, trace: ServingWorkload, slice_s: float = 60.0
) -> WhatIfAnswer:
    """Return the answer to a question for the users of a trace, which the fluid model plays twice:
    without and with guests.

    slice_s: length of the slices of use. Raises ConfigError for a cluster that is impossible or a
    trace that is too short, RoseError for a file that is no trace.
    """
    host = published_engine(question.model, question.card, question.engine, question.cards)
    guest = published_engine(question.guest, question.card, question.engine, host.cards)
    hosts = question.gpus // host.cards
    if hosts < 1:
        raise ConfigError(
            f"gpus is {question.gpus}; one engine of {host.model} has {host.cards} of them"
        )
    # Weights of the guest lie in what was the host's KV memory.
    room = host.kv_bytes * (1 - KV_HEADROOM) - guest.weight_bytes
    if room <= 0:
        raise ConfigError(
            f"guest {guest.model}: its weights do not fit beside {host.model} on {host.cards}"
            f" {host.card} cards; choose a smaller one, or more cards"
        )
    beside = GuestSpec(
        replace(guest, kv_tokens=max(1_024, int(room / guest.kv_bytes_per_token))),
        kv_base_tokens=1_024,
        slack_share=question.slack_share,
    )
    pool = HostPool(hosts, host, question.slo, beside)
    alone = ServingFluid(pool, trace.requests(0), slice_s)
    _play(alone, NO_GUEST, slice_s)
    if alone.now_s < LEAST_S:
        raise ConfigError(
            f"the trace lasts {alone.now_s:.0f} s; give requests of at least {LEAST_S:.0f} s"
        )
    used = alone.in_host_s / alone.now_s * alone.mix.context
    kv_tokens = (room - used * host.kv_bytes_per_token) / guest.kv_bytes_per_token
    if kv_tokens < question.context:
        raise ConfigError(
            f"context is {question.context}; a guest has KV memory for {max(0, int(kv_tokens))}"
            " tokens beside its host"
        )
    sequences = max(1, min(MOST_SEQUENCES, int(kv_tokens / question.context)))
    line = StepLine.of(guest.profile, question.context, PREFILL_PER_OUTPUT)
    step_s = line.seconds(sequences)
    lending = ServingFluid(pool, trace.requests(0), slice_s, question.hold)
    use = _play(lending, GuestDuty(1.0, step_s), slice_s)
    tokens = lending.lent_s * sequences / step_s * hosts
    own = published_engine(question.guest, question.card, question.engine)
    own_line = StepLine.of(own.profile, question.context, PREFILL_PER_OUTPUT)
    own_tokens_a_gpu_hour = MOST_SEQUENCES / own_line.seconds(MOST_SEQUENCES) * HOUR_S / own.cards
    days = lending.now_s / DAY_S
    busy = alone.busy_s / alone.now_s
    return WhatIfAnswer(
        hosts=hosts,
        hours=alone.now_s / HOUR_S,
        requests=alone.requests,
        busy=busy,
        lent=lending.lent_s / lending.now_s,
        held=lending.held_s / lending.now_s,
        guest_sequences=sequences,
        harvested_tokens_a_day=tokens / days,
        gpu_hours_saved_a_day=tokens / own_tokens_a_gpu_hour / days,
        alone=alone.latencies(),
        lending=lending.latencies(),
        use=use,
        assumptions=_assumptions(question, host, guest, hosts, sequences, own, alone.now_s, busy),
    )


def _play(fluid: ServingFluid, guests: GuestDuty, slice_s: float) -> tuple[UseSlice, ...]:
    """Play a fluid model's requests to their end; return the use of the cards in slices of
    `slice_s`.
    """
    slices: list[UseSlice] = []
    start_s = busy_s = lent_s = 0.0
    while not fluid.over or fluid.now_s == 0:
        fluid.advance(fluid.now_s + WINDOW_S, guests)
        if fluid.now_s - start_s >= slice_s or fluid.over:
            span_s = fluid.now_s - start_s
            slices.append(
                UseSlice(
                    start_s, (fluid.busy_s - busy_s) / span_s, (fluid.lent_s - lent_s) / span_s,
                    0.0, 0.0,
                )
            )  # fmt: skip
            start_s, busy_s, lent_s = fluid.now_s, fluid.busy_s, fluid.lent_s
    return tuple(slices)


def _assumptions(
    question: WhatIfQuestion,
    host: EngineFigures,
    guest: EngineFigures,
    hosts: int,
    sequences: int,
    own: EngineFigures,
    seconds: float,
    busy: float,
) -> tuple[str, ...]:
    hold = question.hold
    found = [
        f"{hosts} hosts of {host.model}, {host.cards} {host.card} cards each, under {host.engine};"
        " requests go to the host that is done with its prompts first",
        f"step times of {source()}: fitted to within {host.profile.fit_error:.0%} on the average",
        f"users are promised {question.slo.ttft_s:g} s to the first token and"
        f" {question.slo.tpot_s * 1e3:g} ms per token after it",
        f"rollouts always have turns to do: {guest.model}, {sequences} sequences a guest, a context"
        f" of {question.context} tokens, {PREFILL_PER_OUTPUT:g} prompt tokens per output token"
        " that no prefix cache has",
        f"guests' weights lie in the hosts' KV memory, of which {KV_HEADROOM:.0%} is never lent;"
        " preemption of users' requests for want of KV memory is not modelled",
        "slackShare 0: a guest computes while its host is idle; nothing stops a step that began"
        if not question.slack_share
        else f"slackShare {question.slack_share:g}: a guest also computes beside a busy host, each"
        " at half of its speed, while its step fits that share of the slack",
        "no guest beside a busy host is held"
        if hold is None
        else f"maxHostBusy: a host that worked {hold.share:.0%} of {hold.over_s:g} s is left alone"
        f" until {hold.resume:.0%}",
        f"GPU-hours saved: of {own.cards} {own.card} cards of their own at {MOST_SEQUENCES}"
        " sequences an engine",
        "time to fetch weights, to start guests and to hand turns over is not counted",
    ]
    if not math.isclose(seconds, DAY_S, rel_tol=0.05):
        found.append(
            f"a day is {DAY_S / seconds:.1f} times the {seconds / HOUR_S:.2f} h of the trace; hours"
            " that it does not have may be busier, or lend more"
        )
    if question.gpus % host.cards:
        found.append(f"{question.gpus % host.cards} GPUs make no engine and are left out")
    if busy > OVERLOADED:
        found.append("the hosts are overloaded by this trace alone: it belongs to more GPUs")
    return tuple(found)
