"""Ways to a node and to its weights, as its file has them: certificates, relay, proxy, limits."""

from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rose.security.certificates import CertificateFiles, files_of
from rose.weight_distribution import Credentials
from weight_transfer.fetch import Caps


class Frozen(BaseModel):
    """Base of configuration models: unknown fields are refused, and objects cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ReceiverConfig(Frozen):
    """Limits on the cost of fetching weights; None sets no limit.

    bytes_per_s: average rate on the link. disk_bytes: size of the chunks and manifests kept; the
    oldest that no update needs are deleted first. threads, nice: number and niceness of the threads
    that hash and write received chunks.
    """

    bytes_per_s: int | None = Field(default=None, gt=0)
    disk_bytes: int | None = Field(default=None, gt=0)
    threads: int = Field(default=2, gt=0, le=64)
    nice: int = Field(default=10, ge=0, le=19)

    @property
    def caps(self) -> Caps:
        return Caps(self.bytes_per_s, self.disk_bytes, self.threads, self.nice)


class CertificateConfig(Frozen):
    """PEM files of the node's certificate: all three, or none on loopback.

    The files are read again when they change. The certificate's role is node, and its name the
    node's.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @cached_property
    def files(self) -> CertificateFiles | None:
        """Certificate files, read on first use and cached; None if none are named. Raises
        ConfigError for a file that cannot be used.
        """
        return files_of(self.ca, self.certificate, self.key)


class TransportConfig(CertificateConfig):
    """Credentials with which this node fetches and serves weights, and the origins that it trusts.

    token_file: file of the token that every caller of a cluster bears. ca, certificate, key: PEM
    files of another certificate than the node's own, which otherwise serves for weights too. Give
    all three or none. origins: scheme, host and port of the publisher and the relays that get the
    token where there are no certificates. buckets: folders of object stores (s3://BUCKET/PATH) that
    this node reads versions from; its environment has the credentials.
    """

    token_file: Path | None = None
    origins: tuple[str, ...] = ()
    buckets: tuple[str, ...] = ()

    def credentials(self, own: CertificateConfig) -> Credentials:
        """Return the credentials read from these files; `own` gives the certificate if this object
        names none. Raises ConfigError for a file that cannot be used.
        """
        named = (self.ca, self.certificate, self.key) != (None, None, None)
        given = self if named else own
        files = self.token_file, given.ca, given.certificate, given.key
        return Credentials.read(*files, origins=self.origins)


class RelayConfig(Frozen):
    """Relay by which this node passes weights on to its neighbours. `host`: an address that they
    reach.

    insecure: allow other machines to reach it though `transport` names no certificates.
    """

    host: str
    port: int = Field(gt=0, lt=65_536)
    insecure: bool = False


class ProxyConfig(RelayConfig):
    """Proxy through which turns of other machines reach the engines, which listen on loopback
    alone.

    host: an address that gateways reach. insecure: without certificates, allow anybody who reaches
    it to send turns.
    """


class FanoutConfig(Frozen):
    """Fixed group of GPUs that pass weight chunks on over NCCL, in which this node takes part; CuPy
    must be installed.

    rank, size: of the group; rank 0 leads and needs a `relay`. leader: URL of rank 0's relay.
    device: the CUDA ordinal.
    """

    rank: int = Field(ge=0)
    size: int = Field(ge=2, le=4_096)
    leader: str = ""
    device: int = Field(default=0, ge=0)
