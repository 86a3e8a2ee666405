"""Launch of an engine: checks before the start, each failure in one line, and the process itself.

The process is started, awaited until it answers, and ended whole. Of its command line and
environment each kind of engine has its own part (`rose.engines.vllm`, `rose.engines.sglang`).
"""

import asyncio
import importlib.util
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import aiohttp
import msgspec
import psutil

from rose.addresses import taken
from rose.contract.replica import STATE, ReplicaState
from rose.engines import sglang, vllm
from rose.engines.spec import Device, EngineKind, EngineRole, EngineSpec
from rose.errors import BAD_BYTES, ConfigError, EngineStartError
from rose.process.child import AdoptedProcess, Keep, ManagedProcess, ProcessGroup, ProcessSpec
from rose.process.launcher import Share
from rose.process.procfs import ProcessIdentity
from slo import ProfileError, StepProfile

SHARED_MEMORY = "/dev/shm"  # noqa: S108 -- nothing stays in it
MIN_FREE_BYTES_PER_ENGINE = 1_600 << 20
PYTHON_TIMEOUT_S = 30.0
# A plugin may import torch and vLLM, on a busy machine.
PLUGINS_TIMEOUT_S = 120.0
# Program for an engine's interpreter: it prints the first module or plugin that is missing, and
# imports nothing large.
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
# Program for an engine's interpreter: it prints each plugin that cannot be imported, and calls none
# of them.
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
_KINDS: dict[EngineKind, ModuleType] = {EngineKind.VLLM: vllm, EngineKind.SGLANG: sglang}
POLL_INTERVAL_S = 0.25
POLL_TIMEOUT_S = 2.0
# Number of missed answers in a row that end a warm-up: the API process may share a busy core.
MISSED_STATES = 30
LOG_TAIL_BYTES = 64 << 10
SECRET = "ROSE_REPLICA_SECRET"  # noqa: S105 -- the name of a variable
_STATE = msgspec.json.Decoder(ReplicaState)
_SECRET_BYTES = 32
_PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s*(?:ERROR \S+ \S+ \[\S+\]\s*)?")
_MEANINGFUL = re.compile(r"^(?:\w+\.)*\w*(Error|Exception)\b.*: .+")


class BrokenPlugin(msgspec.Struct, frozen=True):
    """Plugin of an engine that cannot be imported; every engine logs it and runs without it.

    folder: folder of the metadata that names it, which an earlier installation may have left. why:
    the import error in one line.
    """

    name: str
    module: str
    distribution: str
    folder: str
    why: str


def broken_plugins(
    python: str, env: Mapping[str, str], engine: EngineKind = EngineKind.VLLM
) -> list[BrokenPlugin]:
    """Return the engine's plugins that this interpreter lists and cannot import, found by running
    it.

    Raises OSError, TimeoutExpired or DecodeError if the interpreter gives no answer.
    """
    found = _run(
        PLUGINS_TIMEOUT_S, env, python, "-c", _LOOK_AT_PLUGINS, _KINDS[engine].PLUGINS_GROUP
    )
    # A plugin may print while it is imported.
    last = found.stdout.strip().rpartition("\n")[2]
    return msgspec.json.decode(last, type=list[BrokenPlugin])


def _run(
    timeout_s: float, env: Mapping[str, str], *words: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command with these variables added to the environment and return the finished process.
    Raises OSError or TimeoutExpired.
    """
    return subprocess.run(  # noqa: S603
        words,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def check_host(engines: int) -> None:
    """Raise EngineStartError unless vLLM is installed here and memory for this number of engines is
    free.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineStartError("vLLM is not installed here; run `make install`")
    check_memory(f"{engines} engines", engines * MIN_FREE_BYTES_PER_ENGINE)


def check_memory(what: str, needed_bytes: int, headroom_bytes: int = 0) -> None:
    """Raise EngineStartError unless /dev/shm is writable and `needed_bytes` of RAM are available
    beyond the headroom.
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


def engine_bytes(model_dir: Path, kv_bytes: int, ranks: int = 1, copies: int = 1) -> int:
    """Return the bytes of RAM that a CPU engine is expected to take: its processes, weights as
    large as on disk in each of its `copies`, and KV cache on each rank.
    """
    return ranks * (MIN_FREE_BYTES_PER_ENGINE + kv_bytes) + copies * weight_bytes(model_dir)


def weight_bytes(model_dir: Path) -> int:
    """Return the total size of a model folder's *.safetensors files in bytes; 0 if it has none."""
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def check_port(port: int, owner: str) -> None:
    """Raise ConfigError unless the loopback port can be bound; `owner` is named in the error."""
    if why := taken(port):
        raise ConfigError(f"port {port} ({owner}) is busy: {why}; choose another with --port-base")


def check_model(model_dir: Path, *, weights: bool = True, tokenizer: Path | None = None) -> None:
    """Raise ConfigError unless the folder has config.json and, with `weights`, *.safetensors
    files, and `tokenizer`, without one the same folder, a tokenizer's file.
    """
    tokenizers = (
        "tokenizer.json",
        "tokenizer.model",
        "*.tiktoken",
        "tiktoken.model",
        "tekken.json",
    )
    needed = [(model_dir, ("config.json",)), (tokenizer or model_dir, tokenizers)]
    for folder, names in (*needed, *([(model_dir, ("*.safetensors",))] if weights else [])):
        if not any(path for name in names for path in folder.glob(name)):
            raise ConfigError(f"{folder} has no {names[0]}; give a folder in Hugging Face's layout")


def check_profile(path: Path) -> None:
    """Raise ConfigError unless the file can be read and holds a step profile (`rose profile`) in
    JSON.
    """
    try:
        StepProfile.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"step profile {path} cannot be read: {error.strerror}") from error
    except (ProfileError, UnicodeDecodeError) as error:
        raise ConfigError(f"step profile {path}: {error}") from error


def check_python(spec: EngineSpec) -> None:
    """Raise ConfigError unless the engine's interpreter runs and finds the engine, ROSE and ROSE's
    plugins.
    """
    try:
        group = _KINDS[spec.engine].HOST_GROUP
        words = spec.interpreter, "-c", _LOOK, spec.engine, group
        found = _run(PYTHON_TIMEOUT_S, spec.extra_env, *words)
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


def _option(word: str) -> str:
    """Return the name of an option as engines list it, without its value or a part of it."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def check_options(spec: EngineSpec) -> None:
    """Raise ConfigError if `extra_args` has an option that an engine of this role must not have,
    such as speculative decoding in a replica.
    """
    kind = _KINDS[spec.engine]
    refused = dict(kind.REFUSED)
    if spec.role.is_replica:
        refused |= kind.REFUSED_IN_REPLICAS | kind.refused_values(spec.extra_args)
    for given in () if spec.role is EngineRole.STOCK else spec.extra_args:
        option = _option(given)
        if option in refused:
            raise ConfigError(
                f"engine {spec.name}: a {spec.role} on {kind.NAME} does not have"
                f" {refused[option]}; leave out {option}"
            )


def check_replica_args(engine: EngineKind, words: Sequence[str]) -> None:
    """Raise ConfigError if further arguments of a replica's engine have one that the node sets
    itself, or one that breaks a promise of ROSE.
    """
    kind = _KINDS[engine]
    own = kind.own_options(
        EngineSpec("", EngineRole.GUEST, Path(), 0, Path(), engine=engine, kv_backend="cuda")
    )
    values = kind.refused_values(words)
    for word in words:
        option = _option(word)
        if option.startswith("-") and not option.startswith("--"):
            raise ConfigError(f"{option} is an abbreviation; give the option's long name")
        if not option.startswith("--"):
            continue
        # Engines take the beginning of an option for the whole.
        for name in sorted(own):
            if name.startswith(option):
                raise ConfigError(f"{name} is the node's to set; leave out {option}")
        for name, its_field in sorted(kind.FIELDS.items()):
            if name.startswith(option):
                raise ConfigError(f"the node has {its_field} for {name}; leave out {option}")
        refused = kind.REFUSED | kind.REFUSED_IN_REPLICAS | kind.REFUSED_BY_NODE | values
        for name, meaning in sorted(refused.items()):
            if name.startswith(option):
                raise ConfigError(f"a replica does not have {meaning}; leave out {option}")


def check_spec(spec: EngineSpec) -> None:
    """Raise ConfigError or EngineStartError if the engine could not start: interpreter, options,
    model, profiles, port, memory.
    """
    if spec.python is not None:
        check_python(spec)
    elif spec.engine is EngineKind.SGLANG and importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            f"engine {spec.name} is SGLang, which {spec.interpreter} does not have; name its"
            " interpreter (`make install-sglang` makes .venv-sglang/bin/python)"
        )
    check_options(spec)
    dummy = spec.load_format == "dummy"
    check_model(spec.model_dir, weights=not dummy, tokenizer=spec.tokenizer)
    for profile in (spec.step_profile, spec.host_step_profile):
        if profile is not None:
            check_profile(profile)
    check_port(spec.port, spec.name)
    if spec.device is Device.CUDA:
        needed, what = spec.ranks * MIN_FREE_BYTES_PER_ENGINE, "processes"
    else:
        sizes = spec.model_dir, spec.kv_bytes, spec.ranks, spec.data_parallel
        needed, what = engine_bytes(*sizes), "processes, weights and KV"
    check_memory(f"engine {spec.name}: {what}", needed, spec.headroom_bytes)


@dataclass(eq=False)
class EngineProcess:
    """Running engine: its specification, its process group and, for a replica, the secret that
    control requests must bear.
    """

    spec: EngineSpec
    process: ProcessGroup
    secret: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that authorize a control request to the replica."""
        return {"Authorization": f"Bearer {self.secret}"}

    @classmethod
    async def start(cls, spec: EngineSpec, keep: Keep | None = None) -> "EngineProcess":
        """Start the engine's process and return it without waiting until it answers. Raises
        ConfigError or EngineStartError if it could not work.

        keep: options of a keeper that lets the engine outlive this process for a while; None ends
        it with this process.
        """
        check_spec(spec)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        secret = secrets.token_hex(_SECRET_BYTES)
        process = process_spec(spec)
        # The secret is new for each process and in no command line: only its user can read its
        # environment.
        process = replace(process, keep=keep, env={**process.env, SECRET: secret})
        return cls(spec, await ManagedProcess.start(process), secret)

    @classmethod
    def adopt(
        cls, spec: EngineSpec, identity: ProcessIdentity, secret: str = ""
    ) -> "EngineProcess":
        """Return the handle of an engine that an earlier process started as `spec`, with its
        process identity and secret.
        """
        return cls(spec, AdoptedProcess(identity), secret)

    async def wait_healthy(
        self, timeout_s: float, held_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until the engine answers and, if it is a replica, is warm. Raises EngineStartError
        if it ends or takes too long.

        A replica must answer at ROSE's endpoint too: vLLM serves on without a plugin that failed.
        Its warm-up has a limit of its own, which pauses while the host leaves it no time. held_up:
        returns True while the engine may not run, so that this time does not count.
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
        raise self._failure(f"did not answer within {timeout_s:.0f} s")

    async def warms_up(self) -> bool:
        """Return True if the replica answers that it is not warm yet; False if it is warm, is not a
        replica or does not answer.
        """
        timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            state = await _state(session, self.spec.url) if self.spec.role.is_replica else None
        return state is not None and not state.warm

    def _check_alive(self) -> None:
        if self.process.returncode is not None:
            code = self.process.returncode
            raise self._failure(f"ended at start (exit {code}): {self.last_words()}")

    async def _wait_warm(self, session: aiohttp.ClientSession) -> None:
        if await _state(session, self.spec.url) is None:
            raise self._failure(f"serves without ROSE's endpoint: {self.last_words()}")
        missed = 0
        while missed < MISSED_STATES:
            self._check_alive()
            state = await _state(session, self.spec.url)
            if state is not None and state.warm:
                return
            if state is not None and state.warm_up.failed:
                raise self._failure(f"is not warm: {state.warm_up.said}")
            missed = missed + 1 if state is None else 0
            await asyncio.sleep(POLL_INTERVAL_S)
        raise self._failure("stopped answering in its warm-up")

    def _failure(self, what: str) -> EngineStartError:
        return EngineStartError(f"engine {self.spec.name} {what}; see {self.spec.log}")

    def last_words(self) -> str:
        """Return the line of the engine's log that best explains its end: the first error, else the
        last line.
        """
        try:
            tail = self.spec.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return "it wrote no log"
        lines = [_PREFIX.sub("", line).strip() for line in tail.splitlines()]
        meaningful = [line for line in lines if _MEANINGFUL.match(line)]
        # The first error is the cause; later ones are its consequences.
        return (meaningful[:1] or [line for line in lines if line][-1:] or ["it wrote no log"])[0]

    async def stop(self) -> None:
        """End the engine and all processes that it started."""
        await self.process.stop()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _state(session: aiohttp.ClientSession, url: str) -> ReplicaState | None:
    """Return the state that a replica reports, None if it does not answer with one."""
    try:
        async with session.get(url + STATE) as response:
            return _STATE.decode(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, *BAD_BYTES):
        return None


def process_spec(spec: EngineSpec) -> ProcessSpec:
    """Return the child process to start for an engine: command line, environment, log, core and CPU
    share.
    """
    kind = _KINDS[spec.engine]
    return ProcessSpec(
        name=spec.name,
        argv=(spec.interpreter, "-m", kind.MODULE, *kind.arguments(spec)),
        env=_environment(spec) | kind.environment(spec) | spec.extra_env,
        log=spec.log,
        cores=spec.cores,
        share=share_of(spec),
        cgroup=spec.cgroup,
        family=True,  # an engine core lives on for good when its API process is killed
    )


def share_of(spec: EngineSpec) -> Share | None:
    """Return an engine's CPU share below other processes: "aside" for a guest on a GPU,
    "background" for one on a CPU; None for any other engine.

    A guest on a GPU ranks higher: if it waits for a core, the GPU step that it has begun ends in
    the host's time.
    """
    if spec.role is not EngineRole.GUEST:
        return None
    return "aside" if spec.device is Device.CUDA else "background"


def _environment(spec: EngineSpec) -> dict[str, str]:
    env = {
        "ROSE_ROLE": "" if spec.role is EngineRole.STOCK else spec.role.value,
        "ROSE_REPLICA_ID": spec.name,
        "ROSE_SLO_TTFT_S": str(spec.ttft_target_s),
        "ROSE_SLO_TPOT_S": str(spec.tpot_target_s),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.control_page:
        env["ROSE_CONTROL_PAGE"] = str(spec.control_page)
        env["ROSE_PAGE_GROUP"] = spec.page_group
        env["ROSE_ORPHAN_S"] = str(spec.orphan_s)
        env["ROSE_KV_BACKEND"] = spec.kv_backend
    if spec.warm_up_s is not None and spec.role.is_replica:
        env["ROSE_WARM_UP_S"] = str(spec.warm_up_s)
    if spec.step_profile:
        env["ROSE_STEP_PROFILE"] = str(spec.step_profile.absolute())
    if spec.host_step_profile:
        env["ROSE_HOST_STEP_PROFILE"] = str(spec.host_step_profile.absolute())
    if spec.weights_dir:
        env["ROSE_WEIGHTS_DIR"] = str(spec.weights_dir.absolute())
    if spec.verify_key:
        env["ROSE_VERIFY_KEY"] = spec.verify_key
    elif spec.unsigned:
        env["ROSE_UNSIGNED"] = "1"
    return env
