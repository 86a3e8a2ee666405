"""`rose jobs` says whose a job is and what is served, and forgets one when it is told to."""

import grpc
import pytest

from rose.cli.main import main
from rose.rpc import rose_pb2 as pb
from rose.rpc.rose_pb2_grpc import SchedulerServicer
from tests.unit.cli.conftest import Serve

RUN = pb.RunView(
    run="4f1c", holder="run sweep-3 on h1, process 11", since_s=1.7e9, silent_s=2.0, live=True
)


class JobsScheduler(SchedulerServicer):  # type: ignore[misc]
    """Knows one job with a run that lives, one that stands by, and one of an earlier release."""

    def Snapshot(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        rows = (("g0", 1, "", 7, True), ("d0", 2, "grpo", 6, True), ("d1", 2, "old", 3, False))
        return pb.SnapshotReply(
            jobs=[
                pb.JobView(
                    job="grpo", latest_version=7, chain=3, first_version=5, base=True, leased=3,
                    run=RUN,
                ),
                pb.JobView(job="idle", standing=True, model="m-7b"),
                pb.JobView(
                    job="old", latest_version=2, chain=2, first_version=1, max_guests=3, quota=0,
                    held_back="no guests: none of its placeholder pods runs",
                ),
            ],
            replicas=[
                pb.Replica(
                    id=name, kind=kind, node="n0", job="grpo", held_job=held,
                    policy_version=version, healthy=healthy,
                )
                for name, kind, held, version, healthy in rows
            ],
        )  # fmt: skip

    def DropJob(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if not request.force:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{request.job} is held; --force")
        return pb.DropJobReply(versions=3)


@pytest.fixture
def address(serve: Serve) -> str:
    return serve(JobsScheduler())


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    assert main(["jobs", *argv]) == code
    out, err = capsys.readouterr()
    return [line.rstrip() for line in (err if code else out).splitlines()]


def test_a_list_says_which_jobs_have_a_trainer(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    why, _, _, *rows = said(capsys, "list", "--scheduler", address)
    assert why == "job old: no guests: none of its placeholder pods runs"
    assert "0 of 0" in rows[-1], "the stricter of both bounds"
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [
        ("grpo", "live"),
        ("idle", "yet"),
        ("old", "-"),
    ]


def test_a_job_is_shown_with_its_run_its_versions_and_what_is_served(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "show", "grpo", "--scheduler", address) == [
        "job grpo: run 4f1c of run sweep-3 on h1, process 11, since 2023-11-14 22:13:20 UTC;"
        " last sign 2 s ago",
        "versions: newest 7; 3 known, from a base, version 5 on",
        "served: version 6 by 1, version 7 by 1",
        "",
        "REPLICA  KIND       NODE  SERVES    STATE",
        "d0       dedicated  n0    6         serving",
        "d1       dedicated  n0    3 of old  syncing",
        "g0       guest      n0    7         serving",
    ]
    assert said(capsys, "show", "idle", "--scheduler", address) == [
        "job idle: no trainer has registered it: dedicated replicas only",
        "versions: none yet; version 0 is m-7b",
        "served: by no replica",
    ]
    last = said(capsys, "show", "old", "--scheduler", address)[3]
    assert last == "quota: no guests: none of its placeholder pods runs"
    [line] = said(capsys, "show", "gone", "--scheduler", address, code=2)
    assert line == "rose: job gone is not registered; `rose jobs` lists those that are"


def test_a_job_that_is_dropped_is_told_with_all_that_is_forgotten(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = said(capsys, "drop", "grpo", "--scheduler", address, code=2)
    assert line == "rose: grpo is held; --force"
    [line] = said(capsys, "drop", "grpo", "--force", "--scheduler", address)
    assert line == (
        "job grpo is dropped: 3 versions are forgotten; its run was that of run sweep-3 on h1,"
        " process 11, which is fenced; 3 leases are being released; a new run's first version is 8"
    )


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["show"], "say which job"),
        (["drop"], "say which job"),
        (["list", "grpo"], "leave 'grpo' out"),
        (["end", "grpo", "--force"], "--force is of `rose jobs drop`"),
        (["show", "grpo", "--dry-run"], "leave --dry-run out"),
        (["end", "grpo", "--watch"], "--watch looks"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    argv: list[str], hint: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = said(capsys, *argv, "--scheduler", address, code=2)
    assert hint in line
