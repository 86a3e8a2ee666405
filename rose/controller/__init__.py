"""Controller of RoseCapacityPolicy objects: what the API server says becomes policies in force.

It runs inside the scheduler that leads, for as long as its term (docs/adr/0040), so it has that
scheduler's lead, its durable store and its verdicts, and no election of its own.

    API server ── list, watch, probe ──> Reflector ──> objects, as they are
    objects, policies in force ──> reconcile ──> policies to apply, to delete, and refusals
    verdicts, refusals ──> judged ──> status of each object, where it differs; then its events
    the reflector heard the API server ──> the scheduler's core: without it, Hold after staleAfter

Its driver loop (`PolicyController.run`):

    while True:
        action = reflector's next: list, watch, pause
        carry it out in a thread; feed what came of it to `Reflector.step`
        each change, and each second: reconcile, then write the statuses that differ
"""

from rose.controller.controller import PolicyController
from rose.controller.reflector import Reflector

__all__ = ["PolicyController", "Reflector"]
