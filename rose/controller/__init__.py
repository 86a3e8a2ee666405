"""Controller of RoseCapacityPolicy objects: objects of the API server become policies in force.

It runs inside the leading scheduler for that scheduler's term (docs/adr/0040). So it shares the
scheduler's lead, durable store and verdicts, and needs no election of its own.

    API server ── list, watch, probe ──> Reflector ──> objects, as they are
    objects, policies in force ──> reconcile ──> policies to apply, to delete, and refusals
    verdicts, refusals ──> judged ──> status of each object, where it differs; then its events
    the reflector heard the API server ──> the scheduler's core: without it, Hold after staleAfter

Its driver loop (`PolicyController.run`):

    while True:
        action = reflector's next: list, watch, pause
        carry it out in a thread; feed the result to `Reflector.step`
        each change, and each second: reconcile, then write the statuses that differ
"""

from rose.controller.controller import PolicyController
from rose.controller.reflector import Reflector

__all__ = ["PolicyController", "Reflector"]
