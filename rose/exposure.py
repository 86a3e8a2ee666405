"""Refuses to serve the network by mistake what asks nobody who he is."""

import ipaddress

from rose.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; names other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, insecure: bool, what: str) -> None:
    """Raise `ConfigError` for an address of the network, unless the operator has said so.

    `what` says in a few words what whoever reaches the port can do there.
    """
    if not (insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host or 'all addresses'} is reached from other machines, and whoever reaches"
            f" it can {what}; fence the network and give --insecure, or listen on 127.0.0.1"
        )
