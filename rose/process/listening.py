"""Listening sockets by the kernel's tables: the addresses at which a port can be reached."""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LISTENS: Final = "0A"
_WORD: Final = 8


def exposed_at(port: int) -> str | None:
    """Return an address at which other machines reach a port of this one, or None.

    An engine has to listen on loopback alone: it checks no certificate.
    """
    said = (table.read_text(encoding="ascii") for table in _TABLES if table.exists())
    beyond = (each for text in said for each in listeners(text, port) if not each.is_loopback)
    found = next(beyond, None)
    return None if found is None else str(found)


def listeners(table: str, port: int) -> Iterator[IPv4Address | IPv6Address]:
    """Return the addresses of a table of /proc/net/tcp or tcp6 that listen on the port."""
    for line in table.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, _, number = local.partition(":")
        if state == _LISTENS and int(number, 16) == port:
            yield _address(address)


def _address(said: str) -> IPv4Address | IPv6Address:
    """Return an address from the kernel's words, which are in this machine's byte order."""
    words = (bytes.fromhex(said[at : at + _WORD])[::-1] for at in range(0, len(said), _WORD))
    found = ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
