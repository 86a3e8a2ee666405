"""What peers got wrong, for the event log: each thing once, and never faster than disks grow."""

from collections import OrderedDict

from rose.scheduler.messages import Record

REMEMBERED = 1_024
# Offers repeat twice a second, and whoever reaches the port can think of new mistakes for ever.
MOST_A_MINUTE = 60
MINUTE_S = 60.0


class Complaints:
    """Complaints by (event, peer, reason), in bounded memory; times are monotonic seconds."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._minute_s: float | None = None
        self._written = 0
        self._unsaid = 0

    def about(self, event: str, peer: str, reason: str, now_s: float) -> list[Record]:
        """What to record now; nothing for what was said before, or beyond the minute's share."""
        told = self.due(now_s)
        key = (event, peer, reason)
        if key in self._said:
            self._said.move_to_end(key)
            return told
        if self._minute_s is None:
            self._minute_s = now_s
        if self._written >= MOST_A_MINUTE:
            self._unsaid += 1
            return told
        self._written += 1
        self._said[key] = None
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return [*told, Record(event, {"node": peer, "reason": reason})]

    def due(self, now_s: float) -> list[Record]:
        """At a minute's end: how many complaints were left out in it."""
        if self._minute_s is None or now_s < self._minute_s + MINUTE_S:
            return []
        unsaid, self._unsaid = self._unsaid, 0
        self._minute_s, self._written = None, 0
        return [Record("complaints_unsaid", {"count": unsaid})] if unsaid else []
