"""Latency targets, measured latencies, and the slack between them that may be lent.

Targets, per-request latencies, step-time prediction, error budgets and load
forecasts. All of it pure: clocks are handed in, nothing is read or written. Imports nothing of ROSE
and nothing but the standard library, so that it may live inside a production engine; parsing a
scrape needs prometheus_client and fitting a profile needs numpy, each imported when first called.
"""

from slo.engine_metrics import Scrape, parse_scrape
from slo.error_budget import RULES, BurnAlert, BurnRule, ErrorBudget
from slo.errors import ProfileError, ScrapeError, SloError, TargetError, UnknownPresetError
from slo.histogram import Histogram, percentile
from slo.load_forecast import LoadForecast
from slo.step_time import StepModel, StepProfile, StepSample, fit_profile
from slo.targets import (
    PRESETS,
    Attainment,
    Met,
    RequestLatency,
    SloSpec,
    attainment,
    goodput_rps,
    preset,
)

__all__ = [
    "PRESETS",
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
    "parse_scrape",
    "percentile",
    "preset",
]
