"""Settings of a gateway, as its operator gives them."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from elastic_scheduler import ReplicaKind
from rose.addresses import check_exposure
from rose.command_line.parser import Parser, add_insecure, add_log_limits, taken_log_limits
from rose.errors import ConfigError
from rose.logs.process_log import add_logging_options
from rose.logs.rotating_jsonl import BOUNDED, LogLimits
from rose.security.certificates import CertificateFiles, add_certificate_options, taken_certificates
from rose.security.roles import Role
from rose.security.tokens import AUDIENCE


@dataclass(frozen=True, slots=True)
class StaticReplica:
    """Replica named on the command line: it counts as always leased, and its state is polled.

    Its API, ROSE's endpoint or a stock engine's, is detected when it answers.
    """

    id: str
    kind: ReplicaKind
    url: str
    max_sequences: int


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """Rule for turns that name no version: by how many versions they may be older than their job's
    latest one.

    job: "" for all jobs without a rule of their own. versions: None for the bound with which the
    job was registered.
    """

    job: str
    versions: int | None


DEFAULT_MODEL = "rose-policy"
ANY_MODEL = "*"
REGISTERED = "registered"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All settings of a gateway; times in seconds. Raises ConfigError for invalid ones."""

    port: int
    host: str = "127.0.0.1"
    scheduler: str | None = None
    replicas: tuple[StaticReplica, ...] = ()
    log_dir: Path | None = None
    log_limits: LogLimits = BOUNDED
    model_names: tuple[str, ...] = (DEFAULT_MODEL,)
    max_staleness: tuple[StalenessRule, ...] = ()
    stall_s: float = 0.5
    version_wait_s: float = 30.0
    queue_wait_s: float = 60.0
    batch_wait_s: float = 3_600.0
    table_ttl_s: float = 5.0
    max_waiting: int = 4_096
    max_completions: int = 4_096
    max_attempts: int = 8
    turns_per_request: int = 64
    max_body_bytes: int = 8 << 20
    answers_kept: int = 4_096
    answers_bytes: int = 256 << 20
    sessions_bytes: int = 256 << 20
    images_bytes: int = 512 << 20
    session_idle_s: float = 3_600.0
    max_connections: int | None = None
    head_timeout_s: float = 10.0
    body_timeout_s: float = 20.0
    text_timeout_s: float = 5.0
    max_prompt_chars: int = 4 << 20
    max_model_len: int | None = None
    tokenizer: Path | None = None
    tool_call_parser: str | None = None
    resume_grace_s: float = 10.0
    anonymous_grace_s: float = 0.0
    slow_reader_s: float = 30.0
    shutdown_s: float = 5.0
    insecure: bool = False
    certificates: CertificateFiles | None = None
    token_keys: Path | None = None
    token_audience: str = AUDIENCE
    batch_dir: Path | None = None
    batch_bytes: int = 10 << 30

    def __post_init__(self) -> None:
        if self.certificates is None:
            what = "use every replica and end anybody's turns"
            check_exposure(self.host, self.insecure, what)
        if self.certificates is not None:
            self.certificates.insist(Role.GATEWAY)
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port is {self.port}; give one from 0 to 65535")
        self._check_times()
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("--max-model-len: at least 2 tokens, one in and one out")
        self._check_counts()
        self._check_names()
        self._check_tool_parser()
        if bool(self.scheduler) == bool(self.replicas):
            raise ConfigError("name the replicas one way: --scheduler HOST:PORT or --replica, each")
        if len({replica.id for replica in self.replicas}) < len(self.replicas):
            raise ConfigError("two --replica have the same id; give each its own")

    def _check_counts(self) -> None:
        for option in COUNTS:
            value = getattr(self, option.replace("-", "_"))
            if value is not None and value < 1:
                raise ConfigError(f"--{option} is {value}; give at least 1")

    def _check_tool_parser(self) -> None:
        parser = self.tool_call_parser
        if parser is None:
            return
        if self.tokenizer is None:
            raise ConfigError("--tool-call-parser needs --tokenizer DIR, as conversations do")
        if ":" not in parser and find_spec("vllm") is None:
            raise ConfigError(
                f"--tool-call-parser {parser} is vLLM's, which is not installed here: install the "
                "extra [replica], or name a MODULE:CLASS"
            )

    def _check_names(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("--model-name is empty; give the name that callers send, or *")
        for kind, names in (
            ("--model-name", self.model_names),
            ("--max-staleness", [rule.job or "all jobs" for rule in self.max_staleness]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{kind}: {twice} is given twice; once is enough")

    def _check_times(self) -> None:
        positive = [option for option in TIMES if option not in MAY_BE_ZERO]
        for options, word in ((positive, "above 0"), (MAY_BE_ZERO, "not below 0")):
            values_s = [getattr(self, option.replace("-", "_")) for option in options]
            if min(values_s) < 0 or (0 in values_s and options is positive):
                raise ConfigError(f"{', '.join(f'--{option}' for option in options)}: {word}")


MAX_DIGITS = 9
TIMES = (
    "stall-s",
    "version-wait-s",
    "queue-wait-s",
    "batch-wait-s",
    "table-ttl-s",
    "resume-grace-s",
    "anonymous-grace-s",
    "slow-reader-s",
    "shutdown-s",
    "head-timeout-s",
    "body-timeout-s",
    "text-timeout-s",
    "session-idle-s",
)
MAY_BE_ZERO = ("resume-grace-s", "anonymous-grace-s", "shutdown-s")
COUNTS = (
    "max-waiting",
    "max-completions",
    "max-attempts",
    "turns-per-request",
    "max-body-bytes",
    "answers-kept",
    "answers-bytes",
    "sessions-bytes",
    "images-bytes",
    "max-connections",
    "max-prompt-chars",
    "batch-bytes",
)


def gateway_parser(prog: str = "rose gateway") -> Parser:
    """Return the command-line parser of `rose gateway`."""
    parser = Parser(prog, description="HTTP front of all rollout replicas.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    add_insecure(parser)
    add_certificate_options(parser)
    what = "public keys of `rose token key`: callers bear tokens, or show certificates"
    parser.add_argument("--token-keys", type=Path, metavar="FILE", help=what)
    parser.add_argument("--token-audience", default=AUDIENCE, metavar="NAME", help="rose")
    parser.add_argument(
        "--scheduler", metavar="HOST:PORT", help="watch its replica table; several with commas"
    )
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL | ID=KIND=URL",
        help="a ROSE replica, or a stock vLLM or SGLang; kind is guest or dedicated",
    )
    parser.add_argument("--replica-max-sequences", type=int, default=64)
    parser.add_argument("--log-dir", type=Path)
    add_log_limits(parser)
    add_logging_options(parser)
    what = f"that callers may send as model, {DEFAULT_MODEL}; repeat it for more, * takes any"
    parser.add_argument("--model-name", action="append", default=[], metavar="NAME", help=what)
    parser.add_argument(
        "--max-staleness",
        action="append",
        default=[],
        metavar="N | JOB=N",
        help="min_version of turns that say none: the job's latest version less N, or less what"
        " the job was registered with (N: registered)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="for text in and out")
    what = "finds tool calls in chats: one of vLLM's, which has to be installed, or your own"
    parser.add_argument("--tool-call-parser", metavar="NAME | MODULE:CLASS", help=what)
    what = "folder of files and batches, which gateways may share; without it they are not served"
    parser.add_argument("--batch-dir", type=Path, metavar="DIR", help=what)
    parser.add_argument("--max-model-len", type=int, help="tokens; else what replicas say")
    for name in TIMES:
        parser.add_argument(f"--{name}", type=float, default=_default(name))
    for name in COUNTS:
        parser.add_argument(f"--{name}", type=int, default=_default(name))
    return parser


def parse_settings(argv: list[str]) -> GatewaySettings:
    """Return the settings of a command line. Raises ConfigError with what to correct."""
    options = vars(gateway_parser().parse_args(argv))
    cap = options.pop("replica_max_sequences")
    options["log_limits"] = taken_log_limits(options)
    options["certificates"] = taken_certificates(options)
    replicas = tuple(_static_replica(text, cap) for text in options.pop("replica"))
    options["model_names"] = tuple(options.pop("model_name")) or (DEFAULT_MODEL,)
    options["max_staleness"] = tuple(_staleness(text) for text in options["max_staleness"])
    return GatewaySettings(replicas=replicas, **options)


def _default(option: str) -> object:
    return GatewaySettings.__dataclass_fields__[option.replace("-", "_")].default


def _static_replica(text: str, max_sequences: int) -> StaticReplica:
    """Return the replica that `URL` or `ID=KIND=URL` names; a URL alone is named by its host and
    port. Raises ConfigError.
    """
    kinds = [kind.value for kind in ReplicaKind]
    if urlsplit(text).scheme == "http" and urlsplit(text).netloc:
        parts = [urlsplit(text).netloc, ReplicaKind.DEDICATED.value, text]
    else:
        parts = text.split("=", 2)
    if len(parts) != 3 or parts[1] not in kinds or urlsplit(parts[2]).scheme != "http":
        raise ConfigError(
            f"--replica {text}: write http://HOST:PORT or ID=guest|dedicated=http://HOST:PORT"
        )
    if max_sequences < 1:
        raise ConfigError(f"--replica-max-sequences is {max_sequences}; give at least 1")
    return StaticReplica(parts[0], ReplicaKind(parts[1]), parts[2].rstrip("/"), max_sequences)


def _staleness(text: str) -> StalenessRule:
    """Return the rule that `N` (for all jobs) or `JOB=N` gives; N may be `registered`. Raises
    ConfigError.
    """
    job, equals, said = text.rpartition("=")
    counted = said.isascii() and said.isdigit() and len(said) <= MAX_DIGITS
    if not (counted or said == REGISTERED) or (equals and not job):
        raise ConfigError(
            f"--max-staleness {text}: write N, JOB=N, {REGISTERED} or JOB={REGISTERED}; "
            "N is a number of versions"
        )
    return StalenessRule(job, int(said) if counted else None)
