"""The proxy as a child of the daemon: its command line, and whether it listens.

While it does not, its node's replicas are offered as unhealthy: they keep their leases and get no
turns, where each turn would find nobody.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rose.errors import UnavailableError
from rose.node.config import NodeConfig
from rose.process.child import ManagedProcess, ProcessSpec
from rose.security.certificates import PATHS


def proxied_ports(config: NodeConfig) -> Mapping[str, int]:
    """Return the loopback port of every replica that this node may ever have, by replica name.

    Guests of discovered hosts are numbered up to `discover.at_most`; the proxy itself answers for
    one that does not exist yet.
    """
    ports = {replica.id: replica.port for replica in config.dedicated}
    found = config.discover.at_most if config.discover else 0
    for guest in config.guests:
        if found:
            ports |= {f"{guest.id}-{slot}": guest.port + slot for slot in range(found)}
        else:
            ports[guest.id] = guest.port
    return ports


def log_of(config: NodeConfig) -> Path:
    return config.log_dir / "proxy.log"


def proxy_spec(config: NodeConfig) -> ProcessSpec:
    proxy = config.proxy
    assert proxy is not None
    words = [f"--host={proxy.host}", f"--port={proxy.port}"]
    words += [f"--replica={port}={name}" for name, port in proxied_ports(config).items()]
    if config.certificates.files:
        paths = zip(PATHS, config.certificates.files.paths, strict=True)
        words += [f"--{name}={path}" for name, path in paths]
    if proxy.insecure:
        words.append("--insecure")
    argv = (sys.executable, "-m", "rose.proxy.main", *words)
    return ProcessSpec("proxy", argv, log=log_of(config), piped=True)


class ProxyProcess:
    """Child process of the daemon that runs the node's proxy; call `run` in a background task.

    changed: called when `listens` changes. log: file of the proxy's output.
    """

    def __init__(self, config: NodeConfig, changed: Callable[[], None]) -> None:
        self._spec = proxy_spec(config)
        self._changed = changed
        self.log = log_of(config)
        self.listens = False

    async def run(self) -> None:
        """Run the proxy's process until cancelled, then stop it. Raises UnavailableError if it ends
        by itself.
        """
        process = await ManagedProcess.start(self._spec)
        waiting = asyncio.create_task(self._wait(process))
        try:
            code = await process.wait()
            raise UnavailableError(f"the proxy ended (exit {code}): {_last_words(self.log)}")
        finally:
            waiting.cancel()
            self._set(listens=False)
            await asyncio.shield(process.stop())

    async def _wait(self, process: ManagedProcess) -> None:
        """Set `listens` once the proxy prints its first line, which it does when it listens; a
        probe of the address might reach another process.
        """
        if await process.stdout.readline():
            self._set(listens=True)

    def _set(self, *, listens: bool) -> None:
        if listens != self.listens:
            self.listens = listens
            self._changed()


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[-1][:200] if lines else "it said nothing"
