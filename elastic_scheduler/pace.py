"""How fast single turns are: by their own pace, else by that of others on the replica, or anywhere.

A replica's rate says little about one turn, which never has all of it: an idle replica that offers
a thousand tokens per second to a full batch gives a single turn thirty. So what a turn still takes,
and what a copy of it would take elsewhere, go by what turns really had.
"""

from collections.abc import Iterable
from operator import itemgetter

from elastic_scheduler.placement import Placement, Quote
from elastic_scheduler.replica_load import ReplicaLoad
from elastic_scheduler.routing_cost import TurnAsk, revoke_s

# Weight of the newest turn in a replica's pace, and in that of all replicas.
REPLICA_SHARE = 0.3
FLEET_SHARE = 1 / 256


class PaceBook:
    """Tokens per second of single turns; 0 where nothing was seen."""

    def __init__(self) -> None:
        self._fleet_tok_s = 0.0

    def note(self, placement: Placement) -> None:
        """A turn's attempt ended."""
        seen, load = placement.pace_tok_s, placement.load
        if seen:
            load.pace_tok_s = _moved(load.pace_tok_s, seen, REPLICA_SHARE)
            self._fleet_tok_s = _moved(self._fleet_tok_s, seen, FLEET_SHARE)

    def left_s(self, placement: Placement, tokens: int, silent_s: float) -> float:
        """Seconds that a live turn takes for `tokens` more; 0 while nobody knows."""
        pace_tok_s = placement.pace_tok_s or self._of(placement.load)
        return tokens / pace_tok_s + silent_s if pace_tok_s else 0.0

    def quote(self, loads: Iterable[ReplicaLoad], ask: TurnAsk, now_s: float) -> Quote | None:
        """The replica on which the turn would be done first, if it began there now."""
        weighed = [(self._begun_s(load, ask, now_s), load) for load in loads]
        weighed = [(each_s, load) for each_s, load in weighed if each_s]
        if not weighed:
            return None
        best_s, best = min(weighed, key=itemgetter(0))
        return Quote(best.view.id, best_s, ask, best, weighed)

    def _begun_s(self, load: ReplicaLoad, ask: TurnAsk, now_s: float) -> float:
        """Seconds that the turn would take if it began there now; 0 while nobody knows."""
        pace_tok_s = self._of(load)
        if not pace_tok_s:
            return 0.0
        uncached = max(0, ask.need.prompt_tokens - ask.cached_tokens * (load is ask.holder))
        total_s = ask.expected_tokens / pace_tok_s + uncached / load.prefill_tok_s
        return total_s + revoke_s(load, ask, total_s, now_s)

    def _of(self, load: ReplicaLoad) -> float:
        return load.pace_tok_s or self._fleet_tok_s


def _moved(old: float, seen: float, share: float) -> float:
    return old + share * (seen - old) if old else seen
