"""`rose compare`: what lending costs a host, and that lending is afterwards as it was before."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from rose.cli.cluster.compare import show
from rose.cli.main import main as rose
from rose.compare.node_metrics import (
    REQUESTS,
    TOKENS,
    TPOT,
    TTFT,
    CountersRestartedError,
    HostLatencies,
    HostReading,
    between,
    reading_of,
)
from rose.compare.run import ComparisonRun, Plan, Switches, blocks_of
from rose.compare.verdict import (
    MIN_PAIRS,
    MIN_REQUESTS,
    MIN_REQUESTS_FOR_P99,
    ComparisonLimits,
    PairRead,
    Verdict,
    compared,
)
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.rpc import rose_pb2 as pb

ON, OFF = pb.HARVEST_MODE_ACTIVE, pb.HARVEST_MODE_HOLD_AND_DRAIN
PLAN = Plan(pairs=3, block_s=60.0, settle_s=5.0, seed=1)
GUESTS = ("g0", "g1")


# ---- the schedule ----


def test_each_pair_has_both_arms_and_neither_always_comes_first() -> None:
    blocks = blocks_of(Plan(pairs=40, seed=3))
    assert blocks == blocks_of(Plan(pairs=40, seed=3))
    firsts = [blocks[2 * n].lends for n in range(40)]
    assert 10 < sum(firsts) < 30
    for n in range(40):
        one, other = blocks[2 * n : 2 * n + 2]
        assert (one.pair, other.pair, one.lends) == (n, n, not other.lends)


@pytest.mark.parametrize("wrong", [{"pairs": 1}, {"block_s": 1.0}, {"settle_s": math.nan}])
def test_a_plan_that_measures_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="give"):
        Plan(**wrong)  # type: ignore[arg-type]


def test_a_dry_run_prints_the_schedule_and_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert rose(["compare", "n0", "--pairs", "3", "--dry-run", "--scheduler", "127.0.0.1:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("6 blocks of 120 s")
    assert len(lines) == 7


def test_what_is_missing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert rose(["compare", "n0"]) == 2
    assert rose(["compare", "n0", "--metrics", "nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


# ---- a node's page ----


class HostPage:
    """A node's page with the figures of some hosts; without names those of the only one."""

    def __init__(self, *hosts: str) -> None:
        self.registry = CollectorRegistry()
        labels = ["host"] if hosts else []
        self.latencies = [
            Histogram(name, "What it is.", labels, buckets=[0.1, 0.5], registry=self.registry)
            for name in ("rose_host_ttft_seconds", "rose_host_tpot_seconds")
        ]
        self.requests = Counter(
            "rose_host_requests", "What it is.", [*labels, "targets"], registry=self.registry
        )
        self.tokens = Counter(
            "rose_guest_tokens", "What it is.", ["replica"], registry=self.registry
        )

    def serve(self, latency_s: float, *host: str) -> None:
        for each in self.latencies:
            (each.labels(*host) if host else each).observe(latency_s)
        self.requests.labels(*host, "met" if latency_s <= 0.5 else "missed").inc()

    def read(self, host: str = "") -> HostReading:
        return reading_of(generate_latest(self.registry).decode(), host)


def test_a_nodes_page_is_read_and_the_later_one_less_the_earlier() -> None:
    page = HostPage()
    page.serve(0.2)
    page.tokens.labels("g0").inc(5)
    earlier = page.read()
    page.serve(0.4)
    page.serve(0.9)
    page.tokens.labels("g0").inc(7)
    seen = between(earlier, page.read())
    assert (seen.met, seen.missed, seen.ttft.count, seen.tokens) == (1, 1, 2, 7)
    assert seen.ttft.sum_s == pytest.approx(1.3)
    assert seen.ttft.buckets == {0.1: 0, 0.5: 1, math.inf: 2}
    with pytest.raises(CountersRestartedError):
        between(page.read(), earlier)


def test_of_several_hosts_one_is_read() -> None:
    page = HostPage("chat", "code")
    page.serve(0.2, "chat")
    page.serve(0.9, "code")
    with pytest.raises(ConfigError, match="one of chat, code"):
        page.read()
    with pytest.raises(ConfigError, match="no host 'other'"):
        page.read("other")
    assert (page.read("chat").met, page.read("chat").missed) == (1, 0)


def test_the_names_are_those_that_a_node_has() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operators" / "metrics.md").read_text()
    for name in (TTFT, TPOT, REQUESTS, TOKENS):
        assert f"`{name}" in page


@pytest.mark.parametrize("text", ["", "what is this\n", "rose_scheduler_leader 1\n"])
def test_another_page_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="page"):
        reading_of(text)


# ---- as it runs ----


def reading(
    requests: float, mean_s: float = 0.1, met: float = 1.0, tokens: float = 0.0
) -> HostReading:
    """Return a reading of this many requests, each of this duration."""
    bounds = (0.05, 0.2, 0.4, math.inf)
    buckets = {bound: requests if mean_s <= bound else 0.0 for bound in bounds}
    latencies = HostLatencies(buckets, requests * mean_s, requests)
    return HostReading(latencies, latencies, requests * met, requests * (1 - met), tokens)


@dataclass
class ComparedNode:
    """A scheduler, a node's page and a clock, in which things happen at a given moment."""

    now_s: float = 0.0
    cluster: int = ON
    modes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUESTS, ON))
    leased: frozenset[str] = frozenset()
    done: list[tuple[str, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    reads: int = 0
    at: dict[int, Callable[[], None]] = field(default_factory=dict)
    away_until_s: float = 0.0
    counts_from_s: float = 0.0

    def switches(self) -> Switches:
        if self.now_s < self.away_until_s:
            raise UnavailableError("nobody answers")
        return Switches(self.cluster, dict(self.modes), self.leased)

    def switch(self, guest: str, mode: int) -> None:
        self.switches()
        self.modes[guest] = mode
        self.done.append((guest, mode))

    def read(self) -> HostReading:
        self.reads += 1
        if then := self.at.get(self.reads):
            then()
        # A hundred requests a second; a guest that may work makes ten tokens in one.
        served_s = self.now_s - self.counts_from_s
        return reading(100 * served_s, tokens=10 * served_s)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self, plan: Plan = PLAN) -> list[PairRead]:
        made = ComparisonRun(plan, self, self.read, self.said.append, ON, OFF, self)
        return made.measure()


def test_all_guests_are_switched_together_and_put_back() -> None:
    world = ComparedNode()
    pairs = world.run()
    assert len(pairs) == PLAN.pairs
    assert all(pair.on.requests == pair.off.requests == 6_000 for pair in pairs)
    orders = {(first, mode) for first, mode in world.done}
    assert orders == {(guest, mode) for guest in GUESTS for mode in (ON, OFF)}
    assert world.modes == dict.fromkeys(GUESTS, ON)
    assert "lending is as it was before" in world.said


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", range(2, 14))
def test_lending_is_put_back_wherever_it_is_interrupted(at: int) -> None:
    world = ComparedNode(at={at: interrupted})
    with pytest.raises(KeyboardInterrupt):
        world.run()
    assert world.modes == dict.fromkeys(GUESTS, ON)


def test_a_stop_that_somebody_sets_meanwhile_stays() -> None:
    world = ComparedNode()

    def stop() -> None:
        world.modes["g0"] = pb.HARVEST_MODE_OFF

    world.at = {5: stop}
    with pytest.raises(RefusedError, match="g0"):
        world.run()
    assert world.modes == {"g0": pb.HARVEST_MODE_OFF, "g1": ON}
    world = ComparedNode()
    world.at = {5: lambda: setattr(world, "cluster", OFF)}
    with pytest.raises(RefusedError, match="stopped lending"):
        world.run()
    assert world.cluster == OFF


def test_a_scheduler_that_is_away_at_the_end_is_waited_for_and_then_the_way_back_is_said() -> None:
    for away_s, back in ((10.0, True), (10_000.0, False)):
        world = ComparedNode()

        def leave(world: ComparedNode = world, away_s: float = away_s) -> None:
            world.modes.update(dict.fromkeys(GUESTS, OFF))
            world.away_until_s = world.now_s + away_s
            raise KeyboardInterrupt

        first_off = 2 + 2 * next(n for n, b in enumerate(blocks_of(PLAN)) if not b.lends)
        world.at = {first_off: leave}
        with pytest.raises(KeyboardInterrupt):
            world.run()
        assert (world.modes == dict.fromkeys(GUESTS, ON)) is back
        assert any("rose resume --replica g0" in line for line in world.said) is not back


def test_nothing_is_switched_where_there_is_nothing_to_compare() -> None:
    for world in (
        ComparedNode(modes={}),
        ComparedNode(cluster=OFF),
        ComparedNode(modes={"g0": OFF, "g1": ON}),
    ):
        with pytest.raises(RefusedError):
            world.run()
        assert not world.done


def test_a_guest_that_keeps_its_lease_ends_it() -> None:
    world = ComparedNode(leased=frozenset({"g1"}))
    with pytest.raises(UnavailableError, match="g1"):
        world.run()
    assert world.modes == dict.fromkeys(GUESTS, ON)


def test_a_pair_in_which_the_daemon_restarted_does_not_count() -> None:
    world = ComparedNode()
    world.at = {3: lambda: setattr(world, "counts_from_s", world.now_s)}
    assert len(world.run()) == PLAN.pairs - 1
    assert any("does not count" in line for line in world.said)


# ---- the verdict ----


def pairs_of(count: int, requests: float, on_s: float = 0.1, met: float = 1.0) -> list[PairRead]:
    # No two blocks are alike; what is the same in both arms is no difference.
    return [
        PairRead(
            reading(requests, on_s * (1 + n % 3 / 10), met, tokens=5.0),
            reading(requests, 0.1 * (1 + n % 3 / 10)),
        )
        for n in range(count)
    ]


def test_a_host_that_feels_nothing_holds_and_one_that_does_fails() -> None:
    same = compared(pairs_of(12, 500), ComparisonLimits(), 0)
    assert same.verdict is Verdict.HOLDS
    assert compared(pairs_of(12, 500, on_s=0.12), ComparisonLimits(), 0).verdict is Verdict.FAILS
    assert compared(pairs_of(12, 500, met=0.99), ComparisonLimits(), 0).verdict is Verdict.FAILS
    mixed = pairs_of(6, 500, on_s=0.13) + pairs_of(6, 500, on_s=0.08)
    assert compared(mixed, ComparisonLimits(), 0).verdict is Verdict.OPEN


def test_too_little_is_no_verdict_and_says_how_much_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = compared(pairs_of(MIN_PAIRS, 100), ComparisonLimits(), 0)
    assert few.missing == f"{MIN_REQUESTS - 600} more requests in each arm: at this rate --pairs 10"
    assert few.verdict is Verdict.OPEN
    assert not any(each.estimate for each in few.findings)
    show(few)
    assert "no verdict: missing 400 more requests" in capsys.readouterr().out
    assert "2 more pairs" in compared(pairs_of(MIN_PAIRS - 2, 5_000), ComparisonLimits(), 0).missing
    assert "requests" in compared([], ComparisonLimits(), 0).missing
    idle = [PairRead(reading(500), reading(500))] * 12
    assert "guest that worked" in compared(idle, ComparisonLimits(), 0).missing


def test_percentiles_decide_nothing_and_the_99th_needs_requests() -> None:
    found = {
        each.name: each for each in compared(pairs_of(12, 500), ComparisonLimits(), 0).findings
    }
    assert found["TTFT p50 (buckets)"].estimate is not None
    assert found["TTFT p99 (buckets)"].estimate is None
    many = compared(pairs_of(12, MIN_REQUESTS_FOR_P99 / 10), ComparisonLimits(), 0)
    p99 = next(each for each in many.findings if each.name == "TTFT p99 (buckets)")
    assert p99.estimate is not None
    assert p99.verdict is Verdict.SHOWN
    late = [PairRead(reading(500, 9.0, tokens=1), reading(500, 9.0))] * 12
    beyond = next(e for e in compared(late, ComparisonLimits(), 0).findings if "p90" in e.name)
    assert beyond.on is None, "beyond the last bound nobody knows"


def test_a_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show(compared(pairs_of(12, 500, on_s=0.12), ComparisonLimits(), 0))
    said = capsys.readouterr().out
    assert "1.200x" in said
    assert "verdict: FAILS" in said
