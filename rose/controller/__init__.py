"""Controller of RoseCapacityPolicy objects: objects of the API server become policies in force.

It runs inside the leading scheduler for that scheduler's term (docs/adr/0040). So it shares the
scheduler's lead, durable store and verdicts, and needs no election of its own.

    API server ── names, uids, versions; all of it where they differ ──> objects, as they are
    objects, policies in force ──> plan ──> policies to apply, to delete, and refusals
    verdicts, refusals ──> judged ──> status of each object, where it differs; then its events
    the API server answered ──> the scheduler's core: without it, Hold after staleAfter
"""

from rose.controller.controller import PolicyController

__all__ = ["PolicyController"]
