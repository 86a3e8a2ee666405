"""The file that a node daemon is started with."""

import json
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from rose.engines import check_profile
from rose.errors import ConfigError
from rose.jsonl import LEAST_FILE_BYTES, LogLimits
from rose.node.engine_config import Frozen, HostConfig, ReplicaConfig
from rose.publish import Caps, Credentials
from rose.urls import checked_url


def _netloc(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class ReceiverConfig(Frozen):
    """What fetching weights may cost this machine. None bounds nothing.

    bytes_per_s: of the link, on the average. disk_bytes: of chunks and manifests kept; the oldest
    that no update needs goes first. threads, nice: who hashes and writes what arrives.
    """

    bytes_per_s: int | None = Field(default=None, gt=0)
    disk_bytes: int | None = Field(default=None, gt=0)
    threads: int = Field(default=2, gt=0, le=64)
    nice: int = Field(default=10, ge=0, le=19)

    @property
    def caps(self) -> Caps:
        """As the receiver takes them."""
        return Caps(self.bytes_per_s, self.disk_bytes, self.threads, self.nice)


class TransportConfig(Frozen):
    """What this node shows when it fetches weights or serves them, and whom it believes.

    token_file: what every caller of a cluster bears. ca, certificate, key: PEM files; with them
    both sides of a connection prove who they are. Give all three or none. origins: scheme, host
    and port of the publisher and the relays that get the token where there are no certificates.
    """

    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    origins: tuple[str, ...] = ()

    @property
    def credentials(self) -> Credentials:
        """Read from the files. ConfigError says which one cannot be used."""
        files = self.token_file, self.ca, self.certificate, self.key
        return Credentials.read(*files, origins=self.origins)


class RelayConfig(Frozen):
    """This node passes weights on to its neighbours. host: an address that they reach.

    insecure: other machines may reach it though `transport` names no certificates.
    """

    host: str
    port: int = Field(gt=0, lt=65_536)
    insecure: bool = False


class FanoutConfig(Frozen):
    """This node's GPU hands chunks around in a fixed group, over NCCL; CuPy has to be there.

    rank, size: of the group; rank 0 leads and needs a `relay`. leader: the address of its relay.
    device: the CUDA ordinal.
    """

    rank: int = Field(ge=0)
    size: int = Field(ge=2, le=4_096)
    leader: str = ""
    device: int = Field(default=0, ge=0)


class LogConfig(Frozen):
    """Disk that each log of this node may take, and what each engine says: `files` of `file_bytes`.

    file_bytes: None keeps everything, for runs whose figures need it.
    """

    file_bytes: int | None = Field(default=64 << 20, ge=LEAST_FILE_BYTES)
    files: int = Field(default=4, ge=2, le=1_000)

    @property
    def limits(self) -> LogLimits:
        """As logs take them."""
        return LogLimits(self.file_bytes, self.files)


class NodeConfig(Frozen):
    """One node. `run_dir` holds its weights, its guests' records and the local kill file `KILL`.

    cluster: nodes of the same label share what they fetch; those with a `relay` pass it on.
    fanout: a group of GPUs inside the cluster that start and stop together.

    cgroup: a cgroup v2 folder delegated to this user, in which guests get groups of their own.
    metrics_port: loopback port of `/metrics`, None serves none.
    verify_key: hex of the key that signs this cluster's weights. unsigned: take weights of whoever
    announces them; without a key a node starts only where this is said.
    """

    node: str = Field(min_length=1, max_length=253)
    scheduler: str
    run_dir: Path
    log_dir: Path
    host: HostConfig | None = None
    replicas: tuple[ReplicaConfig, ...]
    verify_key: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    unsigned: bool = False
    cgroup: Path | None = None
    receiver: ReceiverConfig = ReceiverConfig()
    cluster: str = ""
    relay: RelayConfig | None = None
    fanout: FanoutConfig | None = None
    transport: TransportConfig = TransportConfig()
    metrics_port: int | None = Field(default=None, gt=0, lt=65_536)
    logs: LogConfig = LogConfig()

    @property
    def kill_file(self) -> Path:
        """While this file exists every guest of the node is ended, whatever anybody else says."""
        return self.run_dir / "KILL"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check the file; ConfigError names the first thing that is wrong."""
        try:
            config = cls.model_validate(json.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path}: {where}: {first['msg']}") from error
        if config.host is None and any(r.kind == "guest" for r in config.replicas):
            raise ConfigError(f"{path}: a guest needs a host; add `host` or make it dedicated")
        guests = [replica.id for replica in config.replicas if replica.kind == "guest"]
        if len(guests) > 1:
            raise ConfigError(
                f"{path}: {' and '.join(guests)} would share one host; give each host one guest"
            )
        config._check_weights(path)
        config._check_profiles(path)
        config._check_fanout(path)
        return config

    def _check_weights(self, path: Path) -> None:
        if self.verify_key is None and not self.unsigned:
            raise ConfigError(
                f"{path}: verify_key is missing: whoever announces a version could put any weights"
                ' into these engines; give the key, or say "unsigned": true'
            )
        if self.verify_key is not None and self.unsigned:
            raise ConfigError(f'{path}: verify_key and "unsigned": true; leave one of them out')
        if self.relay:
            checked_url(f"http://{_netloc(self.relay.host)}", f"{path}: the address of relay.host")
        if self.fanout and self.fanout.leader:
            checked_url(self.fanout.leader, f"{path}: fanout.leader")

    def _check_fanout(self, path: Path) -> None:
        group = self.fanout
        if group is None:
            return
        if group.rank >= group.size:
            raise ConfigError(f"{path}: fanout.rank {group.rank} is none of 0 to {group.size - 1}")
        if group.rank == 0 and self.relay is None:
            raise ConfigError(f"{path}: the leader of a group (fanout.rank 0) needs a relay")
        if group.rank > 0 and not group.leader:
            raise ConfigError(f"{path}: fanout.leader is missing: the address of rank 0's relay")

    def _check_profiles(self, path: Path) -> None:
        """A guest would not start with a profile that cannot be used: say so before it tries."""
        if self.host and self.host.step_profile:
            check_profile(self.host.step_profile)
        for replica in self.replicas:
            if replica.step_profile and replica.kind != "guest":
                raise ConfigError(
                    f"{path}: {replica.id} is dedicated and has no gate; remove its step_profile"
                )
            if replica.step_profile:
                check_profile(replica.step_profile)
