"""The trainer as a process: what its parent hears when it cannot go on."""

import json
from pathlib import Path

import pytest

from bench.demo.training import main


def _config(folder: Path) -> Path:
    path = folder / "trainer.json"
    settings = {
        "model_dir": str(folder),
        "gateway_url": "http://127.0.0.1:1",
        "scheduler": "127.0.0.1:1",
        "out": str(folder),
        "publish_root": str(folder / "published"),
        "publish_port": 0,
        "key": str(folder / "key"),
    }
    path.write_text(json.dumps(settings))
    return path


def test_a_wrong_configuration_is_one_error_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainer.json"
    path.write_text("{}")
    assert main.main(["--config", str(path)]) == 2
    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "error"
    assert "not a trainer configuration" in event["message"]


def test_a_bug_is_told_to_the_parent_and_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(config: object) -> None:
        raise ExceptionGroup("agent loops", [ValueError("stand-in: a bug")])

    monkeypatch.setattr(main, "train", broken)
    with pytest.raises(ExceptionGroup):
        main.main(["--config", str(_config(tmp_path))])
    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "error"
    assert "a bug" in event["message"]
