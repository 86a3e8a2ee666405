"""The file that a node daemon is started with."""

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from executor import PressureLimits, PressurePolicy
from rose.engines import EngineRole, EngineSpec, check_profile
from rose.errors import ConfigError
from rose.publish import Caps, Credentials


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HostConfig(_Frozen):
    """The production engine of this node: it is watched, never started or stopped.

    headroom_bytes: memory of the machine that no guest may take from it.
    step_profile: file of `rose profile` for its model; guests judge its queue by it.
    """

    page: Path
    pid: int | None = None
    ttft_target_s: float = Field(default=0.5, gt=0)
    tpot_target_s: float = Field(default=0.15, gt=0)
    headroom_bytes: int = Field(default=512 << 20, ge=0)
    step_profile: Path | None = None


class ReplicaConfig(_Frozen):
    """A rollout engine that this node runs. A guest shares the GPU (here: the core) of the host.

    token_budget: most tokens in one guest step. slack_share: 0 uses host-idle time only.
    pressure_policy, kv_*_watermark: how its KV memory gives way when that share of the host's own
    is in use (`executor.pressure`).
    warm_up_s: it runs every size of step before it is offered, for at most so long; time in which
    its host leaves it none does not count.
    step_profile: file of `rose profile`; without one a guest guesses, and learns as it runs.
    kv_base_bytes: KV memory of a guest's own; beyond it the guest has what its host lends just now.
    None: its KV memory does not depend on what the host lends.
    kv_backend: how a guest gives KV pages back; see `EngineSettings`.
    sleep_mode: its engine answers vLLM's sleep route, and may be asked to give up its weights.
    reclaim_s: how long the reclaim ladder may take before its last rung has freed the memory.
    orphan_s: how long a guest outlives its daemon, frozen: until then the next daemon may adopt it,
    afterwards its memory is the machine's again.
    """

    id: str
    kind: Literal["guest", "dedicated"]
    model_dir: Path
    port: int = Field(gt=0, lt=65_536)
    core: int | None = None
    kv_bytes: int = Field(default=64 << 20, gt=0)
    max_model_len: int = Field(default=512, gt=0)
    max_sequences: int = Field(default=64, gt=0)
    stream_interval: int = Field(default=1, gt=0)
    token_budget: int = Field(default=512, gt=0)
    slack_share: float = Field(default=0.0, ge=0.0, le=1.0)
    pressure_policy: PressurePolicy = PressurePolicy.ADAPTIVE
    kv_high_watermark: float = Field(default=0.90, gt=0, le=1)
    kv_low_watermark: float = Field(default=0.80, gt=0, le=1)
    kv_base_bytes: int | None = Field(default=None, gt=0)
    kv_backend: Literal["auto", "madvise", "cuda"] = "auto"
    sleep_mode: bool = False
    reclaim_s: float = Field(default=5.0, ge=1.0)
    decode_tok_s: float = Field(default=1_000.0, gt=0)
    prefill_tok_s: float = Field(default=10_000.0, gt=0)
    kv_tokens: int = Field(default=32_768, gt=0)
    start_timeout_s: float = Field(default=180.0, gt=0)
    warm_up_s: float = Field(default=60.0, gt=0)
    orphan_s: float = Field(default=1.5, ge=0.5, le=600.0)
    step_profile: Path | None = None
    extra_env: dict[str, str] = {}

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> Self:
        if self.kv_low_watermark > self.kv_high_watermark:
            raise ValueError("kv_low_watermark must not be above kv_high_watermark")
        return self

    @property
    def pressure(self) -> PressureLimits:
        """As the guard takes them."""
        return PressureLimits(self.pressure_policy, self.kv_high_watermark, self.kv_low_watermark)

    def engine(
        self,
        log: Path,
        host: HostConfig | None,
        verify_key: str | None,
        cgroup: Path | None = None,
    ) -> EngineSpec:
        """The engine to start; only a guest has to do with the host."""
        host = host if self.kind == "guest" else None
        return EngineSpec(
            name=self.id,
            role=EngineRole(self.kind),
            model_dir=self.model_dir,
            port=self.port,
            log=log,
            core=self.core,
            kv_bytes=self.kv_bytes,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_sequences,
            stream_interval=self.stream_interval,
            control_page=host.page if host else None,
            orphan_s=self.orphan_s,
            headroom_bytes=host.headroom_bytes if host else 0,
            cgroup=cgroup,
            verify_key=verify_key,
            warm_up_s=self.warm_up_s,
            step_profile=self.step_profile,
            host_step_profile=host.step_profile if host else None,
            kv_backend=self.kv_backend,
            extra_env=self.extra_env,
        )


class ReceiverConfig(_Frozen):
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


class TransportConfig(_Frozen):
    """What this node shows when it fetches weights or serves them, and whom it believes.

    token_file: what every caller of a cluster bears. ca, certificate, key: PEM files; with them
    both sides of a connection prove who they are. Give all three or none.
    """

    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def credentials(self) -> Credentials:
        """Read from the files. ConfigError says which one cannot be used."""
        return Credentials.read(self.token_file, self.ca, self.certificate, self.key)


class RelayConfig(_Frozen):
    """This node passes weights on to its neighbours. host: an address that they reach."""

    host: str
    port: int = Field(gt=0, lt=65_536)


class FanoutConfig(_Frozen):
    """This node's GPU hands chunks around in a fixed group, over NCCL; CuPy has to be there.

    rank, size: of the group; rank 0 leads and needs a `relay`. leader: the address of its relay.
    device: the CUDA ordinal.
    """

    rank: int = Field(ge=0)
    size: int = Field(ge=2, le=4_096)
    leader: str = ""
    device: int = Field(default=0, ge=0)


class NodeConfig(_Frozen):
    """One node. `run_dir` holds its weights, its guests' records and the local kill file `KILL`.

    cluster: nodes of the same label share what they fetch; those with a `relay` pass it on.
    fanout: a group of GPUs inside the cluster that start and stop together.

    cgroup: a cgroup v2 folder delegated to this user, in which guests get groups of their own.
    metrics_port: loopback port of `/metrics`, None serves none.
    """

    node: str
    scheduler: str
    run_dir: Path
    log_dir: Path
    host: HostConfig | None = None
    replicas: tuple[ReplicaConfig, ...]
    verify_key: str | None = None
    cgroup: Path | None = None
    receiver: ReceiverConfig = ReceiverConfig()
    cluster: str = ""
    relay: RelayConfig | None = None
    fanout: FanoutConfig | None = None
    transport: TransportConfig = TransportConfig()
    metrics_port: int | None = Field(default=None, gt=0, lt=65_536)

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
        config._check_profiles(path)
        config._check_fanout(path)
        return config

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
