"""A support bundle has what helps, no secret wherever one stood, and is whole or not there."""

import json
import stat
import tarfile
from pathlib import Path

import pytest

from rose.cli.machine import doctor
from rose.cli.machine.support_bundle import LEFT_OUT, redacted
from rose.cli.main import main

PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49cAnArY\n-----END PRIVATE KEY-----"
SECRETS = {
    "token": "rose1.cAnArYpayload.cAnArYsignature",
    "pem": "MIGHAgEAMBMGByqGSM49cAnArY",
    "hub": "cAnArYhubvalue",
    "file": "cAnArYclustertoken",
    "url": "user:cAnArYpass",
}


FORMS = [
    "vllm serve m --api-key SeCrEtVaLue9",
    '["--token", "SeCrEtVaLue9"]',
    "aws_session_token = SeCrEtVaLue9",
    "AWS_SECRET_ACCESS_KEY: SeCrEtVaLue9",
    "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=SeCrEtVaLue9",
    "https://a.blob.core.windows.net/k?sv=1&sig=SeCrEtVaLue9%3D",
    "got eyJhbGciOiJI.eyJzdWIiOiIx.SeCrEtVaLue9",
    "https://hooks.slack.com/services/T00/B00/SeCrEtVaLue9",
    '{"message": "api_key=\\"SeCrEtVaLue9\\""}',
    "xoxb-123456789012-SeCrEtVaLue9",
    "github_pat_11AAAAAAAA_SeCrEtVaLue9",
    "export HF_TOKEN=SeCrEtVaLue9; vllm serve m",
    '{"VAULT_TOKEN": "SeCrEtVaLue9"}',
    "MYSQL_PWD='SeCrEtVaLue9'",
]


@pytest.mark.parametrize("text", FORMS)
def test_a_secret_of_any_form_is_left_out(text: str) -> None:
    assert "SeCrEtVaLue9" not in redacted(text)


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor has tests of its own, and starts interpreters."""
    monkeypatch.setattr(doctor, "diagnose", lambda config: iter([f"ok {config.node}"]))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's file beside logs that say what they never should."""
    logs = tmp_path / "logs"
    logs.mkdir()
    token = tmp_path / "cluster.token"
    token.write_text(SECRETS["file"] + "\n")
    leaky = [
        {"event": "version_not_fetched", "message": f"http://{SECRETS['url']}@host/v1"},
        {"event": "odd", "message": f"Authorization: Bearer {SECRETS['token']}"},
        {"event": "odd", "message": f"env was {SECRETS['hub']} and {SECRETS['file']}"},
        {"event": "odd", "pem": PEM, "password": "cAnArYpassword"},
        {"event": "lease_taken", "epoch": 7, "token_budget": 512},
    ]
    lines = "".join(json.dumps(line) + "\n" for line in leaky)
    (logs / "events-n0.jsonl").write_text(lines)
    (logs / "engine-g0.log").write_text("cAnArY prompt of a user\n")
    replica = {
        "id": "g0",
        "kind": "dedicated",
        "model_dir": str(tmp_path),
        "port": 7999,
        "extra_env": {"HUB_LOGIN": SECRETS["hub"]},
    }
    settings = {
        "node": "n0",
        "scheduler": "127.0.0.1:1",
        "run_dir": str(tmp_path / "run"),
        "log_dir": str(logs),
        "unsigned": True,
        "transport": {"token_file": str(token)},
        "replicas": [replica],
    }
    file = tmp_path / "node.json"
    file.write_text(json.dumps(settings))
    return file


def texts(out: Path) -> dict[str, str]:
    with tarfile.open(out) as tar:
        return {
            member.name.removeprefix("rose-support/"): reader.read().decode()
            for member in tar.getmembers()
            if (reader := tar.extractfile(member))
        }


def test_no_secret_is_in_it_wherever_it_stood(node: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle.tar.gz"
    assert main(["support-bundle", "--out", str(out), "--config", str(node)]) == 0
    found = texts(out)
    for name, text in found.items():
        assert "cAnArY" not in text, name
    events = found["logs/0/events-n0.jsonl"]
    assert events.count("\n") == 5
    assert '"epoch": 7' in events
    assert '"token_budget": 512' in events
    assert LEFT_OUT in events
    assert not [name for name in found if "engine" in name], "engines' logs may have prompts"
    assert json.loads(found["config/0-node.json"])["replicas"][0]["extra_env"] == {
        "HUB_LOGIN": LEFT_OUT
    }
    assert found["doctor/0-node.txt"] == "ok n0\n"
    assert "python" in json.loads(found["versions.json"])
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_what_cannot_be_had_is_said_and_stops_nothing(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle.tar.gz"
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    words = ["--config", str(broken), "--log-dir", str(tmp_path / "none")]
    words += ["--metrics", "http://user:cAnArYpass@127.0.0.1:1/metrics", "--metrics", "file:///etc"]
    assert main(["support-bundle", "--out", str(out), *words]) == 0
    missing = json.loads(texts(out)["manifest.json"])["missing"]
    assert {"config/0-broken.json", "logs/0", "metrics/0.txt", "metrics/1.txt"} <= missing.keys()
    said = capsys.readouterr().out
    assert "without config/0-broken.json" in said
    assert "cAnArY" not in said + str(missing)


def test_logs_are_cut_at_their_newest_whole_lines(node: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle.tar.gz"
    logs = ["--log-dir", str(tmp_path / "logs"), "--last-bytes", "80"]
    assert main(["support-bundle", "--out", str(out), *logs]) == 0
    lines = texts(out)["logs/0/events-n0.jsonl"].splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["lease_taken"]


def test_nothing_is_written_over_and_nothing_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle.tar.gz"
    out.write_text("mine")
    assert main(["support-bundle", "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    assert main(["support-bundle", "--out", str(tmp_path / "no" / "b.tar.gz")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.tar.gz"]


def test_figures_and_digests_are_no_secrets() -> None:
    line = (
        '{"tokens_total": 5, "hash": "' + "ab" * 32 + '", "token_ids": [1, 2], "tokens": 70000000}'
    )
    assert redacted(line) == line
