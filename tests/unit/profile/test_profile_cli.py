"""`rose profile` says what is wrong in one line, with exit code 2, and leaves nothing behind."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rose.cli.main import main

Says = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Says]:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def run(*words: object) -> str:
        out = tmp_path / "profile.json"
        assert main(["profile", "--out", str(out), *map(str, words)]) == 2
        assert not out.exists()
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert error.startswith("rose: ")
        return error

    before = psutil.Process().children(recursive=True)
    yield run
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_a_folder_without_a_model(says: Says, tmp_path: Path) -> None:
    assert "has no config.json" in says("--model", tmp_path / "nothing")
    assert "has no config.json" in says("--model", tmp_path)


def test_sizes_that_do_not_go_together(says: Says, model: Path) -> None:
    assert "below --max-num-seqs 65" in says(
        "--model", model, "--max-num-seqs", 65, "--token-budget", 64
    )
    assert "--max-model-len is 9" in says("--model", model, "--max-model-len", 9)
    assert "0 is not positive" in says("--model", model, "--max-num-seqs", 0)


def test_a_folder_that_is_not_there(says: Says, model: Path, tmp_path: Path) -> None:
    assert "is no folder" in says("--model", model, "--out", tmp_path / "absent" / "p.json")


def test_a_busy_port(says: Says, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "is busy" in says("--model", model, "--port", taken.getsockname()[1])


def test_too_little_memory(says: Says, model: Path, tmp_path: Path) -> None:
    assert "GiB of free memory" in says("--model", model, "--kv-bytes", 1 << 50)
    assert list((tmp_path / "tmp").iterdir()) == []
