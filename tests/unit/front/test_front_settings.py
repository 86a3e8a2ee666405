"""Options of the front and the watcher, and who may call a front that other machines reach."""

from pathlib import Path

import aiohttp
import pytest
from front_cases import NotingGateway, StandInPublisher, front_with, save_checkpoint, settings_of

from rose.cli.main import main
from rose.errors import ConfigError
from rose.integrations.front.settings import parse_front
from rose.security.tokens import issue
from tests.harness.policies import trainer_environment
from weight_transfer import SigningKey

GATEWAY = "http://127.0.0.1:1"


def test_another_machine_reaches_it_only_where_the_operator_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        settings_of(tmp_path, GATEWAY, host="0.0.0.0")
    assert settings_of(tmp_path, GATEWAY, host="0.0.0.0", insecure=True).host == "0.0.0.0"


@pytest.mark.parametrize(
    "wrong",
    [{"port": 70_000}, {"tp_size": 0}, {"silent_s": 0.0}, {"marker": "a/b"}, {"whole_s": -1.0}],
    ids=lambda each: next(iter(each)),
)
def test_useless_settings_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        settings_of(tmp_path, GATEWAY, **wrong)


def test_options_go_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in trainer_environment(save_checkpoint(tmp_path / "model")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ROSE_REPLICAS", "3")
    settings = parse_front(["--port=0", "--weights-root", str(tmp_path), "--job=mine"])
    assert (settings.trainer.job, settings.trainer.replicas) == ("mine", 3)
    assert settings.weights_roots == (tmp_path,)


@pytest.mark.parametrize("command", ["front --port 0", "publish --watch ."])
def test_a_command_without_its_job_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSE_JOB", raising=False)
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "ROSE_JOB" in said


async def test_with_keys_only_bearers_of_the_jobs_tokens_publish(tmp_path: Path) -> None:
    key = SigningKey.generate()
    keys = tmp_path / "keys"
    keys.write_text(f"{key.verify_key.hex}\n")
    publisher = StandInPublisher()
    statuses = []
    async with front_with(tmp_path, publisher, NotingGateway(), token_keys=keys) as url:
        body = {"weight_dir": str(save_checkpoint(tmp_path / "saved/1"))}
        tokens = [None, issue(key, "other", "trainer", "rose", 60.0)]
        tokens.append(issue(key, "grpo", "trainer", "rose", 60.0))
        async with aiohttp.ClientSession() as session:
            for token in tokens:
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                async with session.post(
                    f"{url}/update_weights", json=body, headers=headers
                ) as answer:
                    statuses.append(answer.status)
            # Probes have nothing to show.
            async with session.get(f"{url}/health") as answer:
                statuses.append(answer.status)
    assert statuses == [401, 403, 200, 200]
    assert publisher.events == ["published 1", "served 1"]
