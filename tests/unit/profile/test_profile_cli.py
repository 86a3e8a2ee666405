"""`rose profile` says what is wrong in one line, with exit code 2, and leaves nothing behind."""

import argparse
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rose.cli.main import main
from rose.engines import launch, process_spec
from rose.node.guest.memory_gauges import Gpus
from rose.process.child import ProcessSpec
from rose.profile.driver import add_options, spec_of
from tests.fakes.cuda.nvml import StandInReader, card

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "nothing"), "has no config.json"),
        (("--model", "."), "has no config.json"),
        (("--max-num-seqs", 65, "--token-budget", 64), "below --max-num-seqs 65"),
        (("--max-model-len", 9), "--max-model-len is 9"),
        (("--max-num-seqs", 0), "0 is not positive"),
        (("--out", "absent/p.json"), "is no folder"),
        (("--kv-bytes", 1 << 50), "GiB of free memory"),
    ],
)
def test_options_that_cannot_be_are_refused_and_leave_nothing(
    says: Says,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in says("--model", model, *words)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_busy_port(says: Says, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "is busy" in says("--model", model, "--port", taken.getsockname()[1])


def test_an_engine_that_dies_at_start(
    says: Says, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (sys.executable, "-S", "-c", "raise ValueError('no such model')")
    monkeypatch.setattr(
        launch, "process_spec", lambda spec: ProcessSpec(spec.name, argv, log=spec.log)
    )
    said = says("--model", model)
    assert "engine profile ended at start (exit 1): ValueError: no such model; see " in said
    log = Path(said.rsplit("see ", 1)[1].strip())
    assert log.exists(), "its log is kept"
    assert list(log.parent.iterdir()) == [log], "and nothing else"


def test_a_gpu_that_is_not_there(says: Says, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = StandInReader(card())
    monkeypatch.setattr("rose.profile.main.Gpus", lambda: Gpus(lambda: cards))
    assert "GPU 3 is none or more than one of 0: Stand-in GPU" in says(
        "--model", model, "--device", 3
    )
    monkeypatch.setattr("rose.profile.main.Gpus", lambda: Gpus(StandInReader))
    assert "sees no GPU" in says("--model", model, "--device", "GPU-a")


@pytest.mark.parametrize(("device", "graphs"), [("0", True), ("GPU-stand", False)])
def test_an_engine_on_a_gpu_is_started_as_a_node_would(
    tmp_path: Path, model: Path, device: str, graphs: bool
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    words = ["--device", device, *([] if graphs else ["--no-cuda-graphs"])]
    sizes = {"model": model, "kv_bytes": 1, "max_model_len": 64, "max_num_seqs": 2}
    args = parser.parse_args(words, argparse.Namespace(**sizes))
    process = process_spec(spec_of(args, tmp_path, Gpus(lambda: StandInReader(card()))))
    assert process.env["CUDA_VISIBLE_DEVICES"] == "GPU-stand-in"
    assert process.share == "aside"
    assert ("--enforce-eager" in process.argv) is not graphs
