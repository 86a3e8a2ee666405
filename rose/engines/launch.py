"""Launch of an engine: checks before the start, each failure in one line, and the process itself.

The process is started, awaited until it answers, and ended whole.
"""

import asyncio
import importlib.util
import os
import re
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import psutil

from rose.contract.replica import STATE, ReplicaState
from rose.engines.process import process_spec
from rose.engines.spec import Device, EngineKind, EngineRole, EngineSpec
from rose.errors import BAD_BYTES, ConfigError, EngineStartError
from rose.process.child import AdoptedProcess, Keep, ManagedProcess, ProcessGroup
from rose.process.procfs import ProcessIdentity
from slo import ProfileError, StepProfile

SHARED_MEMORY = "/dev/shm"  # noqa: S108 -- nothing stays in it
MIN_FREE_BYTES_PER_ENGINE = 1_600 << 20
PYTHON_TIMEOUT_S = 30.0
# A plugin may import torch and vLLM, on a busy machine.
PLUGINS_TIMEOUT_S = 120.0
# Run by an engine's interpreter: prints the first thing that it lacks. Imports nothing large.
_LOOK = """
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
engine, group = sys.argv[1:]
lacking = [name for name in (engine, "rose", "msgspec") if find_spec(name) is None]
if not any(entry_points(group=group, name="rose_host")):
    lacking.append("plugins of ROSE")
print(*lacking[:1])
"""
_PLUGIN_GROUPS: Final = {
    EngineKind.VLLM: "vllm.stat_logger_plugins",
    EngineKind.SGLANG: "sglang.srt.plugins",
}

# Also run by it: prints each plugin that cannot be imported. Calls none of them.
_LOOK_AT_PLUGINS = """
import json
import sys
from importlib.metadata import entry_points
broken = []
for point in entry_points(group=sys.argv[1]):
    try:
        point.load()
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        dist = point.dist
        broken.append({
            "name": point.name,
            "module": point.module,
            "distribution": dist.name if dist else "unknown",
            "folder": str(dist.locate_file("")) if dist else "sys.path",
            "why": f"{type(error).__name__}: {first}",
        })
print("\\n" + json.dumps(broken))
"""


class BrokenPlugin(msgspec.Struct, frozen=True):
    """A plugin of an engine that cannot be imported; every engine logs it and runs without.

    folder: of the metadata that names it, which an earlier installation may have left.
    """

    name: str
    module: str
    distribution: str
    folder: str
    why: str


_LOADED: Final = {
    EngineKind.VLLM: "vllm.general_plugins",
    EngineKind.SGLANG: "sglang.srt.plugins",
}


def broken_plugins(
    python: str, env: Mapping[str, str], engine: EngineKind = EngineKind.VLLM
) -> list[BrokenPlugin]:
    """Return the plugins of an engine that an interpreter lists and cannot import.

    Raises OSError, TimeoutExpired or DecodeError if the interpreter gives no answer.
    """
    found = subprocess.run(  # noqa: S603 -- the operator's own interpreter
        [python, "-c", _LOOK_AT_PLUGINS, _LOADED[engine]],
        env={**os.environ, **env},
        capture_output=True,
        timeout=PLUGINS_TIMEOUT_S,
        check=False,
    )
    # A plugin may print while it is imported.
    last = found.stdout.strip().rpartition(b"\n")[2]
    return msgspec.json.decode(last, type=list[BrokenPlugin])


def check_host(engines: int) -> None:
    """Raise unless vLLM is installed and memory for this many engines is free."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineStartError("vLLM is not installed here; run `make install`")
    check_memory(f"{engines} engines", engines * MIN_FREE_BYTES_PER_ENGINE)


def check_memory(what: str, needed_bytes: int, headroom_bytes: int = 0) -> None:
    """Raise unless this much memory can be had without swapping, and the headroom stays free.

    Engines' processes talk through shared memory, too: it must be writable, which is checked first.
    """
    try:
        tempfile.TemporaryFile(dir=SHARED_MEMORY).close()
    except OSError as error:
        raise EngineStartError(
            f"{what} need {SHARED_MEMORY}, which cannot be written ({error.strerror}); mount a"
            " tmpfs there: in a pod an emptyDir of medium Memory"
        ) from error
    available = psutil.virtual_memory().available - headroom_bytes
    if available < needed_bytes:
        beyond = f" beyond the headroom of {headroom_bytes / 2**30:.1f}" if headroom_bytes else ""
        raise EngineStartError(
            f"{what} need {needed_bytes / 2**30:.1f} GiB of free memory and"
            f" {max(0, available) / 2**30:.1f} GiB are free{beyond}; stop something, lower kv_bytes"
            " or use a larger machine"
        )


def engine_bytes(model_dir: Path, kv_bytes: int) -> int:
    """Return the memory to expect of an engine: processes, weights as on disk, KV cache."""
    return MIN_FREE_BYTES_PER_ENGINE + weight_bytes(model_dir) + kv_bytes


def weight_bytes(model_dir: Path) -> int:
    """Return the bytes of a model's weight files; 0 if it has none."""
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


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
    """Raise unless the engine's interpreter finds the engine, ROSE and ROSE's plugins."""
    try:
        found = subprocess.run(  # noqa: S603 -- the operator's own interpreter
            [spec.interpreter, "-c", _LOOK, spec.engine, _PLUGIN_GROUPS[spec.engine]],
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


# Options that break a promise of every role, and of replicas, each with its meaning.
_REFUSED: Final[Mapping[EngineKind, Mapping[str, str]]] = {
    EngineKind.VLLM: {},
    EngineKind.SGLANG: {
        "--speculative-algorithm": "speculative decoding",
        "--speculative-draft-model-path": "speculative decoding",
        "--disaggregation-mode": "disaggregated prefill and decode",
        "--dllm-algorithm": "diffusion models",
    },
}
_REFUSED_IN_REPLICAS: Final[Mapping[EngineKind, Mapping[str, str]]] = {
    EngineKind.VLLM: {
        "--speculative-config": "speculative decoding",
        "--kv-transfer-config": "disaggregated prefill and decode",
        "--logits-processors": "custom samplers",
        "--enable-lora": "LoRA adapters",
    },
    EngineKind.SGLANG: {
        "--enable-custom-logit-processor": "custom samplers",
        "--enable-lora": "LoRA adapters",
        "--enable-hierarchical-cache": "the hierarchical cache",
        "--enable-lmcache": "LMCache",
    },
}
_NAMES: Final = {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}


def check_sglang(spec: EngineSpec) -> None:
    """Raise if SGLang is not installed."""
    if spec.python is None and importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            f"engine {spec.name} is SGLang, which {spec.interpreter} does not have; name its"
            " interpreter (`make install-sglang` makes .venv-sglang/bin/python)"
        )


def check_options(spec: EngineSpec) -> None:
    """Raise for an option that breaks a promise of this role."""
    more = _REFUSED_IN_REPLICAS[spec.engine] if spec.role.is_replica else {}
    refused = {**_REFUSED[spec.engine], **more}
    for given in () if spec.role is EngineRole.STOCK else spec.extra_args:
        option = given.partition("=")[0].partition(".")[0].replace("_", "-")
        if option in refused:
            raise ConfigError(
                f"engine {spec.name}: a {spec.role} on {_NAMES[spec.engine]} does not have"
                f" {refused[option]}; leave out {option}"
            )


def check_spec(spec: EngineSpec) -> None:
    """Raise if the engine could not start: interpreter, model, profiles, port, memory."""
    if spec.python is not None:
        check_python(spec)
    if spec.engine is EngineKind.SGLANG:
        check_sglang(spec)
    check_options(spec)
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


POLL_INTERVAL_S = 0.25
POLL_TIMEOUT_S = 2.0
# In a row, while an engine warms up: its API process may share a busy core.
MISSED_STATES = 30
LOG_TAIL_BYTES = 64 << 10
SECRET = "ROSE_REPLICA_SECRET"  # noqa: S105 -- the name of a variable
_STATE = msgspec.json.Decoder(ReplicaState)
_SECRET_BYTES = 32
_PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s*(?:ERROR \S+ \S+ \[\S+\]\s*)?")
_MEANINGFUL = re.compile(r"^(?:\w+\.)*\w*(Error|Exception)\b.*: .+")


class EngineProcess:
    """A running engine. secret: required of callers that control it as a replica."""

    def __init__(self, spec: EngineSpec, process: ProcessGroup, secret: str = "") -> None:
        self.spec = spec
        self.process = process
        self.secret = secret

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a control request."""
        return {"Authorization": f"Bearer {self.secret}"}

    @classmethod
    async def start(cls, spec: EngineSpec, keep: Keep | None = None) -> "EngineProcess":
        """Start the engine without waiting for it. Raises ConfigError if it could not work.

        keep: lets it outlive this process for a while; None ends it with this process.
        """
        check_spec(spec)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        secret = secrets.token_hex(_SECRET_BYTES)
        process = process_spec(spec)
        # New for each process and in no command line: only its user can read its environment.
        process = replace(process, keep=keep, env={**process.env, SECRET: secret})
        return cls(spec, await ManagedProcess.start(process), secret)

    @classmethod
    def adopt(
        cls, spec: EngineSpec, identity: ProcessIdentity, secret: str = ""
    ) -> "EngineProcess":
        """Take over an engine that an earlier process started as `spec`."""
        return cls(spec, AdoptedProcess(identity), secret)

    async def wait_healthy(
        self, timeout_s: float, held_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once it serves and is warm. Raises EngineStartError if it ends or takes too long.

        A replica must answer at ROSE's endpoint too: vLLM serves on without a plugin that failed.
        Its warm-up has a bound of its own, which pauses while the host leaves it no time.
        held_up: returns True while it may not run, so that this time does not count.
        """
        now_s = asyncio.get_running_loop().time
        left_s, looked_s = timeout_s, now_s()
        timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while left_s > 0:
                self._check_alive()
                if await _answers(session, f"{self.spec.url}/health"):
                    if self.spec.role.is_replica:
                        await self._wait_warm(session)
                    return
                await asyncio.sleep(POLL_INTERVAL_S)
                left_s -= 0 if held_up() else now_s() - looked_s
                looked_s = now_s()
        raise EngineStartError(
            f"engine {self.spec.name} did not answer within {timeout_s:.0f} s; see {self.spec.log}"
        )

    async def warms_up(self) -> bool:
        """Return True if the engine answers that its warm-up continues."""
        timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            state = await _state(session, self.spec.url) if self.spec.role.is_replica else None
        return state is not None and not state.warm

    def _check_alive(self) -> None:
        if self.process.returncode is not None:
            raise EngineStartError(
                f"engine {self.spec.name} ended at start (exit {self.process.returncode}):"
                f" {self.last_words()}; see {self.spec.log}"
            )

    async def _wait_warm(self, session: aiohttp.ClientSession) -> None:
        if await _state(session, self.spec.url) is None:
            raise EngineStartError(
                f"engine {self.spec.name} serves without ROSE's endpoint: {self.last_words()};"
                f" see {self.spec.log}"
            )
        missed = 0
        while missed < MISSED_STATES:
            self._check_alive()
            state = await _state(session, self.spec.url)
            if state is not None and state.warm:
                return
            if state is not None and state.warm_up.failed:
                raise EngineStartError(
                    f"engine {self.spec.name} is not warm: {state.warm_up.said};"
                    f" see {self.spec.log}"
                )
            missed = missed + 1 if state is None else 0
            await asyncio.sleep(POLL_INTERVAL_S)
        raise EngineStartError(
            f"engine {self.spec.name} stopped answering in its warm-up; see {self.spec.log}"
        )

    def last_words(self) -> str:
        """Return the line of the log that best explains the engine's end."""
        try:
            tail = self.spec.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return "it wrote no log"
        lines = [_PREFIX.sub("", line).strip() for line in tail.splitlines()]
        meaningful = [line for line in lines if _MEANINGFUL.match(line)]
        # The first error is the cause; later ones are its consequences.
        return (meaningful[:1] or [line for line in lines if line][-1:] or ["it wrote no log"])[0]

    async def stop(self) -> None:
        """End it and all processes that it started."""
        await self.process.stop()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _state(session: aiohttp.ClientSession, url: str) -> ReplicaState | None:
    """Return a replica's state, None if it has none."""
    try:
        async with session.get(url + STATE) as response:
            return _STATE.decode(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, *BAD_BYTES):
        return None
