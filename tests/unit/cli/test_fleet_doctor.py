"""`rose doctor` says what a cluster lacks, each with what to do next."""

from typing import Any

import pytest

from rose.cli.cluster.fleet_doctor import fleet_checks
from rose.cli.machine.doctor import Diagnosis, Severity
from rose.cli.main import main
from rose.operate.fleet import fleet_of
from rose.rpc import rose_pb2 as pb

WHOLE: dict[str, Any] = {
    "release": "0.3.0",
    "harvest": pb.HARVEST_MODE_ACTIVE,
    "nodes": [pb.AttachedNode(node="n0", silent_s=0.1, release="0.3.0", obeys=True)],
    "hosts": [pb.HostTelemetry(node="n0", ttft_p95_s=0.1, ttft_target_s=0.5)],
    "jobs": [pb.JobView(job="grpo", run=pb.RunView(run="r", live=True))],
    "guests": [pb.GuestTelemetry(replica="g0", state="healthy")],
}
POLICY = pb.PolicyView(name="chat", policy="{}")


def found(*policies: pb.PolicyView, **changes: Any) -> list[Diagnosis]:
    fleet = fleet_of(pb.SnapshotReply(**{**WHOLE, **changes}))
    return [each for each in fleet_checks(fleet, policies) if each.level is not Severity.OK]


def test_a_whole_cluster_lacks_nothing() -> None:
    assert found(POLICY) == []


def test_each_lack_is_a_line_that_says_what_to_do() -> None:
    lacks: list[tuple[dict[str, Any], str, Severity]] = [
        ({"store_stalled_s": 9.0}, "store: a write has waited for 9.0 s", Severity.WRONG),
        ({"troubles": ["log: disk is full"]}, "scheduler: log: disk is full", Severity.WRONG),
        ({"harvest": pb.HARVEST_MODE_HOLD}, "rose resume ends it", Severity.NOTE),
        ({"harvest": pb.HARVEST_MODE_OFF}, "only advises, or an operator", Severity.NOTE),
        ({"nodes": [], "hosts": []}, "start `rose node`", Severity.WRONG),
        ({"away": [pb.AwayNode(node="n9")]}, "1 are not attached: n9", Severity.WRONG),
        ({"release": "0.4.0"}, "1 nodes are not of 0.4.0: n0", Severity.NOTE),
        ({"hosts": []}, "1 nodes have none: n0", Severity.NOTE),
        ({"jobs": []}, "start a trainer", Severity.NOTE),
        (
            {"hosts": [pb.HostTelemetry(node="n0", ttft_p95_s=0.6, ttft_target_s=0.5)]},
            "1 hosts miss a target: n0",
            Severity.WRONG,
        ),
        (
            {"guests": [pb.GuestTelemetry(replica="g0", state="failed")]},
            "g0: its engine was given up",
            Severity.WRONG,
        ),
        (
            {"guests": [pb.GuestTelemetry(replica="g0", state="healthy", restarts=4)]},
            "started 4 times again",
            Severity.NOTE,
        ),
        (
            {"jobs": [pb.JobView(job="j", run=pb.RunView(run="r"))]},
            "rose jobs end j",
            Severity.NOTE,
        ),
    ]
    for changes, said, level in lacks:
        [finding] = found(POLICY, **changes)
        assert said in str(finding)
        assert finding.level is level
        assert finding.do


def test_a_cluster_whose_scheduler_is_silent_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--scheduler", "127.0.0.1:1"]) == 4
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_policies_that_are_missing_or_halted_are_said() -> None:
    [none] = found()
    assert "nothing is lent; rose policy apply FILE" in str(none)
    [halted] = found(pb.PolicyView(name="chat", halted="n0 burns its budget"))
    assert "policy chat: its canary is halted: n0 burns its budget" in str(halted)
