"""What an operator can set of a gateway."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from elastic_scheduler import ReplicaKind
from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StaticReplica:
    """A replica named on the command line: always leased, its state is polled."""

    id: str
    kind: ReplicaKind
    url: str
    max_sequences: int


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All settings; times in seconds."""

    port: int
    host: str = "127.0.0.1"
    scheduler: str | None = None
    replicas: tuple[StaticReplica, ...] = ()
    log_dir: Path | None = None
    model_name: str = "rose-policy"
    stall_s: float = 0.5
    version_wait_s: float = 30.0
    queue_wait_s: float = 60.0
    table_ttl_s: float = 5.0
    max_waiting: int = 1_024
    max_attempts: int = 8
    max_body_bytes: int = 8 << 20
    answers_kept: int = 4_096
    shutdown_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port is {self.port}; give one from 0 to 65535")
        times_s = (self.stall_s, self.version_wait_s, self.queue_wait_s, self.table_ttl_s)
        if min(times_s) <= 0:
            raise ConfigError("--stall-s, --version-wait-s, --queue-wait-s, --table-ttl-s: above 0")
        if min(self.max_waiting, self.max_attempts, self.max_body_bytes, self.answers_kept) < 1:
            raise ConfigError("--max-waiting, --max-attempts, --max-body-bytes: at least 1")
        if bool(self.scheduler) == bool(self.replicas):
            raise ConfigError("name the replicas one way: --scheduler HOST:PORT or --replica, each")
        if len({replica.id for replica in self.replicas}) < len(self.replicas):
            raise ConfigError("two --replica have the same id; give each its own")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; --help lists all options")


def parse_settings(argv: list[str]) -> GatewaySettings:
    """Settings of a command line. Raises ConfigError with what to correct."""
    parser = _Parser("rose gateway", description="HTTP front of all rollout replicas.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--scheduler", metavar="HOST:PORT", help="watch its replica table")
    parser.add_argument(
        "--replica", action="append", default=[], metavar="ID=KIND=URL", help="guest or dedicated"
    )
    parser.add_argument("--replica-max-sequences", type=int, default=64)
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--model-name", default="rose-policy")
    for name in ("stall-s", "version-wait-s", "queue-wait-s", "table-ttl-s", "shutdown-s"):
        parser.add_argument(f"--{name}", type=float, default=_default(name))
    for name in ("max-waiting", "max-attempts", "max-body-bytes", "answers-kept"):
        parser.add_argument(f"--{name}", type=int, default=_default(name))
    options = vars(parser.parse_args(argv))
    cap = options.pop("replica_max_sequences")
    replicas = tuple(_static_replica(text, cap) for text in options.pop("replica"))
    return GatewaySettings(replicas=replicas, **options)


def _default(option: str) -> object:
    return GatewaySettings.__dataclass_fields__[option.replace("-", "_")].default


def _static_replica(text: str, max_sequences: int) -> StaticReplica:
    parts = text.split("=", 2)
    kinds = [kind.value for kind in ReplicaKind]
    if len(parts) != 3 or parts[1] not in kinds or urlsplit(parts[2]).scheme != "http":
        raise ConfigError(f"--replica {text}: write ID=guest|dedicated=http://HOST:PORT")
    if max_sequences < 1:
        raise ConfigError(f"--replica-max-sequences is {max_sequences}; give at least 1")
    return StaticReplica(parts[0], ReplicaKind(parts[1]), parts[2].rstrip("/"), max_sequences)
