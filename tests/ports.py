"""Consecutive ports, for what counts its own from a base; see `rose.addresses` for any others."""

import socket

BASES = range(18_500, 30_000, 100)


def first_of(count: int) -> int:
    """The first of so many consecutive ports that nobody listens on."""
    for base in BASES:
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", base + number))
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
        return base
    raise AssertionError("no free ports")
