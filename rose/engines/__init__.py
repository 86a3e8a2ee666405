"""Engines as processes: their specification, vLLM's command line, their start and their end."""

from rose.engines.launch import EngineProcess, check_host, check_profile, check_spec, weight_bytes
from rose.engines.spec import Device, EngineRole, EngineSpec, module_path, process_spec, share_of

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
    "share_of",
    "weight_bytes",
]
