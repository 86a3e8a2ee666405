"""Configuration file of a node daemon: its hosts, its replicas, and how it fetches weights."""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Self
from urllib.parse import quote

from pydantic import Field, ValidationError, field_validator, model_validator

from executor import PressureLimits, PressurePolicy
from rose.addresses import checked_url, host_port, is_loopback
from rose.engines import Device, EngineKind, EngineRole, EngineSpec, check_profile, weight_bytes
from rose.engines.kept_kv import kept_kv
from rose.engines.launch import check_replica_args
from rose.engines.spec import Capability, LoraSlots, lacking
from rose.errors import ConfigError
from rose.logs.rotating_jsonl import LEAST_FILE_BYTES, LogLimits
from rose.node.transport_config import (
    CertificateConfig,
    FanoutConfig,
    Frozen,
    ProxyConfig,
    ReceiverConfig,
    RelayConfig,
    TransportConfig,
)
from rose.security.keys import public_key
from rose.security.roles import Role
from weight_transfer import JobKeys, VerifyKey

# Variables that name an engine's weights, orders and role: no file's `extra_env` may set them.
OF_THE_NODE = frozenset(
    {
        "ROSE_CONTROL_PAGE",
        "ROSE_GATED_START",
        "ROSE_KV_BACKEND",
        "ROSE_ORPHAN_S",
        "ROSE_PAGE_GROUP",
        "ROSE_REPLICA_ID",
        "ROSE_REPLICA_SECRET",
        "ROSE_ROLE",
        "ROSE_UNSIGNED",
        "ROSE_VERIFY_KEY",
        "ROSE_WEIGHTS_DIR",
        "SGLANG_PLUGINS",
        "VLLM_PLUGINS",
    }
)


DETERMINISTIC = "--enable-deterministic-inference"


# GPU by its index in the driver's order, or by its UUID or the beginning of one.
Gpu = Annotated[int, Field(ge=0, strict=True)] | Annotated[str, Field(pattern="^GPU-")]


# The validator names a key of another kind, which a pattern cannot.
PublicKey = Annotated[str, Field(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})]
Label = Annotated[str, Field(min_length=1, max_length=253)]
# Size of one dimension of an engine's ranks, all of which are on this machine.
Ranks = Annotated[int, Field(ge=1, le=64)]
Core = Annotated[int, Field(ge=0)]


class OnGpus(Frozen):
    """Base of configurations that name GPUs: `devices`, in the order of the engine's ranks, or
    `device` for one.
    """

    device: Gpu | None = None
    devices: tuple[Gpu, ...] = ()

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if self.device is not None and self.devices:
            raise ValueError("device is short for devices of one GPU; leave one of them out")
        twice = [gpu for gpu in self.devices if self.devices.count(gpu) > 1]
        if twice:
            raise ValueError(f"devices: GPU {twice[0]} is named twice")
        return self

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs by their indices or UUIDs, () without one."""
        return self.devices if self.device is None else (self.device,)


class HostConfig(OnGpus):
    """Production engine (host) that this node watches and never starts or stops.

    engine: software that the host runs; its page has one layout for all, advice depends on it.
    name: label of a discovered host in metrics and logs; the host of a file needs none.
    page_group: name or number of the group that shares the page, for a host of another user; empty
    for the owner alone. The host's ROSE_PAGE_GROUP must say the same.
    headroom_bytes: RAM of the machine, and memory of each GPU, that no guest may take.
    device, devices: index or UUID of the host's GPU, or of each of them.
    step_profile: file of `rose profile` for the host's model; guests judge the host's queue by it.
    metrics_url: `/metrics` of a host that runs without the plugin: it is watched, and its guest
    stays frozen. metrics_model: the model whose figures count, if it serves several.
    """

    page: Path
    engine: EngineKind = EngineKind.VLLM
    name: str = Field(default="", max_length=100)
    page_group: str = ""
    pid: int | None = Field(default=None, gt=0)
    ttft_target_s: float = Field(default=0.5, gt=0)
    tpot_target_s: float = Field(default=0.15, gt=0)
    headroom_bytes: int = Field(default=512 << 20, ge=0)
    device: Gpu | None = None
    step_profile: Path | None = None
    metrics_url: str | None = None
    metrics_model: str | None = None

    @field_validator("metrics_url")
    @classmethod
    def _an_address(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("write http://HOST:PORT/metrics")
        return url


class DiscoverConfig(Frozen):
    """Discovery of hosts by their control pages in `folder`, and in the folders right below it.

    A host describes its GPU and its targets itself; ttft_target_s, tpot_target_s: targets of a host
    that names none. at_most: number of hosts that the node takes; more are left alone. The other
    fields are those of HostConfig.
    """

    folder: Path
    page_group: str = ""
    at_most: int = Field(default=8, gt=0, le=64)
    ttft_target_s: float = Field(default=0.5, gt=0)
    tpot_target_s: float = Field(default=0.15, gt=0)
    headroom_bytes: int = Field(default=512 << 20, ge=0)
    step_profile: Path | None = None


class LoraConfig(Frozen):
    """Places for LoRA adapters in a replica, whose versions are adapters then; its base stays.

    max_rank: largest rank; all places have its size. max_adapters: adapters at a time, the versions
    that turns end under included. jobs: jobs at a time; the replica is offered once for each.
    """

    max_rank: Literal[8, 16, 32, 64, 128, 256] = 16
    max_adapters: int = Field(default=2, ge=2, le=64)
    jobs: int = Field(default=1, ge=1, lt=64)

    @model_validator(mode="after")
    def _a_place_that_no_newest_needs(self) -> Self:
        if self.jobs > 1 and self.max_adapters <= self.jobs:
            raise ValueError(
                f"max_adapters {self.max_adapters}: the newest adapters of {self.jobs} jobs stay,"
                " and a version that comes needs one place more"
            )
        return self


class ReplicaConfig(OnGpus):
    """Rollout engine that this node runs: a guest shares GPUs (or cores) of a host, a dedicated
    replica has its own.

    Beside discovered hosts each host gets one guest of its own: ID-0, ID-1, on ports from `port`.

    model: the name by which jobs name its model, that of its folder when left out.
    models: folders of other models by their names, to which it may be switched for a job.
    token_budget: most tokens in one guest step. slack_share: 0 uses host-idle time only.
    pressure_policy, kv_*_watermark: how the guest's KV memory gives way when that share of the
    host's own is in use (`executor.kv.lending`).
    warm_up_s: time limit in which it runs every size of step before it is offered; time in which
    its host leaves it none does not count.
    runner: vLLM's; "pooling" serves a model that is not generative, a reward model's scores.
    step_profile: file of `rose profile`; without one a guest estimates steps, and learns as it
    runs.
    kv_bytes: KV memory of each rank. kv_base_bytes: part of it that is a guest's own; beyond it the
    guest has what its host lends just now. None: its KV memory does not depend on what the host
    lends.
    kv_backend: how a guest gives KV pages back; see `EngineSettings`.
    device, devices: index or UUID of its GPU, or of each rank's; device "host" for the first GPUs
    of a guest's host. Without any it computes on the CPU. core, cores: CPUs that it is pinned to.
    tensor_parallel, data_parallel, expert_parallel, trust_remote_code: as `EngineSpec` has them.
    tokenizer: folder of the tokenizer, the model's when left out.
    lora: places for LoRA adapters; without it versions are whole weights.
    engine: software that it runs, whatever its host runs.
    engine_python: interpreter of the environment that has the engine, None for this one.
    extra_env: further environment of the engine; none of `OF_THE_NODE`. engine_args: further words
    of its command line; none that the node sets, or that break a promise.
    dtype: of its weights, the checkpoint's. block_size: tokens of a KV block; None for 32 on the
    CPU, and for the engine's choice on a GPU.
    cuda_graphs: on a GPU steps are captured at the start, which is faster afterwards.
    mps_priority, mps_thread_percentage: settings of a client of MPS, where a control daemon runs;
    see docs/node.md before using them.
    sleep_mode: its engine answers vLLM's sleep route, and may be asked to give up its weights.
    reclaim_s: seconds in which the last level of the reclaim ladder must have freed the memory.
    orphan_s: seconds that a guest outlives its daemon, frozen: until then the next daemon may adopt
    it, afterwards its memory is the machine's again.
    """

    id: str = Field(min_length=1, max_length=253)
    kind: Literal["guest", "dedicated"]
    engine: EngineKind = EngineKind.VLLM
    model_dir: Path
    model: str = Field(default="", max_length=253)
    models: dict[str, Path] = Field(default_factory=dict)
    port: int = Field(gt=0, lt=65_536)
    core: Core | None = None
    cores: tuple[Core, ...] = ()
    tensor_parallel: Ranks = 1
    data_parallel: Ranks = 1
    expert_parallel: bool = False
    trust_remote_code: bool = False
    tokenizer: Path | None = None
    lora: LoraConfig | None = None
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
    device: Gpu | Literal["host"] | None = None
    engine_python: Path | None = None
    cuda_graphs: bool = True
    mps_priority: Literal["low"] | None = None
    mps_thread_percentage: int | None = Field(default=None, ge=1, le=100)
    sleep_mode: bool = False
    reclaim_s: float = Field(default=5.0, ge=1.0)
    decode_tok_s: float = Field(default=1_000.0, gt=0)
    prefill_tok_s: float = Field(default=10_000.0, gt=0)
    kv_tokens: int = Field(default=32_768, gt=0)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    block_size: int | None = Field(default=None, gt=0)
    engine_args: tuple[str, ...] = ()
    start_timeout_s: float = Field(default=180.0, gt=0)
    warm_up_s: float = Field(default=60.0, gt=0)
    runner: Literal["generate", "pooling"] = "generate"
    orphan_s: float = Field(default=1.5, ge=0.5, le=600.0)
    step_profile: Path | None = None
    extra_env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> Self:
        if self.kv_low_watermark > self.kv_high_watermark:
            raise ValueError("kv_low_watermark must not be above kv_high_watermark")
        return self

    @field_validator("extra_env")
    @classmethod
    def _only_the_engines(cls, given: dict[str, str]) -> dict[str, str]:
        taken = sorted(given.keys() & OF_THE_NODE)
        if taken:
            raise ValueError(f"{taken[0]} is the node's to set; leave it out")
        return given

    @model_validator(mode="after")
    def _of_the_engine_alone(self) -> Self:
        try:
            check_replica_args(self.engine, self.engine_args)
        except ConfigError as error:
            raise ValueError(f"engine_args: {error}") from error
        return self

    @property
    def offers(self) -> int:
        """Number of times that the replica is offered, each for another job."""
        return self.lora.jobs if self.lora else 1

    @model_validator(mode="after")
    def _one_model_for_all_jobs(self) -> Self:
        if self.offers == 1:
            return self
        if self.kind != "dedicated" or self.models:
            raise ValueError("lora.jobs: several jobs share a dedicated replica without `models`")
        if self.max_sequences < self.offers:
            raise ValueError("lora.jobs: max_sequences has none for each job; raise it")
        return self

    @model_validator(mode="after")
    def _within_the_engine(self) -> Self:
        wanted = {
            Capability.RETURN_GPU: ("kv_backend", self.kv_backend == "cuda"),
            Capability.POOLING: ("runner", self.runner == "pooling"),
            Capability.SLEEP: ("sleep_mode", self.sleep_mode),
            Capability.COPIES: ("data_parallel", self.data_parallel > 1),
            Capability.ADAPTERS: ("lora", self.lora is not None),
        }
        for capability, (name, given) in wanted.items():
            why = lacking(self.engine, capability) if given else None
            if why is not None:
                raise ValueError(
                    f"{name}: {self.engine} does not have it that {capability} ({why});"
                    f" leave {name} out, or run this replica on another engine"
                )
        return self

    @model_validator(mode="after")
    def _a_place_for_each_rank(self) -> Self:
        if self.core is not None and self.cores:
            raise ValueError("core is short for cores of one CPU; leave one of them out")
        if self.kind == "guest" and self.data_parallel > 1:
            raise ValueError(
                "data_parallel: a guest has one scheduler, which its gate holds; make it"
                " tensor_parallel, or the replica dedicated"
            )
        if self.gpus and self.device != "host" and len(self.gpus) != self.ranks:
            raise ValueError(
                f"devices: {len(self.gpus)} named, and tensor_parallel x data_parallel is"
                f" {self.ranks}; name one GPU for each rank"
            )
        return self

    @model_validator(mode="after")
    def _gpu_alone(self) -> Self:
        if self.gpus:
            return self
        if self.kv_backend == "cuda":
            raise ValueError("kv_backend cuda is for a GPU; name it in `device`")
        if self.wants_mps:
            raise ValueError(
                "mps_priority and mps_thread_percentage need a GPU; name it in `device`"
            )
        invariant = self.extra_env.get("VLLM_BATCH_INVARIANT", "0").strip().lower()
        if invariant not in ("0", "", "false") or DETERMINISTIC in self.engine_args:
            raise ValueError(
                f"VLLM_BATCH_INVARIANT and {DETERMINISTIC} need a GPU: no engine has such kernels"
                " for a CPU; name the GPU in `device`"
            )
        return self

    def beside(self, host: HostConfig, slot: int | None) -> Self:
        """Return this guest's configuration beside one host: with the host's first GPUs, one for
        each rank, if `device` is "host", and with id and port numbered by `slot` for a discovered
        host.

        Raises ConfigError if the host cannot have it.
        """
        changed: dict[str, object] = {}
        if self.device == "host":
            if not host.gpus:
                raise ConfigError(f"{self.id}: its host names no GPU that it could share")
            if len(host.gpus) < self.ranks:
                raise ConfigError(
                    f"{self.id}: tensor_parallel is {self.ranks}, and its host has"
                    f" {len(host.gpus)} GPUs; lower it, or name the others in the host's devices"
                )
            changed |= {"device": None, "devices": host.gpus[: self.ranks]}
        if slot is not None:
            changed |= {"id": f"{self.id}-{slot}", "port": self.port + slot}
        return self.model_copy(update=changed)

    @property
    def ranks(self) -> int:
        """Number of the engine's worker processes, each on a GPU of its own if it has GPUs."""
        return self.tensor_parallel * self.data_parallel

    @property
    def shards(self) -> int:
        """Number of equal parts of the weights, one for each rank, as far as they are known."""
        return self.ranks if self.expert_parallel else self.tensor_parallel

    @property
    def wants_mps(self) -> bool:
        """True if the engine must be a client of NVIDIA MPS."""
        return self.mps_priority is not None or self.mps_thread_percentage is not None

    @property
    def model_name(self) -> str:
        """Name of the model that the engine is started with: `model`, or the name of its folder."""
        return self.model or self.model_dir.name

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of all models that the replica can run, by model name."""
        return {**self.models, self.model_name: self.model_dir}

    @property
    def weights_bytes(self) -> int:
        return weight_bytes(self.model_dir)

    @property
    def pressure(self) -> PressureLimits:
        return PressureLimits(self.pressure_policy, self.kv_high_watermark, self.kv_low_watermark)

    def kept_kv(self, model_dir: Path) -> str | None:
        """Return the reason why KV memory of a guest with this model stays until it ends, if so."""
        device = Device.CUDA if self.gpus else Device.CPU
        return kept_kv(self.engine, device, self.kv_backend, model_dir)

    def engine_spec(
        self,
        node: "NodeConfig",
        cgroup: Path | None = None,
        gpu_env: Mapping[str, str] = MappingProxyType({}),
    ) -> EngineSpec:
        """Return the specification of the engine process to start; a dedicated replica ignores the
        node's host.

        gpu_env: variables that name its GPU to it; `extra_env` overrides them.
        """
        host = node.host if self.kind == "guest" else None
        on_gpu, lora = bool(self.gpus), self.lora
        return EngineSpec(
            name=self.id,
            role=EngineRole(self.kind),
            model_dir=self.model_dir,
            port=self.port,
            log=node.log_dir / f"engine-{self.id}.log",
            cores=self.cores if self.core is None else (self.core,),
            kv_bytes=self.kv_bytes,
            dtype=self.dtype,
            # A GPU's attention kernels have sizes of their own; a CPU has small pools.
            block_size=self.block_size or (None if on_gpu else 32),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_sequences,
            # vLLM fails at the first score if tokens are streamed in groups.
            stream_interval=self.stream_interval if self.runner == "generate" else 1,
            control_page=host.page if host else None,
            page_group=host.page_group if host else "",
            orphan_s=self.orphan_s,
            headroom_bytes=host.headroom_bytes if host else 0,
            cgroup=cgroup,
            verify_key=None if node.keys is None else node.keys.text,
            unsigned=node.unsigned,
            weights_dir=node.weights,
            # A pooling engine takes no turns, so it has no steps to warm up.
            warm_up_s=self.warm_up_s if self.runner == "generate" else None,
            step_profile=self.step_profile,
            host_step_profile=host.step_profile if host else None,
            kv_backend=self.kv_backend,
            engine=self.engine,
            python=self.engine_python,
            device=Device.CUDA if on_gpu else Device.CPU,
            tensor_parallel=self.tensor_parallel,
            data_parallel=self.data_parallel,
            expert_parallel=self.expert_parallel,
            lora=None if lora is None else LoraSlots(lora.max_rank, lora.max_adapters),
            trust_remote_code=self.trust_remote_code,
            tokenizer=self.tokenizer,
            enforce_eager=not (on_gpu and self.cuda_graphs),
            extra_env=dict(gpu_env) | self._own_env | self.extra_env,
            extra_args=tuple(self._own_args),
        )

    @property
    def _own_args(self) -> Iterator[str]:
        if self.gpus and self.sleep_mode:
            # Without it vLLM's sleep route answers 200 and gives nothing back.
            yield "--enable-sleep-mode"
        if self.runner == "pooling":
            yield "--runner=pooling"
        yield from self.engine_args

    @property
    def _own_env(self) -> dict[str, str]:
        # vLLM serves its sleep route only with its development routes.
        sleep = {"VLLM_SERVER_DEV_MODE": "1"} if self.sleep_mode else {}
        gated = self.kind == "guest" and self.gpus
        return sleep | ({"ROSE_GATED_START": "1"} if gated else {})


class LogConfig(Frozen):
    """Disk limit of each log of this node, and of each engine's output: `files` files of
    `file_bytes` bytes.

    file_bytes: None keeps everything, for runs whose figures need it.
    """

    file_bytes: int | None = Field(default=64 << 20, ge=LEAST_FILE_BYTES)
    files: int = Field(default=4, ge=2, le=1_000)

    @property
    def limits(self) -> LogLimits:
        return LogLimits(self.file_bytes, self.files)


class NodeConfig(Frozen):
    """Configuration of one node. `run_dir` holds its weights, its guests' records and the local
    kill file `KILL`.

    certificates: this node's own; the scheduler asks for one except on loopback.
    labels: labels by which capacity policies select nodes; `rose.dev/deployment` names the hosts
    that share one router's load.
    discover: where to find hosts that come and go, in place of the one `host`.
    cluster: nodes of the same label share what they fetch; those with a `relay` pass it on.
    fanout: a group of GPUs inside the cluster that start and stop together.
    proxy: a process by which gateways of other machines reach this node's engines. None: they are
    reached from this machine alone.

    cgroup: a cgroup v2 folder delegated to this user, in which guests get groups of their own.
    metrics_port: port of `/metrics`, None serves none. metrics_host: its address; beyond loopback
    it speaks TLS with the node's certificate. metrics_insecure: allow plain HTTP there, on a fenced
    network.
    verify_key: hex of the key that signs this cluster's weights. job_keys: keys of single jobs,
    whose weights no other key signs. unsigned: take weights of anybody who announces them; without
    a key a node starts only if this is set.
    """

    node: str = Field(min_length=1, max_length=253)
    scheduler: str
    run_dir: Path
    weights_dir: Path | None = None
    log_dir: Path
    host: HostConfig | None = None
    discover: DiscoverConfig | None = None
    replicas: tuple[ReplicaConfig, ...]
    verify_key: PublicKey | None = None
    job_keys: dict[str, PublicKey] = Field(default_factory=dict)
    unsigned: bool = False
    cgroup: Path | None = None
    receiver: ReceiverConfig = ReceiverConfig()
    certificates: CertificateConfig = CertificateConfig()
    labels: dict[Label, str] = Field(default={}, max_length=64)
    cluster: str = ""
    relay: RelayConfig | None = None
    fanout: FanoutConfig | None = None
    proxy: ProxyConfig | None = None
    transport: TransportConfig = TransportConfig()
    metrics_port: int | None = Field(default=None, gt=0, lt=65_536)
    metrics_host: str = "127.0.0.1"
    metrics_insecure: bool = False
    logs: LogConfig = LogConfig()

    @field_validator("verify_key")
    @classmethod
    def _a_public_key(cls, given: str | None) -> str | None:
        try:
            return None if given is None else public_key(given)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("job_keys")
    @classmethod
    def _public_keys(cls, given: dict[str, str]) -> dict[str, str]:
        if "" in given:
            raise ValueError("a key without a job; name its job, or give it as verify_key")
        return {job: cls._a_public_key(key) or "" for job, key in given.items()}

    @property
    def keys(self) -> JobKeys | None:
        """Keys that sign the weights of this node's jobs, None if it asks for no signatures."""
        default = VerifyKey(self.verify_key) if self.verify_key else None
        own = {job: VerifyKey(key) for job, key in self.job_keys.items()}
        return JobKeys(default, own) if default or own else None

    @property
    def weights(self) -> Path:
        """Folder in which weight files are kept: `weights_dir`, or `weights` in `run_dir`."""
        return self.weights_dir or self.run_dir / "weights"

    @property
    def kill_file(self) -> Path:
        """Path of the kill file: while it exists every guest of the node is ended, whatever the
        scheduler orders.
        """
        return self.run_dir / "KILL"

    @classmethod
    def load(cls, path: Path, discover: Path | None = None) -> Self:
        """Return the configuration read from a JSON file and checked. Raises ConfigError, which
        names the first error.

        discover: folder in which to look for hosts, in place of the host that the file names.
        """
        try:
            said = json.loads(path.read_text())
            if discover is not None and isinstance(said, dict):
                own = said.get("discover")
                said["host"] = None
                said["discover"] = {**(own if isinstance(own, dict) else {}), "folder": discover}
            config = cls.model_validate(said)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path}: {where}: {first['msg']}") from error
        try:
            config._check_hosts()
            config._check_identity()
            config._check_weights()
            config._check_profiles()
            config._check_fanout()
            config._check_proxy()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        return config if config.host is None else config.with_host(config.host)

    def with_host(self, host: HostConfig | None, slot: int | None = None) -> Self:
        """Return this node's configuration with this host alone; without a host it has no guests.

        slot: number of a discovered host; the result then has only that host's guest as replica.
        Raises ConfigError if the host cannot have its guest.
        """
        alone = () if slot is not None else self.dedicated
        beside = () if host is None else self.guests
        replicas = tuple(
            each.beside(host, slot) if host is not None and each in beside else each
            for each in self.replicas
            if each in alone or each in beside
        )
        return self.model_copy(update={"host": host, "discover": None, "replicas": replicas})

    def offered_url(self, replica: ReplicaConfig) -> str:
        """Return the URL to which gateways send a replica's turns: the node proxy's if there is
        one, else the engine's on loopback.
        """
        if self.proxy is None:
            return f"http://127.0.0.1:{replica.port}"
        scheme = "https" if self.certificates.files else "http"
        return (
            f"{scheme}://{host_port(self.proxy.host, self.proxy.port)}/{quote(replica.id, safe='')}"
        )

    @property
    def guests(self) -> tuple[ReplicaConfig, ...]:
        """Replicas of kind guest, which run beside a host."""
        return tuple(replica for replica in self.replicas if replica.kind == "guest")

    @property
    def dedicated(self) -> tuple[ReplicaConfig, ...]:
        """Replicas of kind dedicated, which run without a host."""
        return tuple(replica for replica in self.replicas if replica.kind == "dedicated")

    def _check_hosts(self) -> None:
        guests = self.guests
        if self.host is not None and self.discover is not None:
            raise ConfigError("host and discover; leave one of them out")
        if self.host is None and self.discover is None and guests:
            raise ConfigError("a guest needs a host; add `host` or make it dedicated")
        if len(guests) > 1:
            names = " and ".join(guest.id for guest in guests)
            raise ConfigError(f"{names} would share one host; give each host one guest")
        if self.discover is not None and guests:
            self._check_ports(guests[0].port, self.discover.at_most)

    def _check_ports(self, first: int, count: int) -> None:
        """Raise ConfigError if a port of `count` guests, numbered from `first`, is above 65535 or
        already used.
        """
        taken = {replica.port: replica.id for replica in self.dedicated}
        if self.metrics_port is not None:
            taken[self.metrics_port] = "metrics_port"
        if self.relay is not None:
            taken[self.relay.port] = "relay"
        if self.proxy is not None:
            taken[self.proxy.port] = "proxy"
        last = first + count - 1
        if last >= 1 << 16:
            raise ConfigError(f"{count} guests from port {first} on end beyond 65535")
        for port, name in taken.items():
            if first <= port <= last:
                raise ConfigError(f"{name} has port {port}, and guests have {first} to {last}")

    def _check_identity(self) -> None:
        files = self.certificates.files
        if files is None:
            if not (self.metrics_insecure or is_loopback(self.metrics_host)):
                raise ConfigError(
                    f"metrics_host {self.metrics_host!r} is reached from other machines,"
                    " and whoever reaches it reads what each host and guest does; give"
                    ' certificates, or fence the network and say "metrics_insecure": true'
                )
            return
        own = files.insist(Role.NODE)
        if own.name != self.node:
            raise ConfigError(
                f"the certificate is of node {own.name}, and this is {self.node}; a node"
                " speaks under the name of its certificate"
            )

    def _check_weights(self) -> None:
        if self.keys is None and not self.unsigned:
            raise ConfigError(
                "verify_key is missing: whoever announces a version could put any weights"
                ' into these engines; give the key, or say "unsigned": true'
            )
        if self.keys is not None and self.unsigned:
            raise ConfigError('verify_key or job_keys and "unsigned": true; leave one of them out')
        if self.relay:
            checked_url(f"http://{host_port(self.relay.host)}", "the address of relay.host")
        if self.fanout and self.fanout.leader:
            checked_url(self.fanout.leader, "fanout.leader")

    def _check_fanout(self) -> None:
        group = self.fanout
        if group is None:
            return
        if group.rank >= group.size:
            raise ConfigError(f"fanout.rank {group.rank} is none of 0 to {group.size - 1}")
        if group.rank == 0 and self.relay is None:
            raise ConfigError("the leader of a group (fanout.rank 0) needs a relay")
        if group.rank > 0 and not group.leader:
            raise ConfigError("fanout.leader is missing: the address of rank 0's relay")

    def _check_proxy(self) -> None:
        proxy = self.proxy
        if proxy is None:
            return
        checked_url(f"http://{host_port(proxy.host)}", "the address of proxy.host")
        exposed = not (proxy.insecure or is_loopback(proxy.host))
        if exposed and self.certificates.files is None:
            raise ConfigError(
                f"proxy.host {proxy.host!r} is reached from other machines, and whoever"
                " reaches it can send turns to every replica; give certificates, or fence the"
                ' network and say "insecure": true'
            )
        lacking = [name for name in ("httptools", "uvloop") if find_spec(name) is None]
        if lacking:
            raise ConfigError(
                f"the proxy needs {' and '.join(lacking)}; pip install 'rose-rollout[replica]'"
            )

    def _check_profiles(self) -> None:
        """Raise ConfigError for a step profile that cannot be used, before an engine is started
        with it.
        """
        for hosts in (self.host, self.discover):
            if hosts and hosts.step_profile:
                check_profile(hosts.step_profile)
        for replica in self.replicas:
            if replica.step_profile and replica.kind != "guest":
                raise ConfigError(
                    f"{replica.id} is dedicated and has no gate; remove its step_profile"
                )
            if replica.step_profile:
                check_profile(replica.step_profile)
