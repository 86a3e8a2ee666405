"""Ports that other machines reach."""

import socket

import pytest

from rose.process.procfs import exposed_at


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("127.0.0.1", None),
        ("127.0.0.2", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
    ],
)
def test_a_port_is_exposed_unless_it_listens_on_loopback_alone(
    address: str, exposed: str | None
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        if family is socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, "." not in address)
        server.bind((address, 0))
        server.listen()
        assert exposed_at(server.getsockname()[1]) == exposed


def test_a_connection_and_another_port_are_no_listeners() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert exposed_at(connection.getsockname()[1]) is None
    assert exposed_at(port) is None
