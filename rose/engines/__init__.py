"""Engines as processes: what to start, how vLLM is told, and how a start ends."""

from rose.engines.launch import EngineProcess
from rose.engines.preflight import check_host, check_profile, check_spec
from rose.engines.source_tree import module_path
from rose.engines.spec import Device, EngineRole, EngineSpec
from rose.engines.vllm import process_spec

__all__ = [
    "Device",
    "EngineProcess",
    "EngineRole",
    "EngineSpec",
    "check_host",
    "check_profile",
    "check_spec",
    "module_path",
    "process_spec",
]
