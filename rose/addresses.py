"""Network addresses: free ports, checks of URLs from outside, guard against accidental exposure.

Addresses come from outside: announced, offered, sent by a neighbour, read from a file. Every HTTP
client (aiohttp, the gateway's own, idna, the resolver) has its own errors for an invalid host or
port, and few callers expect them. So an address is checked once where it enters, and may be
connected to later without another check.

`check_exposure` refuses to serve the network, unless the operator said so, on a port without
authentication.
"""

import asyncio
import errno
import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from enum import IntEnum, unique
from functools import lru_cache
from typing import Self

from rose.errors import ConfigError


@unique
class DefaultPort(IntEnum):
    """Ports of ROSE's processes and of what `rose init` starts, each with what listens on it.

    None is a default of vLLM, SGLang, Prometheus or its exporters.
    """

    listener: str

    def __new__(cls, port: int, listener: str) -> Self:
        made = int.__new__(cls, port)
        made._value_ = port
        made.listener = listener
        return made

    SCHEDULER = 7400, "scheduler, gRPC"
    PROXY = 7410, "a node's proxy, for gateways on other machines"
    WEBHOOK = 7420, "webhook, for API servers of Kubernetes"
    SCHEDULER_METRICS = 7430, "scheduler, `/metrics`"
    GATEWAY = 7450, "gateway, HTTP for trainers"
    FRONT = 7460, "front, HTTP for trainers of others"
    ALERTS = 7470, "scheduler, `/v1/alerts`"
    DASHBOARD = 7480, "scheduler, dashboard"
    NODE_METRICS = 7490, "node, `/metrics`"
    PUBLISHER = 7500, "trainer's publisher, weights"
    RELAY = 7600, "relay, weights"
    RELAY_METRICS = 7610, "relay, `/metrics`"
    HOST = 8001, "a new host of `rose init`"
    GUEST = 8100, "guest of `rose init`, on loopback"


# Below the ports that the kernel assigns by itself (from 32,768 on Linux): any connection could
# take one of those before the caller listens on it.
FREE = range(10_000, 18_000)

# Free but promised: who asked for one may not listen on it yet.
_promised: set[int] = set()

# The end of a killed process takes milliseconds, on a busy machine a second.
PATIENCE_S = 2.0
_AGAIN_S = 0.02


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports of loopback, from 10,000 to 17,999.

    This process gets none of them again before half of all were given. Raises ConfigError if there
    are not so many.
    """
    if len(_promised) > len(FREE) // 2:
        _promised.clear()
    with ExitStack() as probes:
        found: list[int] = []
        at = secrets.randbelow(len(FREE))
        for port in (*FREE[at:], *FREE[:at]):
            if len(found) == count:
                _promised.update(found)
                return found
            if port in _promised:
                continue
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    raise ConfigError(f"{count} ports of {FREE.start} to {FREE.stop - 1} are not free here")


def free_port() -> int:
    """Return a free port of loopback, as `free_ports` finds it."""
    return free_ports(1)[0]


def taken(port: int, host: str = "127.0.0.1") -> str:
    """Return the system's words for why nobody can listen on a port now; "" if one can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


async def bound(bind: Callable[[], Awaitable[None]], patience_s: float = PATIENCE_S) -> None:
    """Await `bind()`, again and again for `patience_s` seconds while its port is taken. Raises its
    OSError.

    A killed process releases its locks before its ports: a successor that starts at once finds the
    locks free and the ports taken.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return await bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until_s:
                raise
        await asyncio.sleep(_AGAIN_S)


MAX_URL_CHARS = 2_048
# Longer ones are checked each time, so that the cache stays small.
KEPT_URL_CHARS = 256
MAX_HOST_CHARS = 253  # RFC 1035, 2.3.4, without the root's dot
MAX_PORT = 65_535
_SHOWN_CHARS = 80

# RFC 3986 without user, query and fragment: paths are appended to these addresses.
_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*)?"
)
_BUCKET = re.compile(
    r"(?:(?:s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]{1,253}|file://)"
    r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~=+-]+){1,32}"
)
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# inet_aton(3), and with it resolvers, read these as parts of IPv4 addresses: 127.1, 0x7f000001.
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


def checked_url(url: str, whose: str, schemes: tuple[str, ...] = ("http", "https")) -> str:
    """Return `url` unchanged if it is a URL that HTTP clients can connect to. Raises `ConfigError`
    for any other.

    whose: beginning of the message ("the url of version 3"). A host is an IP literal or a name of
    ASCII labels (an international one in its xn-- form); a port is optional. Refused are other
    schemes, credentials, a query, blanks, ports outside 1 to 65535, and more than 2 kB.
    """
    # Nodes offer the same addresses each second, so results are cached.
    if len(url) <= KEPT_URL_CHARS and _is_checked(url, schemes):
        return url
    return _checked(url, whose, schemes)


def checked_source(url: str, whose: str) -> str:
    """Return `url` unchanged if weights can be served from it: over HTTP, or from a bucket as
    s3://BUCKET/PATH, gs://, az:// or file:///PATH. Raises `ConfigError` for any other.
    """
    return (checked_bucket if is_bucket(url) else checked_url)(url, whose)


def is_bucket(url: str) -> bool:
    """Return True if the scheme of `url` is that of an object store."""
    return url.startswith(("s3://", "gs://", "az://", "file://"))


def checked_bucket(url: str, whose: str) -> str:
    """Return `url` unchanged if it names a folder of a bucket. Raises `ConfigError` otherwise."""
    if len(url) > MAX_URL_CHARS or not _BUCKET.fullmatch(url):
        raise ConfigError(
            f"{whose} is {_shown(url)}, which is no bucket; give s3://BUCKET/PATH, gs://BUCKET/PATH,"
            " az://CONTAINER/PATH or file:///PATH"
        )
    return url


@lru_cache(maxsize=16_384)
def _is_checked(url: str, schemes: tuple[str, ...]) -> bool:
    try:
        _checked(url, "", schemes)
    except ConfigError:
        return False
    return True


def _checked(url: str, whose: str, schemes: tuple[str, ...]) -> str:
    match = _URL.fullmatch(url) if len(url) <= MAX_URL_CHARS else None
    if match is None or match["scheme"] not in schemes:
        wanted = f"give {' or '.join(schemes)}://HOST[:PORT][/PATH]"
        raise ConfigError(f"{whose} is {_shown(url)}, which is no address; {wanted}")
    if match["port"] is not None and not 1 <= int(match["port"]) <= MAX_PORT:
        raise ConfigError(f"{whose} is {_shown(url)}; give a port of 1 to {MAX_PORT}")
    known = _is_ip(match["v6"], 6) if match["name"] is None else _is_host(match["name"])
    if not known:
        raise ConfigError(
            f"{whose} is {_shown(url)}, whose host is no name and no IP address; names are labels"
            " of 1 to 63 characters with single dots between them"
        )
    return url


def _is_host(name: str) -> bool:
    labels = name.split(".")
    if len(name) > MAX_HOST_CHARS or not all(map(_LABEL.fullmatch, labels)):
        return False
    if _NUMBER.fullmatch(labels[-1]):
        return _is_ip(name, 4)
    return all(_is_readable(label) for label in labels if label[:4].lower() == "xn--")


def _is_readable(label: str) -> bool:
    """Return True if clients that decode international host names, as yarl does, can decode this
    xn-- label.
    """
    try:
        label.encode("ascii").decode("idna")
    except UnicodeError:
        return False
    return True


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _shown(url: str) -> str:
    return repr(url if len(url) <= _SHOWN_CHARS else url[:_SHOWN_CHARS] + "…")


# ---- lists of gRPC addresses, of the schedulers or of a store's cluster ----

MAX_ADDRESSES = 16
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


def is_address(text: str) -> bool:
    """Return True for HOST:PORT, where an IPv6 host is in brackets."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match["port"]) < 1 << 16


def checked_addresses(text: str, whose: str) -> tuple[str, ...]:
    """Return the HOST:PORT addresses of a comma-separated list, each once.

    Raises `ConfigError` for an invalid list.
    """
    found = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    for each in found:
        if not is_address(each):
            raise ConfigError(
                f"{whose} has {each[:80]!r}, which is no address; give HOST:PORT, several with"
                " commas between them"
            )
    if len(found) > MAX_ADDRESSES:
        raise ConfigError(f"{whose} has {len(found)} addresses; give at most {MAX_ADDRESSES}")
    return found


# ---- HOST:PORT ----


def host_port(host: str, port: int | None = None) -> str:
    """Return HOST:PORT, or HOST without a port, with an IPv6 address in brackets."""
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return host if port is None else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True for a loopback address, and for the name localhost but no other name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, insecure: bool, what: str) -> None:
    """Raise `ConfigError` for a host that other machines can reach, unless `insecure` is set.

    It guards ports whose callers show no certificates. what: what a caller of the port can do, in a
    few words.
    """
    if not (insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host or 'all addresses'} is reached from other machines, and whoever reaches"
            f" it can {what}; give --ca, --certificate and --key, or fence the network and give"
            " --insecure, or listen on 127.0.0.1"
        )
