"""Lists of gRPC addresses: `HOST:PORT,HOST:PORT`, of the schedulers or of a store's cluster."""

import re

from rose.errors import ConfigError

MAX_ADDRESSES = 16
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


def is_address(text: str) -> bool:
    """Return True for HOST:PORT, with an IPv6 address in brackets."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match["port"]) < 1 << 16


def checked_addresses(text: str, whose: str) -> tuple[str, ...]:
    """Return the addresses of a list, each once. Raises `ConfigError` for an invalid list."""
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
