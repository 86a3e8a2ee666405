"""Whatever a person types: one line, and an exit code."""

import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import grpc
import pytest

from rose.cli import main as cli
from rose.cli.cluster import stops
from rose.cli.completion import SHELLS, script
from rose.cli.exit_codes import ExitCode, code_of
from rose.cli.main import commands_of, main, make_parser, parser_of
from rose.cli.tables import summary
from rose.command import set_kill_switch
from rose.errors import ConfigError, NotAnnouncedError, RefusedError, UnavailableError
from rose.operate.fleet import fleet_of
from rose.rpc import rose_pb2 as pb
from rose.rpc.rose_pb2_grpc import SchedulerServicer
from tests.unit.cli.conftest import Serve


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
def scheduler(serve: Serve) -> tuple[AnsweringScheduler, str]:
    fake = AnsweringScheduler()
    return fake, serve(fake)


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
        (["node", "--confg", "node.json"], "'--config'"),
        (
            ["gateway", "--prot", "1"],
            "rose gateway: unknown option '--prot' (did you mean '--port'?)",
        ),
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
    names = ["demo", "scheduler", "gateway", "node", "status", "harvest", "kill", "doctor"]
    assert [name for name in (*names, "revoke") if name not in out] == []


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


# ---- exit codes ----


def test_codes_stay_what_scripts_know() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FOUND": 1,
        "BAD_INPUT": 2,
        "UNPROVED": 3,
        "NOBODY_ANSWERS": 4,
        "INTERRUPTED": 130,
    }
    assert all(code.meaning for code in ExitCode)
    for error in (UnavailableError("x"), NotAnnouncedError("x")):
        assert code_of(error) is ExitCode.NOBODY_ANSWERS, "to ask again may help"
    assert code_of(RefusedError("x")) is code_of(ConfigError("x")) is ExitCode.BAD_INPUT


# ---- `rose kill` acts before it imports ----

ACT = """
import sys
before = set(sys.modules)
from rose.command import set_kill_switch
set_kill_switch(sys.argv[1:])
print(*(name for name in set(sys.modules) - before if name.startswith("rose.")))
"""


@pytest.mark.parametrize(
    ("words", "set_"),
    [
        (["kill", "RUN"], True),
        (["kill", "RUN", "--within", "2"], True),
        (["kill", "--within", "2", "RUN"], True),
        (["kill", "RUN", "--dry-run"], False),
        (["kill", "--help", "RUN"], False),
        (["kill"], False),
        (["unkill", "RUN"], False),
        (["status", "RUN"], False),
    ],
)
def test_the_switch_is_set_for_a_kill_alone(tmp_path: Path, words: list[str], set_: bool) -> None:
    set_kill_switch([str(tmp_path) if word == "RUN" else word for word in words])
    assert (tmp_path / "KILL").exists() == set_


def test_nothing_else_of_rose_is_imported_before(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ACT, "kill", str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["rose.command"]
    assert (tmp_path / "KILL").exists()


# ---- completion ----

LIGHT = ("status", "hold", "stop-all", "policy", "completion")


@pytest.fixture
def light_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands take seconds to import; `scripts/cli-reference` makes the whole tree."""
    light = make_parser()
    commands_of(light).update({name: parser_of(name) for name in LIGHT})
    monkeypatch.setattr(cli, "whole_parser", lambda: light)


@pytest.mark.usefixtures("light_parser")
@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_of_all_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for word in ("stop-all", "policy", "explain", "dry-run", "scheduler", "hold"):
        assert word in text


@pytest.mark.usefixtures("light_parser")
def test_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    (tmp_path / "rose.bash").write_text(script(cli.whole_parser(), "bash"))

    def completed(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in ("rose", *words))
        ask = (
            f"source {tmp_path}/rose.bash; COMP_WORDS=({typed}); COMP_CWORD={len(words)};"
            " $(complete -p rose | sed 's/.*-F \\([^ ]*\\).*/\\1/') rose; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", ask], capture_output=True, text=True, timeout=20
        )
        return set(done.stdout.split())

    assert completed("stop") == {"stop-all"}
    assert {"get", "set", "apply", "diff", "explain", "delete"} <= completed("policy", "")
    assert {"--within", "--dry-run", "--scheduler"} <= completed("stop-all", "--")
    assert completed("status", "-o", "") == {"table", "json", "yaml"}


@pytest.mark.parametrize(
    ("variables", "certificates"),
    [
        (("KEY",), (None, None, None)),  # it signs a trainer's weights
        (("KEY", "CA"), (None, None, None)),  # of gateways that trust tokens
        (
            ("KEY", "CA", "CERTIFICATE", "CERTIFICATE_KEY"),
            (Path("CA"), Path("CERTIFICATE"), Path("CERTIFICATE_KEY")),
        ),
    ],
)
def test_a_trainers_variables_are_no_certificates_of_an_operator(
    variables: tuple[str, ...],
    certificates: tuple[Path | None, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in variables:
        monkeypatch.setenv(f"ROSE_{name}", name)
    args = parser_of("status").parse_args([])
    assert (args.ca, args.certificate, args.key) == certificates


def test_a_processes_parser_is_had_without_running_it() -> None:
    assert set(commands_of(parser_of("token"))) == {"key", "issue"}
