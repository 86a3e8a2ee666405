"""Where the tokens of one attempt go: text first (it may cut them), journal, feed."""

from elastic_scheduler import Attempt, Deliver, End, Outcome
from rose.gateway.feed import TurnFeed
from rose.gateway.links import LinkError, ReplicaLine
from rose.gateway.race import TurnCopy
from rose.gateway.stats import GatewayStats
from rose.gateway.turn_request import TurnRequest


class AttemptSink:
    """One attempt at one copy of a turn."""

    __slots__ = ("_copy", "_feed", "_journal", "_outcome", "_stats", "attempt")

    def __init__(self, copy: TurnCopy, attempt: Attempt, stats: GatewayStats) -> None:
        self._stats = stats
        self._copy = copy
        self._journal = copy.journal
        self._feed = copy.feed
        self._outcome: Outcome | None = None
        self.attempt = attempt

    @property
    def delivered(self) -> bool:
        """Whether the attempt completed its turn."""
        return self._outcome is not None

    def end(self, end: End, reason: str) -> Outcome | None:
        """End the attempt, once; a complete turn goes to its readers at that moment."""
        if self._outcome is None:
            outcome = self._journal.end(self.attempt.number, end, reason)
            if isinstance(outcome, Deliver):
                stop_reason = _stop_reason(self._copy.request, self._feed, outcome)
                self._feed.deliver(outcome, stop_reason)
                if self._copy.race is None:
                    self._stats.turns += 1
                else:
                    self._copy.race.delivered(self._copy)
            self._outcome = outcome
        return self._outcome

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the turn."""
        return self._feed.text is not None and self._feed.text.matched is not None

    def tell(self) -> None:
        """Readers may have what was taken."""
        self._feed.tell()

    def take(self, line: ReplicaLine) -> int:
        """Journal a line's tokens, up to a stop string; how many.

        Raises LinkError, having taken nothing, for what no replica can have sampled.
        """
        check_line(line, self._journal.remaining)
        tokens, logprobs = line.token_ids, line.logprobs
        if self._feed.text is not None:
            kept = self._feed.text.add(tokens)
            if kept < len(tokens):
                tokens, logprobs = tokens[:kept], logprobs[:kept]
        stamp = (line.version, line.oldest_version)
        self._journal.append(self.attempt.number, tokens, logprobs, *stamp)
        self._feed.add(tokens, logprobs, *stamp)
        return len(tokens)


def check_line(line: ReplicaLine, budget: int) -> None:
    """Raise LinkError for a line whose parts do not go together."""
    count, oldest = len(line.token_ids), line.oldest_version
    if count > budget:
        raise LinkError(f"{count} tokens came where {budget} were left")
    if count != len(line.logprobs):
        raise LinkError(f"{count} tokens came with {len(line.logprobs)} logprobs")
    if oldest is not None and not 0 <= oldest <= line.version:
        raise LinkError(f"tokens of version {line.version} on KV of version {oldest}")


def _stop_reason(request: TurnRequest, feed: TurnFeed, turn: Deliver) -> int | str | None:
    """As vLLM has it: the stop string or stop token that ended the turn, None for anything else."""
    if turn.finish_reason != "stop":
        return None
    if feed.text is not None and feed.text.matched is not None:
        return feed.text.matched
    last = turn.token_ids[-1] if turn.token_ids else None
    return last if last in (request.sampling.stop_token_ids or ()) else None
