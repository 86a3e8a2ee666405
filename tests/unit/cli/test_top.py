"""`rose top`: who misses a target stands first, with what its guests do beneath, and why."""

from typing import Any

from rose.cli.cluster.top import Frame, Rates, bar, fitted_view, frame_view
from rose.command_line.output import text_of
from rose.operate.fleet import Fleet, fleet_of
from rose.rpc import rose_pb2 as pb


def fleet(**tokens: int) -> Fleet:
    """Three hosts, of which `late` misses its target; each has a guest."""
    ttft = {"calm": 0.1, "late": 0.6, "near": 0.45}
    at_work: dict[str, Any] = {"state": "healthy", "mode": "run", "reason": "ok", "duty": 0.62}
    return fleet_of(
        pb.SnapshotReply(
            harvest=pb.HARVEST_MODE_ACTIVE,
            nodes=[pb.AttachedNode(node=name, replicas=[f"g-{name}"]) for name in ttft],
            hosts=[
                pb.HostTelemetry(node=name, ttft_p95_s=at_s, ttft_target_s=0.5, busy_share=0.3)
                for name, at_s in ttft.items()
            ],
            replicas=[pb.Replica(id=f"g-{name}", kind=1, node=name) for name in ttft],
            guests=[
                pb.GuestTelemetry(replica=f"g-{name}", tokens_total=tokens.get(name, 0), **at_work)
                for name in ttft
            ],
        )
    )


def rows(frame: Frame, node: str = "") -> list[list[str]]:
    (table,) = frame_view(frame, node).tables
    return [[str(cell) for cell in row] for row in table.rows]


def test_whoever_misses_its_target_stands_first_with_its_guests_beneath() -> None:
    found = rows(Frame(fleet(), {}))
    assert [row[0] for row in found] == ["late", "  g-late", "near", "  g-near", "calm", "  g-calm"]
    assert found[0][1] == "600 / 500 ms MISSED"
    assert found[1][3] == "██████···· 62% duty"
    assert found[1][6] == "run"
    assert found[1][7].startswith("ok (its grant holds")
    assert [row[0] for row in rows(Frame(fleet(), {}), "near")] == ["near", "  g-near"]


def test_rates_are_of_the_time_between_two_frames() -> None:
    now = iter([10.0, 12.0, 14.0])
    rates = Rates(lambda: next(now))
    assert rates.frame(fleet(late=100)).tok_s == {}
    assert rates.frame(fleet(late=500)).tok_s == {"g-calm": 0.0, "g-late": 200.0, "g-near": 0.0}
    begun_anew = rates.frame(fleet(late=3))
    assert "g-late" not in begun_anew.tok_s
    assert rows(begun_anew)[1][5] == "-"


def test_of_more_rows_than_lines_it_is_said_how_many_are_left_out() -> None:
    view = frame_view(Frame(fleet(), {}), "")
    drawn = text_of(fitted_view(view, 8))
    assert "g-late" in drawn
    assert "calm" not in drawn
    assert "3 more rows: make the terminal higher, or give --node" in drawn
    assert "more rows" not in text_of(fitted_view(view, 30))


def test_a_bar_is_never_longer_than_its_frame() -> None:
    assert [bar(share) for share in (None, 0.0, 0.5, 1.0, 7.0)] == [
        "·" * 10,
        "·" * 10,
        "█" * 5 + "·" * 5,
        "█" * 10,
        "█" * 10,
    ]
