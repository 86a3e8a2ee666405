"""Whatever a person types: one line, and an exit code."""

import io
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import ModuleType

import grpc
import pytest

from rose.cli.cluster import stops
from rose.cli.main import main
from rose.cli.tables import summary
from rose.errors import ConfigError
from rose.operate.fleet import fleet_of
from rose.rpc import rose_pb2 as pb
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server


class AnsweringScheduler(SchedulerServicer):  # type: ignore[misc]
    """Answers operators with what was put into it."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def Attach(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        raise NotImplementedError

    WatchReplicas = RegisterJob = AnnounceVersion = Attach

    def Snapshot(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return pb.SnapshotReply(
            replicas=[pb.Replica(id="guest-0[x]", kind=1, node="serving-0", healthy=True)],
            leases=[pb.LeaseView(replica="guest-0[x]", epoch=7, state="active", expires_in_s=4.2)],
            hosts=[pb.HostTelemetry(node="serving-0", ttft_p95_s=0.12, ttft_target_s=2.0)],
            guests=[
                pb.GuestTelemetry(replica="guest-0[x]", mode="run", duty=0.5, reason="host_busy")
            ],
            harvest=pb.HARVEST_MODE_ACTIVE,
            jobs=[
                pb.JobView(
                    job="grpo",
                    latest_version=3,
                    max_staleness=1,
                    model="m-7b",
                    weight=2.0,
                    max_guests=4,
                    leased=3,
                    guests=2,
                    demand_known=True,
                    turns=96,
                    owed_tokens=41_200.4,
                )
            ],
        )

    def EndJob(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if request.job != "grpo":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "job is unknown")
        return pb.EndJobReply(released=3)

    def SetHarvest(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        self.asked.append((request.mode, request.replica))
        return pb.SetHarvestReply(released=2)

    def Revoke(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if request.replica != "g0":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no lease; look at `rose status`")
        return pb.RevokeReply(epoch=7)


@pytest.fixture
def scheduler() -> Iterator[tuple[AnsweringScheduler, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    fake = AnsweringScheduler()
    add_SchedulerServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield fake, f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ([], "COMMAND"),
        (["stauts"], "'status'"),
        (["harvest", "actve"], "'active'"),
        (["harvest", "on"], "choose from off, hold, drain, active"),
        (["status", "--schduler", "x"], "'--scheduler'"),
        (["demo", "--stps", "3"], "'--steps'"),
        (["status", "extra"], "'extra'"),
        (["revoke"], "REPLICA"),
        (["status", "--scheduler", "nowhere"], "HOST:PORT"),
        (["kill", "/no/such/folder"], "run folder"),
        (["scheduler", "--prot", "1"], "'--port'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rose")
    assert err.count("\n") == 1
    assert hint in err
    assert ";" in err


def test_help_loads_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for name in (
        "demo",
        "scheduler",
        "gateway",
        "node",
        "status",
        "harvest",
        "revoke",
        "kill",
        "doctor",
    ):
        assert name in out


def test_status_shows_every_part(
    scheduler: tuple[AnsweringScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--scheduler", scheduler[1]]) == 0
    out = capsys.readouterr().out
    for cell in (
        "harvest ACTIVE",
        "job grpo at version 3",
        "96 turns, 41200 tokens owed",
        "guest-0[x]",
        "epoch 7",
        "host_busy (the host works, and only its idle time is lent)",
        "120 / 2000",
    ):
        assert cell in out


def test_jobs_are_listed_and_ended(
    scheduler: tuple[AnsweringScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = scheduler
    assert main(["jobs", "--scheduler", address]) == 0
    out = capsys.readouterr().out
    for cell in ("grpo", "m-7b", "<= 1", "2 of 4", "96"):
        assert cell in out
    assert main(["jobs", "end", "grpo", "--scheduler", address]) == 0
    assert capsys.readouterr().out == "job grpo is ended; 3 leases are being released\n"
    assert main(["jobs", "end", "other", "--scheduler", address]) == 2
    assert capsys.readouterr().err == "rose: job is unknown\n"
    assert main(["jobs", "end", "--scheduler", address]) == 2
    assert "say which job to end" in capsys.readouterr().err


def test_harvest_and_revoke_say_what_happened(
    scheduler: tuple[AnsweringScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, address = scheduler
    assert main(["harvest", "drain", "--replica", "g0", "--scheduler", address]) == 0
    assert fake.asked == [(pb.HARVEST_MODE_HOLD_AND_DRAIN, "g0")]
    assert "2 leases" in capsys.readouterr().out
    assert main(["revoke", "g0", "--scheduler", address]) == 0
    assert "epoch 7" in capsys.readouterr().out
    assert main(["revoke", "g1", "--scheduler", address]) == 2
    assert capsys.readouterr().err == "rose: no lease; look at `rose status`\n"


def test_the_local_kill_switch_needs_no_scheduler(tmp_path: Path) -> None:
    assert main(["kill", str(tmp_path)]) == 0
    assert (tmp_path / "KILL").exists()
    assert main(["kill", str(tmp_path)]) == 0
    assert main(["unkill", str(tmp_path)]) == 0
    assert not (tmp_path / "KILL").exists()
    assert main(["unkill", str(tmp_path)]) == 0


def test_processes_get_their_own_options_and_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, seen = ModuleType("rose.main.node"), []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    stand_in.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rose.main.node", stand_in)
    assert main(["node", "--config", "f", "--help"]) == 7
    assert seen == [["--config", "f", "--help"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (ConfigError("x is wrong; do y"), 2), (KeyError("boom"), 1)],
)
def test_no_traceback_reaches_a_user(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(stops, "_kill_file", fail)
    assert main(["kill", "x"]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("\n") == (0 if code == 130 else 1)
    if code == 1:
        [kept] = tmp_path.glob("rose-error-*.txt")
        assert str(kept) in err
        assert "KeyError" in kept.read_text()


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rose.main.gateway", None)
    assert main(["gateway"]) == 2
    assert "rose.main.gateway is not installed" in capsys.readouterr().err


def test_the_status_says_that_the_store_does_not_answer() -> None:
    assert "store" not in summary(fleet_of(pb.SnapshotReply()))
    stalled = fleet_of(pb.SnapshotReply(store_stalled_s=7.2))
    assert "store has not answered for 7 s" in summary(stalled)


def test_a_scheduler_that_is_not_there_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["status"], ["policy", "set", "p", "mode=Off"], ["drain"], ["jobs", "end", "j"]):
        assert main([*words, "--scheduler", "127.0.0.1:1"]) == 4
        err = capsys.readouterr().err
        assert "no scheduler answers" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_name_that_the_terminal_has_no_letters_for_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["support-bundle", "--out", str(tmp_path / "модель.tar.gz")]) == 0
    screen.flush()
    assert b".tar.gz: 1 files" in screen.buffer.getvalue()  # type: ignore[attr-defined]
