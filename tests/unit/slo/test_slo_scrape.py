"""Every engine's metrics become the same few quantities, through restarts too."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scrape_cases import gauge, histogram, old_vllm, page, sglang, vllm

from slo import Histogram, ScrapeError, parse_scrape
from slo.engine_metrics import ENGINES


def test_todays_vllm_is_read() -> None:
    seen = parse_scrape(vllm(requests=10))
    assert seen.engine == "vllm"
    assert seen.ttft == Histogram((0.5, 1.0), (5, 10, 10), 6.0)
    assert seen.itl is not None
    assert seen.itl.count == 100
    assert seen.tpot is not None
    assert seen.e2e is not None
    assert (seen.running, seen.waiting, seen.kv_usage) == (3, 2, 0.25)
    assert seen.started_s == 1.7e9


def test_old_vllm_calls_gaps_time_per_output_token_and_has_no_per_request_mean() -> None:
    seen = parse_scrape(old_vllm())
    assert seen.itl is not None
    assert (seen.itl.count, seen.tpot, seen.kv_usage) == (40, None, 0.5)
    assert seen.names is not None
    assert seen.names["itl"] == "vllm:time_per_output_token_seconds"
    assert seen.started_s is None


def test_sglang_is_summed_over_streams_and_engines_not_over_ranks_or_priorities() -> None:
    seen = parse_scrape(sglang())
    assert seen.engine == "sglang"
    assert seen.ttft == Histogram((0.4,), (6, 8), 3.0)
    assert (seen.running, seen.waiting, seen.kv_usage) == (10, 1, 0.9)
    assert seen.tpot is None


@pytest.mark.parametrize("rank", ["tp_rank", "pp_rank", "moe_ep_rank"])
def test_requests_that_each_rank_of_an_engine_reports_count_once(rank: str) -> None:
    name = "sglang:time_to_first_token_seconds"
    # The second rank is one request behind; the data-parallel engine beside them is another.
    counts = {(0, 0): 4, (0, 1): 3, (1, 0): 10}
    text = page(
        [
            histogram(name, f'dp_rank="{dp}",{rank}="{each}"', {"0.5": 2, "+Inf": count}, count)
            for (dp, each), count in counts.items()
        ]
    )
    assert parse_scrape(text).ttft == Histogram((0.5,), (4, 14), 14.0)


def test_a_router_s_underscores_are_read_as_colons() -> None:
    assert parse_scrape(vllm().replace("vllm:", "vllm_")) == parse_scrape(vllm())


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_exports_the_newest_names() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text(encoding="utf-8")
    exported = set(re.findall(r'name="(vllm:\w+)"', source))
    newest = {names[0] for names in ENGINES["vllm"].values()}
    assert newest <= exported


def test_what_happened_between_two_scrapes_is_their_difference() -> None:
    fresh = parse_scrape(vllm(requests=16)).since(parse_scrape(vllm(requests=10)))
    assert not fresh.restarted
    assert fresh.ttft is not None
    assert (fresh.ttft.counts, fresh.ttft.sum_s) == ((3, 6, 6), pytest.approx(3.6))
    assert fresh.running == 3


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_restarted_engine_counts_from_zero(before: int, after: int) -> None:
    earlier = parse_scrape(vllm(requests=before, started_s=1.0))
    now = parse_scrape(vllm(requests=after, started_s=2.0))
    fresh = now.since(earlier)
    assert fresh.restarted
    assert fresh.ttft == now.ttft


@given(st.integers(0, 50), st.integers(0, 50))
def test_without_a_start_time_a_fallen_counter_tells(before: int, after: int) -> None:
    def at(requests: int) -> str:
        return re.sub(r".*process_start.*\n", "", vllm(requests))

    fresh = parse_scrape(at(after)).since(parse_scrape(at(before)))
    assert fresh.restarted == (after < before)
    assert fresh.ttft is not None
    assert fresh.ttft.count == (after - before if after >= before else after)


def test_one_fallen_histogram_means_all_start_anew() -> None:
    labels = 'model_name="m"'

    def at(ttft: int, itl: int) -> str:
        return page(
            [
                histogram("sglang:time_to_first_token_seconds", labels, {"1": ttft, "+Inf": ttft}),
                histogram("sglang:inter_token_latency_seconds", labels, {"1": itl, "+Inf": itl}),
            ]
        )

    fresh = parse_scrape(at(2, 500)).since(parse_scrape(at(4, 300)))
    assert fresh.restarted
    assert fresh.itl is not None
    assert fresh.itl.count == 500


def test_histograms_that_appear_are_new_and_ones_that_vanish_mean_a_restart() -> None:
    labels = 'model_name="m"'
    idle = parse_scrape(page([gauge("sglang:num_running_reqs", {labels: 0})]))
    used = parse_scrape(sglang())
    assert idle.ttft is None
    assert used.since(idle).ttft == used.ttft
    assert not used.since(idle).restarted
    assert idle.since(used).restarted


def test_one_model_of_several_can_be_asked_for() -> None:
    text = vllm(requests=4, model="a") + vllm(requests=6, model="b", engine="1")
    asked, whole = parse_scrape(text, model="b").ttft, parse_scrape(text).ttft
    assert asked is not None
    assert whole is not None
    assert (asked.count, whole.count) == (6, 10)
    with pytest.raises(ScrapeError, match=r"no metrics of model 'c'; the engine has a, b"):
        parse_scrape(text, model="c")


def test_label_sets_with_other_buckets_are_summed_where_both_count() -> None:
    name = "vllm:time_to_first_token_seconds"
    text = page(
        [
            histogram(name, 'engine="0"', {"0.5": 1, "1.0": 2, "+Inf": 3}),
            histogram(name, 'engine="1"', {"1.0": 4, "2.0": 5, "+Inf": 6}),
        ]
    )
    assert parse_scrape(text).ttft == Histogram((1.0,), (6, 9), 0.0)


def test_a_gauge_that_is_not_a_number_is_unknown_not_zero() -> None:
    text = page([gauge("sglang:token_usage", {'model_name="m"': float("nan")})])
    assert parse_scrape(text).kv_usage is None
    assert parse_scrape(text).running is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "metrics of no known engine"),
        ("<html>404</html>", "metrics of no known engine"),
        ("tgi_queue_size 3\n", "metrics of no known engine"),
        (vllm() + sglang(), "metrics of sglang and vllm"),
        ("vllm:num_requests_running{a 1\n", "not Prometheus text"),
        ('vllm:time_to_first_token_seconds_bucket{le="1"} 3\n', r"without \+Inf"),
        ('vllm:time_to_first_token_seconds_bucket{le="+Inf"} NaN\n', "not finite"),
        ("vllm:time_to_first_token_seconds_bucket 3\n", "not Prometheus text"),
    ],
)
def test_what_is_not_one_known_engine_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ScrapeError, match=message) as caught:
        parse_scrape(text)
    assert "\n" not in str(caught.value)


def test_two_engines_cannot_be_compared() -> None:
    with pytest.raises(ScrapeError, match="vllm and sglang"):
        parse_scrape(sglang()).since(parse_scrape(vllm()))


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(ScrapeError):
        parse_scrape(text)


def test_importing_slo_loads_nothing_heavy() -> None:
    script = (
        "import sys, slo; heavy = {'prometheus_client', 'numpy', 'msgspec', 'pydantic'}; "
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert loaded.stdout.strip() == "[]"
