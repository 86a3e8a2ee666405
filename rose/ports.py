"""Ports that nobody listens on now."""

import socket


def free_ports(count: int) -> list[int]:
    """So many different ones, on loopback."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
