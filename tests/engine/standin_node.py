"""StandInNode: the sections that a host and a node daemon would write, for engine tests."""

import threading
import time

from executor import ControlPage, Grant, GrantMode, HostState


class StandInNode(threading.Thread):
    """Writes what a host and a node daemon would: a host, idle unless told, and one grant."""

    def __init__(self, page: ControlPage) -> None:
        super().__init__(daemon=True)
        self._page = page
        self._ended = threading.Event()
        self.mode = GrantMode.RUN
        self.token_budget = 2048
        self.kv_granule_cap = 0
        self.host_running = 0

    def run(self) -> None:
        while not self._ended.wait(0.02):
            now_ns = time.monotonic_ns()
            self._page.host.write(HostState(running=self.host_running, heartbeat_ns=now_ns))
            self._page.grant.write(
                Grant(
                    self.mode,
                    token_budget=self.token_budget,
                    max_sequences=32,
                    kv_granule_cap=self.kv_granule_cap,
                    epoch=1,
                    reason="test",
                    heartbeat_ns=now_ns,
                    expiry_ns=now_ns + 500_000_000,
                )
            )

    def stop(self) -> None:
        self._ended.set()
        self.join()
