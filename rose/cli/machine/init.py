"""`rose init [FOLDER] --policy DIR`: the files that start ROSE on this machine, in Advisory.

FOLDER gets host.sh, gateway.sh, node.json, trainer.py and the key that signs weights, with free
ports. The host is the vLLM or SGLang server of this user that runs now, with its own command line,
or, with --host-model, a new one; without an NVIDIA GPU everything is written for the CPU.

Nothing is started, and nothing is lent until a policy says so.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from rose.addresses import DefaultPort, taken
from rose.command_line.output import say
from rose.command_line.parser import Parser
from rose.engines import EngineKind
from rose.engines.launch import check_model
from rose.errors import ConfigError
from rose.nvml import Card, CardError, Nvml, card_of
from weight_transfer import SigningKey

FOLDER: Final = Path("run")
_TEMPLATES = Path(__file__).parent / "first_files"
_NAMES = ("scheduler", "gateway", "dashboard", "node_metrics", "publisher", "host", "guest")
PORTS: Final = {name: int(DefaultPort[name.upper()]) for name in _NAMES}
KEY, NO_KEY = "trainer.key", "0" * 64
_ANY_LENGTH = 1 << 20
_ON_GPU = {"kv_bytes": 4 << 30, "kv_tokens": 32_768, "max_model_len": 8_192, "max_sequences": 32}
_ON_CPU = {"kv_bytes": 64 << 20, "kv_tokens": 8_192, "max_model_len": 512, "max_sequences": 32}


@dataclass(frozen=True, slots=True)
class _Engine:
    """Words about an engine: its name, its page in the documentation, its server's command line.

    shared, small: options of a host that leaves room on a GPU, and of one on the CPU. parallel:
    options whose values, multiplied, are the number of its GPUs; the first is that of tensors.
    """

    kind: EngineKind
    name: str
    script: str
    guide: str
    serve: tuple[str, ...]
    shared: tuple[str, ...]
    small: tuple[str, ...]
    parallel: tuple[str, ...]


_ENGINES: Final = {
    EngineKind.VLLM: _Engine(
        EngineKind.VLLM,
        "vLLM",
        "host.sh",
        "docs/gpu-memory.md",
        ("-m", "vllm.entrypoints.openai.api_server", "--model"),
        ("--gpu-memory-utilization", "0.5"),
        ("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)),
        (
            *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
            *("--data-parallel-size", "-dp"),
        ),
    ),
    EngineKind.SGLANG: _Engine(
        EngineKind.SGLANG,
        "SGLang",
        "host-sglang.sh",
        "docs/engines.md",
        ("-m", "sglang.launch_server", "--model-path"),
        ("--mem-fraction-static", "0.5"),
        ("--device", "cpu", "--context-length", "512", "--max-total-tokens", "8192"),
        ("--tp-size", "--tp", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size"),
    ),
}


@dataclass(frozen=True, slots=True)
class FirstFiles:
    """Settings of the files, and their text.

    folder: where the processes keep what they write. where: the folder of the files themselves.
    host: command line of the host, without ROSE. devices: indices of its GPUs, () for the CPU.
    longest, heads: tokens of the longest sequence that the policy takes, and its attention heads.
    """

    engine: EngineKind
    host: Sequence[str]
    policy: str
    folder: str
    where: str
    ports: dict[str, int]
    node: str = "serving-0"
    page: str = "/dev/shm/rose-control-page"  # noqa: S108 -- the node checks owner and mode
    devices: tuple[int, ...] = (0,)
    longest: int = _ANY_LENGTH
    heads: int = 1
    verify_key: str = NO_KEY
    rose: str = "rose"
    ttft_s: float = 0.5
    tpot_s: float = 0.15

    def texts(self) -> dict[str, str]:
        """Return the text of each file by its name."""
        import jinja2

        loader = jinja2.FileSystemLoader(_TEMPLATES)
        made = jinja2.Environment(  # noqa: S701 -- scripts are no HTML
            loader=loader,
            trim_blocks=True,
            keep_trailing_newline=True,
            undefined=jinja2.StrictUndefined,
        )
        made.filters["quote"] = shlex.quote
        words = {name: getattr(self, name) for name in self.__slots__}
        words |= {"engine": _ENGINES[self.engine], "command": self._command()}
        names = ("host.sh", "gateway.sh", "trainer.py")
        texts = {name: made.get_template(f"{name}.j2").render(words) for name in names}
        texts[_ENGINES[self.engine].script] = texts.pop("host.sh")
        return texts | {"node.json": json.dumps(self._node(), indent=2) + "\n"}

    def _command(self) -> str:
        """Return the host's command line for a shell, with each option on a line of its own."""
        between = {True: " \\\n  ", False: " "}
        words = (between[word.startswith("--")] + shlex.quote(word) for word in self.host)
        return "".join(words).strip()

    def _node(self) -> dict[str, Any]:
        count = len(self.devices)
        on: dict[str, Any] = {"device": self.devices[0]} if count == 1 else {}
        if count > 1:
            on = {"devices": self.devices}
        host = {"page": self.page, "ttft_target_s": self.ttft_s, "tpot_target_s": self.tpot_s}
        sizes = _ON_GPU if self.devices else _ON_CPU
        sizes = sizes | {"max_model_len": min(sizes["max_model_len"], self.longest)}
        other = {} if self.engine is EngineKind.VLLM else {"engine": self.engine}
        guest: dict[str, Any] = {"id": "guest-0", "kind": "guest", "model_dir": self.policy}
        guest |= {"port": self.ports["guest"], **(self._shared() if count > 1 else on)}
        guest |= other | sizes
        return {
            "node": self.node,
            "scheduler": f"127.0.0.1:{self.ports['scheduler']}",
            "run_dir": f"/dev/shm/rose-{self.node}",  # noqa: S108 -- the node checks its owner
            "weights_dir": f"{self.folder}/{self.node}/weights",
            "log_dir": f"{self.folder}/logs/{self.node}",
            "verify_key": self.verify_key,
            "host": host | on | other,
            "replicas": [guest | {"token_budget": 256, "slack_share": 0.0}],
            "metrics_port": self.ports["node_metrics"],
        }

    def _shared(self) -> dict[str, Any]:
        """Return the fields of a guest on as many of its host's GPUs as share its heads equally."""
        ranks = next(n for n in range(len(self.devices), 0, -1) if self.heads % n == 0)
        return {"device": "host"} | ({"tensor_parallel": ranks} if ranks > 1 else {})


def examples() -> dict[str, str]:
    """Return the text of each file of `examples/` that is one of these, by its name."""
    texts: dict[str, str] = {}
    for engine in reversed(EngineKind):
        host = _command(engine, "models/host", PORTS["host"], (0,), "python")
        texts |= FirstFiles(engine, host, "models/policy", "run", "examples", PORTS).texts()
    return texts


@dataclass(frozen=True, slots=True)
class Server:
    """A vLLM or SGLang server that runs here.

    words: its command line, with files by absolute paths. devices: its CUDA_VISIBLE_DEVICES.
    """

    pid: int
    engine: EngineKind
    words: tuple[str, ...]
    devices: str

    @property
    def ranks(self) -> int:
        """Number of the server's GPUs by its command line."""
        ranks, parallel = 1, _ENGINES[self.engine].parallel
        for word, after in pairwise((*self.words, "")):
            option, _, value = word.partition("=")
            value = value or after
            ranks *= int(value) if option in parallel and value.isdecimal() else 1
        return max(1, ranks)

    @classmethod
    def of(cls, process: psutil.Process) -> "Server | None":
        """Return the server that a process is; None for others, and for replicas of ROSE."""
        try:
            words, environment = process.cmdline(), process.environ()
            folder = Path(process.cwd())
        except psutil.Error:  # ended, or another user's
            return None
        if environment.get("ROSE_ROLE", "host") != "host":
            return None
        script = [Path(word).name for word in words[:3]]
        for engine, about in _ENGINES.items():
            if about.serve[1] in words or (engine in script and "serve" in script):
                there = (
                    str(folder / word) if "/" in word and (folder / word).exists() else word
                    for word in words
                )
                devices = environment.get("CUDA_VISIBLE_DEVICES", "")
                return cls(process.pid, engine, tuple(there), devices)
        return None


def servers() -> list[Server]:
    """Return the servers of this user that run now, by process id."""
    found = (Server.of(process) for process in psutil.process_iter())
    return [server for server in found if server is not None]


def ports_free() -> dict[str, int]:
    """Return a port of loopback for each process: `PORTS` where they are free, else the next."""
    found: dict[str, int] = {}
    for name, first in PORTS.items():
        found[name] = next(
            port for port in range(first, 1 << 16) if port not in found.values() and not taken(port)
        )
    return found


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose init`."""
    made = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.set_defaults(run=_run)
    made.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="new folder (run)")
    made.add_argument(
        "--policy", type=Path, required=True, metavar="DIR", help="checkpoint that is trained"
    )
    made.add_argument("--host-model", metavar="MODEL", help="start a host that serves this model")
    made.add_argument(
        "--engine", type=EngineKind, choices=list(EngineKind), help="of a new host and the guest"
    )
    made.add_argument("--gpu", metavar="N[,N]", help="indices of the GPUs (the host's, or 0)")
    made.add_argument("--node", default="serving-0", metavar="NAME", help="default serving-0")
    for name, seconds in (("ttft", 0.5), ("tpot", 0.15)):
        made.add_argument(
            f"--{name}-s", type=float, default=seconds, metavar="S", help=f"target ({seconds})"
        )
    return made


def _run(args: argparse.Namespace) -> int:
    folder: Path = args.folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{args.folder} is not empty; name another folder, or delete it")
    check_model(args.policy)
    model = args.host_model
    if model and Path(model).is_dir():
        model = str(Path(model).absolute())
    server = None if model else _server()
    engine = server.engine if server else args.engine or _engine_here()
    devices = _devices(_wanted(args.gpu, server))
    ports = ports_free()
    files = FirstFiles(
        engine=engine,
        host=server.words if server else _command(engine, model, ports["host"], devices),
        policy=str(args.policy.absolute()),
        folder=str(folder),
        where=str(args.folder),
        ports=ports,
        node=args.node,
        page=f"/dev/shm/rose-{args.node}-page",  # noqa: S108 -- the node checks owner and mode
        devices=devices,
        longest=_said(args.policy, "max_position_embeddings", _ANY_LENGTH),
        heads=_said(args.policy, "num_attention_heads", 1),
        rose=_rose(),
        ttft_s=args.ttft_s,
        tpot_s=args.tpot_s,
    )
    _write(folder, files)
    _explain(args.folder, files, server)
    return 0


def _server() -> Server:
    found = servers()
    if len(found) == 1:
        return found[0]
    running = ", ".join(f"process {each.pid}" for each in found)
    here = (
        f"{len(found)} servers of yours run here ({running})"
        if found
        else "no vLLM or SGLang server of yours runs here"
    )
    raise ConfigError(f"{here}; name the model of one to start by --host-model")


def _engine_here() -> EngineKind:
    for engine in EngineKind:
        if importlib.util.find_spec(engine) is not None:
            return engine
    raise ConfigError(
        f"{sys.executable} has no vLLM and no SGLang; install ROSE into the environment of your"
        " engine, and run its `rose init`"
    )


def _wanted(gpu: str | None, server: Server | None) -> Sequence[int | str]:
    """Return the GPUs that were named, else the host's; () if neither are known."""
    visible = gpu or (server.devices if server else "")
    named = [int(name) if name.isdecimal() else name for name in visible.split(",") if name]
    if gpu or server is None:
        return named
    ranks = server.ranks
    return named[:ranks] or (range(ranks) if ranks > 1 else ())


def cards() -> tuple[Card, ...]:
    """Return the NVIDIA GPUs of this machine; () without a driver that answers."""
    try:
        return Nvml().cards()
    except CardError:
        return ()


def _devices(wanted: Sequence[int | str]) -> tuple[int, ...]:
    """Return the indices of the GPUs; () where the machine has none and none was named."""
    found = cards()
    return tuple(card_of(found, each).index for each in wanted or ((0,) if found else ()))


def _command(
    engine: EngineKind,
    model: str,
    port: int,
    devices: Sequence[int],
    python: str = sys.executable,
) -> list[str]:
    about = _ENGINES[engine]
    words = [python, *about.serve, model, "--served-model-name", "host"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    if len(devices) > 1:
        words += [about.parallel[0], str(len(devices))]
    return [*words, *(about.shared if devices else about.small)]


def _said(policy: Path, field: str, otherwise: int) -> int:
    """Return a number of a checkpoint's configuration, `otherwise` where it has none."""
    try:
        said = json.loads((policy / "config.json").read_text(encoding="utf-8"))
        return int(said.get(field, otherwise))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{policy / 'config.json'} is not a model's configuration") from error


def _rose() -> str:
    """Return the command `rose` of this environment, for a shell."""
    found = shutil.which("rose", path=str(Path(sys.executable).parent))
    return shlex.quote(found) if found else f"{shlex.quote(sys.executable)} -m rose.cli"


def _write(folder: Path, files: FirstFiles) -> None:
    """Write all files, or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".rose-init-") as parent:
        new = Path(parent) / folder.name
        new.mkdir(mode=0o700)
        key = SigningKey.generate()
        key.save(new / KEY)
        for name, text in replace(files, verify_key=key.verify_key.hex).texts().items():
            path = new / name
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(0o755)
        os.replace(new, folder)


def _explain(folder: Path, files: FirstFiles, server: Server | None) -> None:
    about = _ENGINES[files.engine]
    on = f"GPU {', '.join(map(str, files.devices))}" if files.devices else "the CPU"
    host = f"process {server.pid}, which has to be started anew" if server else "a new one"
    port = files.ports["scheduler"]
    to = "" if port == PORTS["scheduler"] else f" --scheduler 127.0.0.1:{port}"
    say(
        f"{folder}: a host on {about.name} ({host}), its guest, scheduler and gateway, on {on}."
        " Start each in a terminal of its own:",
        f"  {folder / about.script}",
        f"  {folder / 'gateway.sh'}",
        f"  rose node --config {folder / 'node.json'}",
        f"what could be lent, and why: http://127.0.0.1:{files.ports['dashboard']}, or"
        f" `rose policy explain{to}`",
        f"lend it: rose policy set --create everywhere mode=Active{to}",
        f"and train: python {folder / 'trainer.py'}",
    )
