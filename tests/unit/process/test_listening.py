"""Ports that other machines reach, by the kernel's own tables."""

import socket
from ipaddress import ip_address

import pytest

from rose.process.listening import exposed_at, listeners

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when"
PORT = 0x1F90
NONE4, NONE6 = "0" * 8, "0" * 32


def table(address: str, *, port: int = PORT, state: str = "0A") -> str:
    return (
        f"{HEAD}\n   0: {address}:{port:04X} {NONE4}:0000 {state} 00000000:00000000 00:00000000\n"
    )


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("0100007F", "127.0.0.1"),
        (NONE4, "0.0.0.0"),
        ("0501A8C0", "192.168.1.5"),
        ("00000000000000000000000001000000", "::1"),
        (NONE6, "::"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
    ],
)
def test_addresses_are_read_as_the_kernel_writes_them(said: str, address: str) -> None:
    assert list(listeners(table(said), PORT)) == [ip_address(address)]


def test_other_ports_and_connections_are_no_listeners() -> None:
    assert list(listeners(table(NONE4, port=PORT + 1), PORT)) == []
    assert list(listeners(table(NONE4, state="01"), PORT)) == []


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_who_listens_on_loopback_is_not_exposed(family: socket.AddressFamily) -> None:
    with socket.create_server(
        ("::1" if family is socket.AF_INET6 else "127.0.0.1", 0), family=family
    ) as server:
        assert exposed_at(server.getsockname()[1]) is None


def test_who_listens_on_all_addresses_is() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert exposed_at(server.getsockname()[1]) == "0.0.0.0"
