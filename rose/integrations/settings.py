"""Settings of a trainer's side: the addresses of ROSE, and the job.

Trainers start their workers themselves, so each setting has an environment variable too:

    ROSE_JOB ROSE_SCHEDULER ROSE_GATEWAY ROSE_CHECKPOINT ROSE_ROOT ROSE_KEY
    ROSE_HOST ROSE_PORT ROSE_MAX_STALENESS ROSE_REPLICAS ROSE_TIMEOUT_S ROSE_TAKE_OVER
    ROSE_BUCKET
    ROSE_TOKEN_FILE ROSE_CA ROSE_CERTIFICATE ROSE_CERTIFICATE_KEY
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from rose.addresses import checked_addresses, checked_bucket, checked_url
from rose.client.blocking import BlockingRolloutClient
from rose.client.credentials import GatewayCredentials
from rose.errors import ConfigError
from rose.security.certificates import CertificateFiles, files_of
from rose.security.keys import signing_key
from weight_transfer import SigningKey

PREFIX = "ROSE_"
_FILES = ("checkpoint", "root", "key", "token_file", "ca", "certificate", "certificate_key")
_YES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of one job's trainer; they pickle, so that every worker gets the same.

    checkpoint: Hugging Face folder that replicas start with: version 0, and the names and dtypes of
    all published weights. root: folder of published versions, the job's own; a trainer that
    restarts with it continues. key: file of the job's signing key. host, port: address at which
    nodes fetch versions, 0 for any free port. bucket: s3://BUCKET/PATH, gs://, az:// or file:///PATH
    that gets a copy of the root, which nodes then read instead. replicas: how many must serve a
    version before `publish` returns. timeout_s: bound of each wait. take_over: replace a trainer of
    this job that still runs. frozen: beginnings of names, with commas between them, of tensors that
    stay the checkpoint's (`model.visual.`): the trainer need not give them.
    token_file: token shown to gateways, of `rose token issue --out`. ca, certificate and
    certificate_key: of a cluster that has certificates; gateways may need no more than the ca.
    """

    job: str
    scheduler: str
    gateway: str
    checkpoint: Path
    root: Path
    key: Path
    host: str = "127.0.0.1"
    port: int = 0
    max_staleness: int = 1
    replicas: int = 1
    timeout_s: float = 300.0
    take_over: bool = False
    frozen: str = ""
    bucket: str = ""
    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None

    def __post_init__(self) -> None:
        for name in _FILES:
            # Trainers' own configurations give folders as text.
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, Path(given))
        for name in ("job", "scheduler", "gateway", "checkpoint", "root", "key"):
            if not str(getattr(self, name)):
                raise ConfigError(f"a trainer needs its {name}; set {PREFIX}{name.upper()}")
        checked_addresses(self.scheduler, f"{PREFIX}SCHEDULER {self.scheduler}")
        checked_url(self.gateway, f"{PREFIX}GATEWAY")
        if self.bucket:
            checked_bucket(self.bucket, f"{PREFIX}BUCKET")
        if not self.checkpoint.is_dir():
            raise ConfigError(f"{self.checkpoint}: no such folder; set {PREFIX}CHECKPOINT")
        if self.max_staleness < 0 or self.replicas < 0:
            raise ConfigError("max_staleness and replicas are counts; give 0 or more")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"a timeout of {self.timeout_s} s is none; set {PREFIX}TIMEOUT_S")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **given: object) -> Self:
        """Return settings read from `ROSE_*` variables; the keyword arguments take precedence.

        Raises `ConfigError`.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = dict(given)
        for field in fields(cls):
            raw = environ.get(PREFIX + field.name.upper())
            if raw and field.name not in values:
                values[field.name] = _parsed(field.name, field.type, raw)
        for name in ("job", "scheduler", "gateway", "checkpoint", "root", "key"):
            if name not in values:
                raise ConfigError(f"a trainer needs its {name}; set {PREFIX}{name.upper()}")
        return cls(**values)

    def signing_key(self) -> SigningKey:
        """Return the job's private key, read from `key`.

        Raises `ConfigError` if the file holds anything else.
        """
        return signing_key(self.key)

    def certificates(self) -> CertificateFiles | None:
        """Return the trainer's certificate files; None in a cluster without certificates.

        Raises `ConfigError` if one of the three is missing.
        """
        if self.certificate is None and self.certificate_key is None:
            return None
        return files_of(self.ca, self.certificate, self.certificate_key)

    def client(self) -> BlockingRolloutClient:
        """Return a blocking client of the job's gateway, for rollouts that the trainer's own code
        generates.
        """
        return BlockingRolloutClient(
            self.gateway, self.timeout_s, credentials=self.credentials(), job=self.job
        )

    def credentials(self) -> GatewayCredentials:
        """Return the credentials (token file, CA, certificate, key) that clients show to the
        gateway.
        """
        return GatewayCredentials(self.token_file, self.ca, self.certificate, self.certificate_key)


def _parsed(name: str, kind: object, raw: str) -> object:
    try:
        if kind is bool:
            return _YES[raw.strip().lower()]
        if kind in (int, float, str):
            return kind(raw)
        return Path(raw)
    except (ValueError, KeyError):
        raise ConfigError(f"{PREFIX}{name.upper()}={raw!r:.80} cannot be read") from None
