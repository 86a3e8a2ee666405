"""Which nodes of a cluster relay weights to each other now: each is told when that changes."""

from collections.abc import Sequence

from rose.rpc import rose_pb2 as pb
from rose.scheduler.fleet import NodeView
from rose.scheduler.messages import Command

# A node reports twice a second.
LAPSED_S = 3.0


class Relays:
    """What each stream was told last."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[str, ...]] = {}

    def told(self, nodes: Sequence[NodeView], now_s: float) -> list[Command]:
        """What is to be said now; nothing where nothing changed. A new stream knows of nobody."""
        live: dict[str, list[str]] = {}
        for view in nodes:
            if view.relay_url and now_s < view.heard_s + LAPSED_S:
                live.setdefault(view.cluster, []).append(view.relay_url)
        wanted = {v.stream: tuple(sorted(set(live.get(v.cluster, ())))) for v in nodes}
        changed = {s: urls for s, urls in wanted.items() if urls != self._told.get(s, ())}
        self._told = wanted
        return [
            Command(stream, pb.NodeCommand(relays=pb.Relays(urls=urls)))
            for stream, urls in changed.items()
        ]
