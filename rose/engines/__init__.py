"""Engines as processes: their specification, each kind's command line, their start and end."""

from rose.engines.launch import (
    EngineProcess,
    check_host,
    check_profile,
    check_spec,
    process_spec,
    share_of,
    weight_bytes,
)
from rose.engines.spec import Device, EngineKind, EngineRole, EngineSpec, module_path

__all__ = [
    "Device",
    "EngineKind",
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
