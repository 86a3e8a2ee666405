"""The public face, and what an engine process must never load because of it."""

import subprocess
import sys

import executor
import slo

LIGHT = """
import sys
import executor.vllm.host.state_publisher, executor.guest.gate_client
import executor.grant_controller
import executor.guest.kv_balloon, executor.kv.backing
heavy = {"grpc", "fastapi", "aiohttp", "pydantic", "etcd3", "kubernetes", "torch", "vllm"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


def test_public_names() -> None:
    assert set(executor.__all__) == {
        "ControlPage", "DrainedRecords", "ExecutorError", "FreezeReason", "GateLimits",
        "Grant", "GrantController", "GrantMode", "GuardConfig", "GuestState", "HostSeat",
        "HostState", "HostView", "LatencyLane", "LatencyRecord", "LatencyRing", "PageError",
        "PageUnreadable", "PressureLimits", "PressurePolicy", "Run", "SeatState", "Veto",
        "Yield", "decide", "explained",
    }  # fmt: skip
    assert set(slo.__all__) == {
        "PRESETS", "RULES", "Attainment", "BurnAlert", "BurnRule", "ErrorBudget",
        "Histogram", "LoadForecast", "Met", "ProfileError", "RequestLatency", "Scrape",
        "ScrapeError", "SloError", "SloSpec", "StepModel",
        "StepProfile", "StepSample", "TargetError", "UnknownPresetError", "attainment",
        "fit_profile", "goodput_rps", "parse_scrape", "percentile", "preset",
    }  # fmt: skip


def test_nothing_but_the_standard_library_enters_an_engine() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", LIGHT], check=True, capture_output=True, text=True
    )
    assert loaded.stdout.strip() == "[]"
