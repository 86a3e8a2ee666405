"""Latency targets, measured latencies, and the slack between them that may be lent.

Targets, per-request latencies, sketches, step-time prediction, error budgets and load
forecasts. All of it pure: clocks are handed in, nothing is read or written. Imports nothing of ROSE
and nothing but the standard library, so that it may live inside a production engine; parsing a
scrape alone needs prometheus_client, and imports it when first called.
"""

from slo.engine_metrics import Scrape, parse_scrape
from slo.error_budget import RULES, BurnAlert, BurnRule, ErrorBudget
from slo.errors import (
    ProfileError,
    ScrapeError,
    SketchError,
    SloError,
    TargetError,
    UnknownPresetError,
)
from slo.histogram import Histogram, latency_bounds_s, percentile
from slo.load_forecast import LoadForecast
from slo.request_latency import Attainment, Met, RequestLatency, attainment, goodput_rps
from slo.sketch import RELATIVE_ERROR, Sketch, SlidingSketch
from slo.step_time import StepModel, StepProfile, StepSample, fit_profile
from slo.targets import PRESETS, SloSpec, preset

__all__ = [
    "PRESETS",
    "RELATIVE_ERROR",
    "RULES",
    "Attainment",
    "BurnAlert",
    "BurnRule",
    "ErrorBudget",
    "Histogram",
    "LoadForecast",
    "Met",
    "ProfileError",
    "RequestLatency",
    "Scrape",
    "ScrapeError",
    "Sketch",
    "SketchError",
    "SlidingSketch",
    "SloError",
    "SloSpec",
    "StepModel",
    "StepProfile",
    "StepSample",
    "TargetError",
    "UnknownPresetError",
    "attainment",
    "fit_profile",
    "goodput_rps",
    "latency_bounds_s",
    "parse_scrape",
    "percentile",
    "preset",
]
