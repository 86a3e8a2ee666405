"""When a guest must end itself: killed by its grant, or left alone by its node daemon."""

from executor.sections import Grant, GrantMode

ORPHANED = "orphaned"
KILLED = "killed"


class OrphanCore:
    """Judges the grant's age; the clock is handed in."""

    def __init__(self, started_ns: int, orphan_ns: int) -> None:
        """A guest that never sees a grant counts from `started_ns`."""
        if orphan_ns <= 0:
            raise ValueError(f"orphan_ns is {orphan_ns}; give a positive time")
        self._last_sign_ns = started_ns
        self._orphan_ns = orphan_ns

    def step(self, now_ns: int, grant: Grant | None) -> str | None:
        """Why to end now, None to live on; `grant` is None when it cannot be read."""
        if grant is not None:
            if grant.mode is GrantMode.KILL:
                return KILLED
            # A heartbeat from the future is no sign of life.
            if grant.heartbeat_ns <= now_ns:
                self._last_sign_ns = max(self._last_sign_ns, grant.heartbeat_ns)
        return ORPHANED if now_ns - self._last_sign_ns > self._orphan_ns else None
