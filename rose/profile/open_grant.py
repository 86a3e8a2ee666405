"""The sections that a host and a node write, where there is neither: an idle host and one grant."""

import threading
import time
from dataclasses import replace

from executor import ControlPage, Grant, GrantMode, GuestState, HostState

TICK_S = 0.02
TTL_NS = 500_000_000


class OpenGrant(threading.Thread):
    """Keeps a grant alive on a page of its own, and changes it at once when told to."""

    def __init__(self, page: ControlPage, token_budget: int, max_sequences: int) -> None:
        super().__init__(name="rose-open-grant", daemon=True)
        self._page = page
        self._host = page.take_host()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._grant = Grant(GrantMode.RUN, token_budget, max_sequences, epoch=1, reason="profile")

    def run(self) -> None:
        """Until stopped."""
        while not self._ended.wait(TICK_S):
            with self._lock:
                self._write()

    def freeze(self) -> None:
        """No step begins from now on."""
        with self._lock:
            self._grant = replace(self._grant, mode=GrantMode.FREEZE)
            self._write()

    def allow(self, token_budget: int) -> None:
        """Steps of so many tokens."""
        with self._lock:
            self._grant = replace(self._grant, mode=GrantMode.RUN, token_budget=token_budget)
            self._write()

    def guest(self) -> GuestState:
        """What the guest says; nothing yet reads as zeroes."""
        return self._page.guest.peek() or GuestState()

    def stop(self) -> None:
        """End the thread; the grant lapses."""
        self._ended.set()
        self.join()
        self._host.close()

    def _write(self) -> None:
        now_ns = time.monotonic_ns()
        self._host.write(HostState(heartbeat_ns=now_ns))
        self._host.beat(now_ns)
        self._page.grant.write(replace(self._grant, heartbeat_ns=now_ns, expiry_ns=now_ns + TTL_NS))
