"""Two hosts on one machine, in network namespaces with a shaped link between them.

    origin namespace ──veth, tbf──► cluster namespace (receivers talk to each other over its lo)
Needs root and iproute2. Everything is removed at the end; nothing outside the namespaces changes.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

ORIGIN_ADDRESS, CLUSTER_ADDRESS = "10.231.77.1", "10.231.77.2"
_BURST_BYTES = 262_144
_QUEUE_MS = 50


class LinkUnavailableError(Exception):
    """This machine does not let us shape a link; the message says why."""


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """`origin`, `cluster`: namespaces. `delayed`: whether the kernel could delay and lose."""

    origin: str
    cluster: str
    delayed: bool
    interface: str

    def inside(self, namespace: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in a namespace."""
        return ["ip", "netns", "exec", namespace, *argv]

    def sent_bytes(self) -> int:
        """Bytes of all packets that left the origin so far."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        found = _run(self.inside(self.origin, ["cat", path]))
        return int(found.stdout)


@contextmanager
def shaped_link(mbit: int, delay_ms: int, loss_percent: float) -> Iterator[ShapedLink]:
    """A link of this speed; delay (there and back) and loss where the kernel has netem.

    Raises LinkUnavailableError.
    """
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise LinkUnavailableError("a shaped link needs root, ip and tc")
    number = os.getpid()
    origin, cluster = f"rose-o-{number}", f"rose-c-{number}"
    one, other = f"ro{number}", f"rc{number}"
    made: list[str] = []
    try:
        for namespace in (origin, cluster):
            _must("ip", "netns", "add", namespace)
            made.append(namespace)
            _must("ip", "-n", namespace, "link", "set", "lo", "up")
        _must("ip", "link", "add", one, "netns", origin, "type", "veth", "peer", "name", other,
              "netns", cluster)  # fmt: skip
        delayed = True
        for namespace, interface, address in (
            (origin, one, ORIGIN_ADDRESS),
            (cluster, other, CLUSTER_ADDRESS),
        ):
            _must("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", interface)
            _must("ip", "-n", namespace, "link", "set", interface, "up")
            tc = ["tc", "-n", namespace, "qdisc", "add", "dev", interface]
            rate = ["tbf", "rate", f"{mbit}mbit", "burst", str(_BURST_BYTES), "latency",
                    f"{_QUEUE_MS}ms"]  # fmt: skip
            _must(*tc, "root", "handle", "1:", *rate)
            netem = ["netem", "delay", f"{delay_ms / 2}ms", "loss", f"{loss_percent}%"]
            delayed &= _run([*tc, "parent", "1:1", "handle", "10:", *netem]).returncode == 0
        yield ShapedLink(origin, cluster, delayed, one)
    finally:
        for namespace in made:
            _run(["ip", "netns", "delete", namespace])


def _must(*argv: str) -> None:
    done = _run(argv)
    if done.returncode:
        raise LinkUnavailableError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _run(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 -- ip and tc
