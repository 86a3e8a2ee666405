"""StandInNode: the sections that a host and a node daemon would write, for engine tests."""

import threading
import time

from executor import ControlPage, Grant, GrantMode
from tests.harness.seated_host import SeatedHost

BEAT_S = 0.02


class StandInNode(threading.Thread):
    """Writes what a node daemon would: one grant, at 50 Hz; with the mode None it is silent.

    Unless a real host has the page it writes also what that would: a host, idle unless told.
    """

    def __init__(self, page: ControlPage, *, real_host: bool = False) -> None:
        super().__init__(daemon=True)
        self._page = page
        self._host = None if real_host else SeatedHost(page)
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Grant all that there is, beside an idle host."""
        self.mode: GrantMode | None = GrantMode.RUN
        self.token_budget = 2048
        self.max_sequences = 32
        self.kv_granule_cap = 0
        self.slack_share = 0.0
        self.ttl_s = 0.5
        self.host_running = 0
        self.reason = "test"

    def hold(self, cap: int) -> None:
        """Freeze the guest, and let it keep so many granules."""
        self.mode, self.kv_granule_cap = GrantMode.FREEZE, cap

    @property
    def generous(self) -> bool:
        """True if it grants the whole grant of `reset`."""
        grant = (self.mode, self.token_budget, self.kv_granule_cap, self.slack_share, self.ttl_s)
        rest = self.host_running, self.max_sequences
        return (*grant, *rest) == (GrantMode.RUN, 2048, 0, 0.0, 0.5, 0, 32)

    def silence(self) -> None:
        """Grant no more; returns once nothing is written any more."""
        with self._writing:
            self.mode = None

    def run(self) -> None:
        while not self._ended.wait(BEAT_S):
            if self._host is not None:
                self._host.tell(running=self.host_running)
            with self._writing:
                if self.mode is not None:
                    self._page.grant.write(self._grant(self.mode, time.monotonic_ns()))

    def _grant(self, mode: GrantMode, now_ns: int) -> Grant:
        return Grant(
            mode,
            token_budget=self.token_budget,
            max_sequences=self.max_sequences,
            slack_share=self.slack_share,
            kv_granule_cap=self.kv_granule_cap,
            epoch=1,
            reason=self.reason,
            heartbeat_ns=now_ns,
            expiry_ns=now_ns + round(self.ttl_s * 1e9),
        )

    def stop(self) -> None:
        self._ended.set()
        self.join()
        if self._host is not None:
            self._host.close()
