"""The table of a new leader: what it lacks while it settles stays as it was."""

from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.replicas.watch import WatchedTable
from rose.rpc import rose_pb2 as pb


def row(name: str, epoch: int, **fields: object) -> pb.Replica:
    kind = pb.REPLICA_KIND_GUEST
    return pb.Replica(id=name, kind=kind, url="http://h", leased=True, lease_epoch=epoch, **fields)  # type: ignore[arg-type]


def test_replicas_that_a_new_leader_has_not_heard_of_stay_until_it_has_settled() -> None:
    taken: list[dict[str, int]] = []

    def sink(entries: tuple[ReplicaEntry, ...], jobs: tuple[str, ...]) -> None:
        del jobs
        taken.append({each.id: each.lease_epoch for each in entries})

    table = WatchedTable("127.0.0.1:1", "g", 5.0, lambda *a, **kw: None)
    for said in (
        pb.ReplicaTable(replicas=[row("a", 1), row("b", 1)]),
        pb.ReplicaTable(settling=True),
        pb.ReplicaTable(replicas=[row("a", 2)], settling=True),
        pb.ReplicaTable(replicas=[row("a", 2)]),
    ):
        table._note(sink, said)
    assert taken == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 2}]
