"""Latency targets, measured latencies, slack and step-time prediction. Imports nothing of ROSE."""

from slo.attainment import Attainment, attainment, goodput_rps
from slo.latency import RequestLatency, percentile
from slo.predictor import StepModel
from slo.slack import (
    NO_DEADLINE,
    Slack,
    decode_deadline_ns,
    dual_slack,
    prefill_deadline_ns,
    slack_until,
)
from slo.spec import PRESETS, SloSpec, UnknownPresetError, preset

__all__ = [
    "NO_DEADLINE",
    "PRESETS",
    "Attainment",
    "RequestLatency",
    "Slack",
    "SloSpec",
    "StepModel",
    "UnknownPresetError",
    "attainment",
    "decode_deadline_ns",
    "dual_slack",
    "goodput_rps",
    "percentile",
    "prefill_deadline_ns",
    "preset",
    "slack_until",
]
