"""`rose advise`: usage as engines count it, requests like it, and one line for each bad input."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from rose.advise.advice import MOST_HOURS, MOST_REQUESTS, Assumed, UsageTraffic, advice_of
from rose.advise.page import page_of
from rose.advise.usage import DeploymentUsage, PrometheusHistory, UsageStep, watched_usages
from rose.cli.main import main as rose
from rose.errors import ConfigError
from tests.harness.programs.prometheus import needs_prometheus, prometheus

NO_RULES = "groups: []\n"


class StandInEngines:
    """Exporters of one vLLM, busy in every other look, and of one idle SGLang."""

    def __init__(self) -> None:
        self.looks = 0

    def vllm(self) -> str:
        self.looks += 1
        labels = '{model_name="Qwen3-8B",engine="0"}'
        lines = [
            f"vllm:num_requests_running{labels} {self.looks % 2}.0",
            f"vllm:request_success_total{labels} {4 * self.looks}.0",
            f"vllm:prompt_tokens_total{labels} {400 * self.looks}.0",
            f"vllm:generation_tokens_total{labels} {80 * self.looks}.0",
        ]
        for bound in ("0.1", "0.5", "+Inf"):
            count = 4 * self.looks if bound != "0.1" else 0
            lines.append(
                f'vllm:time_to_first_token_seconds_bucket{{model_name="Qwen3-8B",le="{bound}"}}'
                f" {count}.0"
            )
        return "\n".join(lines) + "\n"

    def sglang(self) -> str:
        return 'sglang:num_running_reqs{model_name="llama-70b"} 0.0\n'


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[], str]], str]]:
    """Serve what a function returns at every path; returns the address."""
    servers = []

    def start(text: Callable[[], str]) -> str:
        class MetricsHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), MetricsHandler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def moments(count: int, requests: float) -> tuple[UsageStep, ...]:
    return tuple(
        UsageStep(60.0 * n, 2, 0.5, requests, 100 * requests, 20 * requests) for n in range(count)
    )


def test_requests_are_as_dense_and_long_as_the_engines_counted_them() -> None:
    drawn = list(UsageTraffic(moments(60, 2.0), 60.0).requests(0))
    assert drawn == list(UsageTraffic(moments(60, 2.0), 60.0).requests(0))
    assert len(drawn) == pytest.approx(7_200, rel=0.05)
    assert {(each.prompt_tokens, each.output_tokens) for each in drawn} == {(100, 20)}
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(drawn))


def test_a_long_history_is_thinned_to_hours_of_all_of_it() -> None:
    for rate in (0.1, 20.0):
        drawn = list(UsageTraffic(moments(7 * 24 * 60, rate), 60.0).requests(0))
        assert drawn[-1].arrival_s <= MOST_HOURS * 3_600
        assert len(drawn) < 1.1 * MOST_REQUESTS


def test_idle_gpu_hours_are_the_measured_share_of_all_gpus() -> None:
    usage = DeploymentUsage("chat", "Qwen3-8B", 60.0, 7 * 86_400.0, moments(7 * 24 * 60, 0.02))
    advice = advice_of([usage, usage], Assumed(cards=1, price=2.0))
    assert advice.gpus == 4
    assert advice.idle_gpu_hours_a_day == pytest.approx(4 * 24 * 0.5)
    assert advice.money_a_day == pytest.approx(2.0 * advice.saved_a_day)
    each = advice.deployments[0]
    assert each.answer is not None
    assert each.answer.harvested_tokens_a_day > 0
    # A request in 50 s does not keep hosts half busy: the simulated ones are not the measured.
    assert any("far from the measured 50%" in line for line in each.sure)


def test_a_deployment_without_requests_is_measured_and_not_simulated() -> None:
    usage = DeploymentUsage("chat", "Qwen3-8B", 60.0, 3_600.0, moments(60, 0.0))
    (each,) = advice_of([usage], Assumed()).deployments
    assert each.answer is None
    assert each.idle_gpu_hours_a_day == pytest.approx(24)
    assert each.trouble.startswith("no request finished")


@pytest.mark.parametrize(
    ("model", "table"),
    [
        ("Qwen3-8B", "8b"),
        ("meta/Llama-3-70B-Instruct", "70b"),
        ("qwen2.5-0.5b", "8b"),
        ("x-27b", "32b"),
    ],
)
def test_a_model_has_the_published_table_nearest_to_its_size(model: str, table: str) -> None:
    assert Assumed().table(model) == table
    assert Assumed(tables=((model, "70b"),)).table(model) == "70b"
    assert Assumed(tables=(("", "32b"),)).table(model) == "32b"


def test_a_model_of_no_known_size_says_which_option_to_add() -> None:
    with pytest.raises(ConfigError, match="add --model chat=TABLE with one of 8b, 32b, 70b"):
        Assumed().table("chat")


def test_engines_are_read_for_a_while_without_a_prometheus() -> None:
    engines = StandInEngines()
    texts = {"http://a/metrics": engines.vllm, "http://b/metrics": engines.sglang}
    vllm, sglang = watched_usages(list(texts), 20.0, 5.0, lambda url: texts[url](), lambda _: None)
    assert (vllm.model, vllm.idle, vllm.moments[0].requests) == ("Qwen3-8B", 0.4, 0.8)
    assert vllm.moments[0].prompt_tokens / vllm.moments[0].requests == 100
    assert (sglang.model, sglang.idle, sglang.engines) == ("llama-70b", 1.0, 1.0)


@needs_prometheus
def test_a_real_prometheus_tells_of_deployments_of_both_engines(
    tmp_path: Path, serve: Callable[[Callable[[], str]], str]
) -> None:
    engines = StandInEngines()
    rules = tmp_path / "rules.yaml"
    rules.write_text(NO_RULES)
    targets = {"vllm": serve(engines.vllm), "sglang": serve(engines.sglang)}
    with prometheus(tmp_path, targets, rules) as running:
        until_s = time.monotonic() + 30
        while engines.looks < 14 and time.monotonic() < until_s:
            time.sleep(0.2)
        history = PrometheusHistory(running.url, ["model_name"])
        usages = {each.model: each for each in history.usages(1 / 24, time.time())}
    assert set(usages) == {"Qwen3-8B", "llama-70b"}
    vllm = usages["Qwen3-8B"]
    assert (vllm.engines, usages["llama-70b"].idle) == (1, 1.0)
    assert vllm.moments[-1].prompt_tokens / vllm.moments[-1].requests == pytest.approx(100)
    assert vllm.ttft_p99_s == pytest.approx(0.5, abs=0.01)


def test_a_page_shows_each_deployment_and_believes_no_name(tmp_path: Path) -> None:
    usage = DeploymentUsage("<script>", "Qwen3-8B", 60.0, 3_600.0, moments(60, 0.5), 0.25, 0.01)
    page = page_of(advice_of([usage], Assumed(price=3.0)), "today")
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert page.count("<rect") == 60
    assert "0.250 s" in page


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{minute:02d}:00.0000000,800,20\n" for minute in range(30)
)


def test_a_trace_is_advice_too_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    words = ["advise", "--trace", str(tmp_path / "trace.csv"), "--gpus", "2", "--model", "8b"]
    assert rose([*words, "--price", "2", "-o", "json", "--out", str(tmp_path / "page.html")]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["gpus"] == 2
    assert advice["idle_gpu_hours_a_day"] > 47
    assert advice["money_a_day"] == pytest.approx(2 * advice["gpu_hours_saved_a_day"])
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--prometheus", "prometheus:9090"], 2, "give http://HOST:PORT"),
        (["--prometheus", "http://127.0.0.1:1"], 4, "is it Prometheus's address?"),
        (["--prometheus", "http://{engine}"], 4, "does not answer as Prometheus does"),
        (["--prometheus", "http://{torn}"], 4, "does not answer as Prometheus does"),
        (["--prometheus", "http://{engine}", "--days", "0"], 2, "--days is 0; give a number"),
        (["--prometheus", "http://{empty}"], 2, "has no series of vLLM"),
        (["--metrics", "http://127.0.0.1:1/metrics"], 4, "does not answer"),
        (["--metrics", "http://{page}/metrics"], 2, "not Prometheus text"),
        (["--metrics", "http://{engine}", "--for-s", "1"], 2, "--for-s is 1; give 5 seconds"),
        (["--trace", "{folder}/trace.csv"], 2, "--gpus is missing"),
        (["--trace", "{folder}/none.csv", "--gpus", "1"], 2, "cannot be read as a trace"),
        (["--trace", "{folder}/trace.csv", "--gpus", "1"], 2, "add --model NAME=TABLE"),
        (["--trace", "{folder}/trace.csv", "--gpus", "1", "--cards", "0"], 2, "--cards is 0"),
        (
            ["--trace", "{folder}/trace.csv", "--gpus", "1", "--out", "{folder}"],
            2,
            "is there already",
        ),
        (["--prometheus", "http://{empty}", "--token-file", "{folder}/none"], 2, "--token-file"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    code: int,
    line: str,
    tmp_path: Path,
    serve: Callable[[Callable[[], str]], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    served = {
        "engine": serve(StandInEngines().vllm),
        "page": serve(lambda: "<html>"),
        "torn": serve(lambda: '{"data": {"result": [{"metric": {}, "values": [[1]]}]}}'),
        "empty": serve(lambda: '{"status": "success", "data": {"result": []}}'),
        "folder": str(tmp_path),
    }
    assert rose(["advise", *(word.format(**served) for word in words)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert line in said.err
    assert "Traceback" not in said.err
