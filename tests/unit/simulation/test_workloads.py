"""Workloads and step times are what they follow, the same for a seed, and refuse bad files."""

import gzip
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError, RoseError
from rose.simulation import UserRequest
from rose.simulation.engine_specs import (
    StepWork,
    published_engine,
    published_engines,
    read_profile,
)
from rose.simulation.setups import ALFWORLD_32B, FROZEN_LAKE_8B, setup_scenario
from rose.simulation.workloads.amounts import LogNormal, Quantiles
from rose.simulation.workloads.episodes import (
    ALFWORLD,
    CODING_SESSIONS,
    FROZEN_LAKE,
    AgenticSessions,
    SessionFile,
)
from rose.simulation.workloads.traffic import (
    AZURE_CODE_2023,
    CODE_DAY,
    CONVERSATION_DAY,
    Bursts,
    BurstyTraffic,
    DailyShape,
    TraceTraffic,
)
from slo import StepProfile

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DAY = "2023-11-16 18:17:"


def until(requests: Iterator[UserRequest], end_s: float) -> list[UserRequest]:
    return list(itertools.takewhile(lambda request: request.arrival_s < end_s, requests))


def dispersion(requests: list[UserRequest], window_s: float) -> float:
    """Variance over mean of the counts in windows: 1 for a Poisson process."""
    counts = [0] * (int(requests[-1].arrival_s / window_s) + 1)
    for request in requests:
        counts[int(request.arrival_s / window_s)] += 1
    return statistics.pvariance(counts) / statistics.mean(counts)


def test_traffic_is_the_same_for_the_same_seed_in_order_and_at_its_rate() -> None:
    first = until(AZURE_CODE_2023.requests(1), 7_200)
    assert first == until(AZURE_CODE_2023.requests(1), 7_200)
    assert first[:50] != until(AZURE_CODE_2023.requests(2), 7_200)[:50]
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(first))
    assert len(first) / 7_200 == pytest.approx(2.57, rel=0.2)
    assert statistics.median(r.prompt_tokens for r in first) == pytest.approx(1_469, rel=0.1)
    assert statistics.median(r.output_tokens for r in first) == pytest.approx(13, rel=0.15)


def test_bursts_are_as_uneven_as_the_trace_they_follow() -> None:
    # The Azure code trace has 13 in windows of 1 s, 72 in windows of 10 s.
    requests = until(AZURE_CODE_2023.requests(0), 7_200)
    assert 6 < dispersion(requests, 1.0) < 20
    assert 40 < dispersion(requests, 10.0) < 110


@pytest.mark.parametrize("day", [CODE_DAY, CONVERSATION_DAY])
def test_a_day_has_the_published_peak_and_valley_and_a_mean_of_one(day: DailyShape) -> None:
    hours = [day.at(600.0 * k) for k in range(144)]
    assert statistics.mean(hours) == pytest.approx(1, abs=1e-3)
    assert max(hours) == pytest.approx(day.peak, rel=1e-3)
    assert min(hours) == pytest.approx(day.valley, rel=0.02)
    assert day.at(5.5 * 86_400) == pytest.approx(day.weekend * day.at(0.5 * 86_400))


def test_traffic_follows_the_day_from_where_it_starts() -> None:
    night, noon = (
        BurstyTraffic(2.0, LogNormal(9, 0), LogNormal(9, 0), day=CODE_DAY, start_s=hour * 3_600)
        for hour in (1.0, 13.0)
    )
    assert len(until(noon.requests(0), 3_600)) > 10 * len(until(night.requests(0), 3_600))


@given(
    median=st.floats(2, 1e4), sigma=st.floats(0.01, 1.5), cut=st.floats(1.5, 20), seed=st.integers()
)
def test_amounts_stay_within_their_cuts_and_say_their_mean(
    median: float, sigma: float, cut: float, seed: int
) -> None:
    amount = LogNormal(median, sigma, least=median / cut, most=median * cut)
    rng = random.Random(seed)
    drawn = [amount.sample(rng) for _ in range(400)]
    assert all(amount.least <= x <= amount.most for x in drawn)
    error = statistics.pstdev(drawn) / math.sqrt(len(drawn))
    assert statistics.mean(drawn) == pytest.approx(amount.mean, abs=6 * error + 1e-6)


def test_quantiles_are_sampled_as_their_table_says() -> None:
    table = Quantiles(((0.0, 10), (0.5, 20), (1.0, 40)))
    rng = random.Random(0)
    drawn = [table.sample(rng) for _ in range(4_000)]
    assert statistics.median(drawn) == pytest.approx(20, rel=0.05)
    assert statistics.mean(drawn) == pytest.approx(table.mean, rel=0.05)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: LogNormal(math.nan, 1),
        lambda: LogNormal(5, math.inf),
        lambda: Quantiles(((0.0, 1),)),
        lambda: Quantiles(((0.0, 2), (1.0, 1))),
        lambda: DailyShape(peak=0.5, valley=0.2),
        lambda: DailyShape(weekend=math.nan),
        lambda: Bursts(share=1.0),
        lambda: Bursts(length_s=math.nan),
        lambda: BurstyTraffic(math.nan, LogNormal(1, 0), LogNormal(1, 0)),
        lambda: BurstyTraffic(1, LogNormal(1, 0), LogNormal(1, 0), start_s=math.inf),
        lambda: TraceTraffic(Path("x"), speed=0),
    ],
)
def test_impossible_workloads_are_refused(bad: Callable[[], object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- of several types
        bad()


def trace_file(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(HEADER + "".join(line + "\n" for line in lines))
    return path


def test_a_trace_is_replayed_at_another_speed_and_again(tmp_path: Path) -> None:
    path = trace_file(tmp_path, f"{DAY}00,10,2", f"{DAY}04,20,3", f"{DAY}06,30,4")
    once = list(TraceTraffic(path, speed=2.0).requests(0))
    assert [(r.arrival_s, r.prompt_tokens) for r in once] == [(0.0, 10), (2.0, 20), (3.0, 30)]
    path.write_text("\ufeff" + path.read_text().replace("\n", "\n\n"), encoding="utf-8")
    again = list(itertools.islice(TraceTraffic(path, repeat=True).requests(0), 5))
    assert [r.arrival_s for r in again] == [0.0, 4.0, 6.0, 8.0, 12.0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), r":2: TIMESTAMP: no request"),
        ((f"{DAY}05,1,1", f"{DAY}04,1,1"), r":3: TIMESTAMP: .* before the line above"),
        ((f"{DAY}05,1,1", "2023-11-16 20:17:05,1,1"), r":3: TIMESTAMP: nothing for 7200 s"),
        ((f"{DAY}05,0,1",), r":2: ContextTokens is 0"),
        ((f"{DAY}05,1,0",), r":2: GeneratedTokens is 0"),
        ((f"{DAY}05,nan,1",), r":2: ContextTokens is 'nan'"),
        (("nan,1,1",), r":2: TIMESTAMP is 'nan'"),
        ((f"{DAY}05,1",), r":2: 2 columns"),
        ((f"{DAY}05,{'1' * 5_000},1",), r":2: ContextTokens is .* at most"),
        ((f"{DAY}05,100000001,1",), r":2: ContextTokens is .* at most"),
    ],
)
def test_a_bad_trace_is_refused_with_file_line_and_key(
    tmp_path: Path, lines: tuple[str, ...], said: str
) -> None:
    path = trace_file(tmp_path, *lines)
    with pytest.raises(RoseError, match=said) as caught:
        list(TraceTraffic(path).requests(0))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def session_file(path: Path, *turns: list[list[float]]) -> Path:
    lines = [json.dumps({"id": str(n), "turns": each}) for n, each in enumerate(turns)]
    body = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return path


@pytest.mark.parametrize("name", ["sessions.jsonl", "sessions.jsonl.gz"])
def test_sessions_are_read_as_what_each_turn_adds(tmp_path: Path, name: str) -> None:
    path = session_file(
        tmp_path / name,
        # The third turn begins with less than half: the agent summarised.
        [[0, 1_000, 100, 0, 3], [20, 1_300, 50, 17, 2], [900, 9_000, 10, 878, 1],
         [950, 600, 7, 49, 1]],
    )  # fmt: skip
    first, second = SessionFile.read(path).episodes
    assert [(t.observed_tokens, t.output_tokens, t.environment_s) for t in first.turns] == [
        (1_000, 100, 17),
        (200, 50, 300.0),
        (7_650, 10, 0.0),
    ]
    assert [t.observed_tokens for t in second.turns] == [600]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: turns: no session"),
        ('{"id":"a","turns":[[0,1,1,0,0]]}\n{"id":"b"', ":2: no session"),
        ('{"id":"a","turns":[]}', ":1: turns: "),
        ('{"id":"a","turns":[[0,1,0,0,0]]}', r":1: turns\[0\].output is 0"),
        ('{"id":"a","turns":[[0,1,1,0,0],[5,1,1,-3,0]]}', r":1: turns\[1\].think_s is -3"),
        ('{"id":"a","turns":[[9,1,1,0,0],[5,1,1,3,0]]}', r":1: turns\[1\].start_s is 5"),
        ('{"id":"a","turns":[[0,1,1,0,NaN]]}', ":1: no session"),
    ],
)
def test_bad_sessions_are_refused_with_file_line_and_key(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(text)
    with pytest.raises(RoseError, match=said) as caught:
        SessionFile.read(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("workload", [FROZEN_LAKE, ALFWORLD, CODING_SESSIONS])
def test_episodes_do_not_depend_on_what_was_asked_before_and_have_a_long_tail(
    workload: AgenticSessions,
) -> None:
    episodes = [workload.trajectory(0, prompt, sample) for prompt in range(40) for sample in (0, 1)]
    assert workload.trajectory(0, 7, 1) == episodes[15]
    tokens = sorted(episode.output_tokens for episode in episodes)
    assert tokens[-1] > 2 * statistics.median(tokens)
    assert all(episode.turns[-1].environment_s == 0 for episode in episodes)
    assert all(episode.total_tokens <= workload.each.max_context for episode in episodes)


def test_samples_of_a_prompt_share_it_and_its_difficulty() -> None:
    groups = [[FROZEN_LAKE.trajectory(0, prompt, s) for s in range(16)] for prompt in range(60)]
    assert all(len({e.turns[0].observed_tokens for e in group}) == 1 for group in groups)
    shares = [statistics.mean(e.score for e in group) for group in groups]
    assert statistics.mean(shares) == pytest.approx(FROZEN_LAKE.solved, abs=0.15)
    # Some teach nothing: that is what DAPO drops.
    assert any(share in (0, 1) for share in shares)


def test_the_papers_batches() -> None:
    small, large = FROZEN_LAKE_8B.trainer(), ALFWORLD_32B.trainer()
    assert (small.batch, small.samples, large.batch) == (256, 16, 1_024)
    assert setup_scenario("frozen_lake-8b-dapo").trainer.started_groups == 24
    assert large.train_s_per_token == pytest.approx(6 * 32.8e9 / (0.35 * 989e12 * 32))


def test_a_profile_of_rose_profile_gives_the_times_of_its_steps(tmp_path: Path) -> None:
    profile = StepProfile(0.005, 2e-5, 1e-5, 3e-8, samples=40, fit_error=0.03)
    path = tmp_path / "step_profile.json"
    path.write_text(profile.to_json())
    assert read_profile(path) == profile
    engine = replace(published_engine("8b"), profile=profile)
    assert engine.seconds(StepWork(100, 4, 1, 1_000)) == pytest.approx(
        0.005 + 104 * 2e-5 + 5e-5 + 3e-5
    )


@pytest.mark.parametrize("text", ["", "[]", '{"kind":"rose.step_profile","layout":1}', "NaN"])
def test_any_other_file_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(RoseError, match="profile") as caught:
        read_profile(path)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(RoseError, match="cannot be read"):
        read_profile(tmp_path / "none.json")


def test_published_engines_are_plausible_and_named_in_short() -> None:
    for engine in published_engines():
        # A decode step reads the weights once: no card does that faster than its memory.
        least_s = engine.weight_bytes / engine.cards / 4.8e12
        assert engine.seconds(StepWork(0, 1)) > least_s
        assert engine.profile.fit_error < 0.12
        assert engine.kv_tokens > 100_000
    engine = published_engine("70b")
    assert (engine.model, engine.card, engine.cards) == ("llama-3.1-70b", "h200", 4)
    slower = published_engine("llama-3.1-70b", "h100", "sglang")
    assert slower.profile.base_s > engine.profile.base_s
    assert published_engine("8B", cards=2).cards == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": "9b"}, "model 9b: .* llama-3.1-70b, qwen3-32b, qwen3-8b"),
        ({"model": "70b", "card": "b200"}, "card b200: .* h100, h200"),
        ({"model": "70b", "engine": "tgi"}, "engine tgi: .* sglang, vllm"),
        ({"model": "70b", "cards": 3}, "cards 3: .* 4, 8"),
    ],
)
def test_what_no_table_has_is_refused_with_what_there_is(
    asked: dict[str, str | int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        published_engine(**asked)  # type: ignore[arg-type] # of the names above
