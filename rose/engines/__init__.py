"""Engines as processes: what to start, how vLLM is told, and how a start ends."""

from rose.engines.launch import EngineProcess
from rose.engines.preflight import check_host, check_profile, check_spec
from rose.engines.spec import EngineRole, EngineSpec
from rose.engines.vllm import process_spec

__all__ = [
    "EngineProcess",
    "EngineRole",
    "EngineSpec",
    "check_host",
    "check_profile",
    "check_spec",
    "process_spec",
]
