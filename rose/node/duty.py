"""How much of the time a guest was let run."""

from collections import deque

from executor import GuestState

WINDOW_NS = 1_000_000_000


class DutyMeter:
    """Share of the last second in which the guest had work and its gate was open."""

    def __init__(self) -> None:
        self.value = 0.0
        self._points: deque[tuple[int, int, int]] = deque()

    def update(self, now_ns: int, guest: GuestState | None) -> None:
        """Take a reading; the guest's yielded time only grows while it has work and must wait."""
        if guest is None:
            self.value = 0.0
            return
        self._points.append((now_ns, guest.yielded_ns, guest.step_seq))
        while now_ns - self._points[0][0] > WINDOW_NS:
            self._points.popleft()
        then_ns, yielded_ns, steps = self._points[0]
        elapsed_ns = now_ns - then_ns
        stepped = guest.step_seq > steps
        if elapsed_ns <= 0 or not stepped:
            self.value = 0.0
            return
        self.value = max(0.0, 1.0 - (guest.yielded_ns - yielded_ns) / elapsed_ns)
