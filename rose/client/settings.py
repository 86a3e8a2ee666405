"""What a trainer can set of its client; plain values, so that clients travel between processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how fast a turn is tried again. A try asks every gateway once.

    tries: in a row without a new token. first_s, max_s: the pause after the first try, doubled
    after each, and its bound: 12 tries last 17 s, enough for a gateway to be started anew.
    """

    tries: int = 12
    first_s: float = 0.1
    max_s: float = 2.0

    def __post_init__(self) -> None:
        if self.tries < 1 or not 0 < self.first_s <= self.max_s:
            raise ConfigError("Retry: tries of at least 1 and 0 < first_s <= max_s")

    def pause_s(self, tried: int) -> float:
        """The pause after so many tries."""
        return float(min(self.max_s, self.first_s * 2 ** min(tried - 1, 30)))


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """urls: of all gateways. timeout_s: of a turn, all tries together. connect_s: of a connection.

    A gateway that answered no health probe `probes` times in a row, each `probe_s` long, is dead.
    """

    urls: tuple[str, ...]
    timeout_s: float = 300.0
    connect_s: float = 5.0
    probe_s: float = 2.0
    probes: int = 3
    retry: Retry = Retry()

    def __post_init__(self) -> None:
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https"):
                raise ConfigError(f"{url!r} is no gateway's address: write http://HOST:PORT")
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ConfigError("name at least one gateway, and each of them once")
        if min(self.timeout_s, self.connect_s, self.probe_s, self.probes) <= 0:
            raise ConfigError("timeout_s, connect_s, probe_s, probes: above 0")


def gateway_urls(urls: str | Sequence[str]) -> tuple[str, ...]:
    """One address or several, without slashes at the end."""
    several = [urls] if isinstance(urls, str) else urls
    return tuple([url.rstrip("/") for url in several])
