"""What can be known to be wrong before an engine is started, said in one line each."""

import importlib.util
import os
import socket
import subprocess
from pathlib import Path

import psutil

from rose.engines.spec import Device, EngineSpec
from rose.errors import ConfigError, EngineStartError
from slo import ProfileError, StepProfile

MIN_FREE_BYTES_PER_ENGINE = 1_600 << 20
PYTHON_TIMEOUT_S = 30.0
# Run by an engine's interpreter: prints the first thing that it lacks. Imports nothing large.
_LOOK = """
from importlib.metadata import entry_points
from importlib.util import find_spec
lacking = [name for name in ("vllm", "rose", "msgspec") if find_spec(name) is None]
if not any(entry_points(group="vllm.stat_logger_plugins", name="rose_host")):
    lacking.append("plugins of ROSE")
print(*lacking[:1])
"""


def check_host(engines: int) -> None:
    """Raise unless vLLM is installed and memory for so many engines is free."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineStartError("vLLM is not installed here; run `make install`")
    check_memory(f"{engines} engines", engines * MIN_FREE_BYTES_PER_ENGINE)


def check_memory(what: str, needed_bytes: int, headroom_bytes: int = 0) -> None:
    """Raise unless so much memory can be had without swapping, and the headroom stays free."""
    available = psutil.virtual_memory().available - headroom_bytes
    if available < needed_bytes:
        beyond = f" beyond the headroom of {headroom_bytes / 2**30:.1f}" if headroom_bytes else ""
        raise EngineStartError(
            f"{what} need {needed_bytes / 2**30:.1f} GiB of free memory and"
            f" {max(0, available) / 2**30:.1f} GiB are free{beyond}; stop something, lower kv_bytes"
            " or use a larger machine"
        )


def engine_bytes(model_dir: Path, kv_bytes: int) -> int:
    """Memory to expect of an engine: processes, weights as they lie on disk, KV cache."""
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return MIN_FREE_BYTES_PER_ENGINE + weights + kv_bytes


def check_port(port: int, owner: str) -> None:
    """Raise unless the loopback port can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} ({owner}) is busy: {error.strerror}; choose another with --port-base"
            ) from error


def check_model(model_dir: Path, *, weights: bool = True) -> None:
    """Raise unless the folder holds a model and its tokenizer; without `weights` no tensors."""
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            raise ConfigError(f"{model_dir} has no {name}; give a folder in Hugging Face's layout")
    if weights and not any(model_dir.glob("*.safetensors")):
        raise ConfigError(
            f"{model_dir} has no *.safetensors; give a folder in Hugging Face's layout"
        )


def check_profile(path: Path) -> None:
    """Raise unless the file holds a step profile."""
    try:
        StepProfile.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"step profile {path} cannot be read: {error.strerror}") from error
    except (ProfileError, UnicodeDecodeError) as error:
        raise ConfigError(f"step profile {path}: {error}") from error


def check_python(spec: EngineSpec) -> None:
    """Raise unless the engine's interpreter finds vLLM, ROSE and ROSE's plugins."""
    try:
        found = subprocess.run(  # noqa: S603 -- the operator's own interpreter
            [spec.interpreter, "-c", _LOOK],
            env={**os.environ, **spec.extra_env},
            capture_output=True,
            text=True,
            timeout=PYTHON_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"engine {spec.name}: {spec.interpreter} does not run: {error}"
        ) from error
    if found.returncode:
        last = (found.stderr.strip().splitlines() or [f"exit {found.returncode}"])[-1]
        raise ConfigError(f"engine {spec.name}: {spec.interpreter} does not run: {last}")
    lacking = found.stdout.strip()
    if lacking:
        raise ConfigError(
            f"engine {spec.name}: {spec.interpreter} has no {lacking}; install it there, or name"
            " ROSE's source tree in PYTHONPATH (rose.engines.module_path)"
        )


def check_spec(spec: EngineSpec) -> None:
    """Raise when the engine could not start: interpreter, model, profiles, port, memory."""
    if spec.python is not None:
        check_python(spec)
    dummy = spec.load_format == "dummy"
    check_model(spec.model_dir, weights=not dummy)
    for profile in (spec.step_profile, spec.host_step_profile):
        if profile is not None:
            check_profile(profile)
    check_port(spec.port, spec.name)
    if spec.device is Device.CUDA:
        needed, what = MIN_FREE_BYTES_PER_ENGINE, "processes"
    else:
        needed, what = engine_bytes(spec.model_dir, spec.kv_bytes), "processes, weights and KV"
    check_memory(f"engine {spec.name}: {what}", needed, spec.headroom_bytes)
