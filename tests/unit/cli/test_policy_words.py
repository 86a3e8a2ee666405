"""`rose policy explain` says in a line what a node would harvest, since when, and why not more."""

from datetime import datetime

from rose.cli.cluster.policy import NodePolicy, explained
from rose.operate.fleet import Engine, Replica, capacity_of
from rose.rpc import rose_pb2 as pb

NOON = datetime(2026, 11, 23, 12, 0)
GIB = 1 << 30


def row(**more: object) -> pb.NodeCapacity:
    fields: dict[str, object] = {
        "node": "serving-0",
        "mode": pb.HARVEST_MODE_OFF,
        "would": pb.HARVEST_MODE_ACTIVE,
        "lend_bytes": 40 * GIB,
        "lend_compute": 0.7,
        "advised_s": 10_080.0,
        "advised_byte_s": 38.0 * GIB * 10_080,
        "advised_compute_s": 0.61 * 10_080,
        "limits": ["watermarks.high (kv 83% > 80%)"],
    }
    return pb.NodeCapacity(**{**fields, **more})  # type: ignore[arg-type]


def said(of: pb.NodeCapacity, *guests: Replica) -> list[str]:
    return [*explained(NodePolicy("serving-0", capacity_of(of), guests), lambda: NOON)]


def test_the_first_line_says_how_much_since_when_and_what_holds_it_back() -> None:
    assert said(row())[0] == (
        "serving-0: would harvest 38.0 GiB, 61% of compute since 09:12;"
        " held back by watermarks.high (kv 83% > 80%)"
    )


def test_a_node_that_may_lend_is_told_apart_and_yesterday_has_its_date() -> None:
    lends = row(mode=pb.HARVEST_MODE_ACTIVE, limits=[], advised_s=86_400.0)
    assert said(lends)[0].startswith("serving-0: may harvest 4.4 GiB, 7% of compute since Nov 22,")


def test_before_there_is_an_average_the_figures_are_of_now() -> None:
    assert "would harvest 40.0 GiB, 70% of compute now" in said(row(advised_s=3.0))[0]
    silent = pb.NodeCapacity(node="serving-0", would=pb.HARVEST_MODE_ACTIVE)
    assert said(silent)[0] == "serving-0: would harvest what its node has not said yet"


def test_its_load_and_each_guests_reason_follow() -> None:
    engine = Engine("healthy", 0, "freeze", "kv_pressure", "the host needs it", 0, 0, 0, 0, 0, 0, 0)
    guest = Replica("g0", "guest", "serving-0", "", True, "", 0, "", "", None, None, engine)
    lines = said(row(busy_share=0.31, kv_share=0.83), guest)
    assert lines[1] == (
        "  lends nothing; an Active policy would: lends; its host works 31% of the time;"
        " its host's KV cache is 83% full"
    )
    assert "  g0: freeze, duty 0%: the host needs it" in lines
