"""`rose weights`: files in, files out, byte for byte; whatever is wrong is one line."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rose.cli.main import main as rose

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: object) -> tuple[int, str, str]:
        code = rose(["weights", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def weights(seed: int, rows: int = 300) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(rows, 64, generator=draw).bfloat16(),
        "model.norm.weight": torch.randn(64, generator=draw),
        "model.scale": torch.tensor(1.5, dtype=torch.float16),
        "model.fp8": torch.randn(40, 33, generator=draw).to(torch.float8_e4m3fn),
        "model.ids": torch.arange(70, dtype=torch.int64),
        "model.mask": torch.tensor([True, False, True]),
        "model.empty": torch.zeros(0, 8),
    }


def moved(old: dict[str, torch.Tensor], seed: int, share: float = 0.02) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name in ("model.embed.weight", "model.norm.weight"):
        hit = torch.rand(new[name].shape, generator=draw) < share
        new[name][hit] *= 1.01
    new["model.ids"][3] = -5
    return new


def save_folder(folder: Path, tensors: dict[str, torch.Tensor], note: str) -> Path:
    """A sharded checkpoint with an index and files that hold no tensors."""
    folder.mkdir()
    names = sorted(tensors)
    half = {name: tensors[name] for name in names[:3]}
    rest = {name: tensors[name] for name in names[3:]}
    save_file(half, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(rest, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text(note)
    (folder / "tokenizer.json").write_text("the same in both")
    (folder / "nested").mkdir()
    (folder / "nested" / "a.txt").write_text(note)
    return folder


def same_files(one: Path, other: Path) -> bool:
    def files(root: Path) -> dict[str, bytes]:
        found = sorted(p for p in root.rglob("*") if p.is_file())
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in found}

    return files(one) == files(other)


@dataclass(frozen=True)
class CheckpointStep:
    """Two checkpoints in one folder, and the path of the difference between them."""

    folder: Path
    old: Path
    new: Path
    delta: Path
    out: Path


@pytest.fixture
def step(tmp_path: Path, request: pytest.FixtureRequest) -> CheckpointStep:
    base = weights(1, getattr(request, "param", 300))
    old = save_folder(tmp_path / "old", base, "one")
    new = save_folder(tmp_path / "new", moved(base, 2), "two")
    return CheckpointStep(tmp_path, old, new, tmp_path / "step.delta", tmp_path / "out")


@pytest.mark.parametrize("codec", ["fast", "compact", "auto"])
def test_a_folder_comes_back_byte_for_byte(step: CheckpointStep, run: Run, codec: str) -> None:
    code, text, _ = run("diff", step.old, step.new, "-o", step.delta, "--codec", codec)
    assert code == 0
    assert "weights differ in 3 of 7 tensors" in text
    whole = sum(f.stat().st_size for f in step.new.glob("*.safetensors"))
    assert step.delta.stat().st_size < 0.2 * whole
    assert run("apply", step.old, step.delta, "-o", step.out)[0] == 0
    assert same_files(step.out, step.new)
    assert run("verify", step.out, step.delta)[0] == 0
    assert [p.name for p in step.folder.iterdir() if p.name.startswith(".")] == []


def test_a_chain_is_applied_in_one_go(tmp_path: Path, run: Run) -> None:
    tensors, folders, deltas = weights(1), [], []
    for number in range(4):
        folders.append(save_folder(tmp_path / f"v{number}", tensors, f"note {number // 2}"))
        tensors = moved(tensors, 10 + number)
    for number, (old, new) in enumerate(itertools.pairwise(folders)):
        deltas.append(tmp_path / f"{number}.delta")
        assert run("diff", old, new, "-o", deltas[-1], "--threads", 3)[0] == 0
    assert run("apply", folders[0], *deltas, "-o", tmp_path / "out")[0] == 0
    assert same_files(tmp_path / "out", folders[3])
    code, _, said = run("apply", folders[0], deltas[1], "-o", tmp_path / "wrong")
    assert code == 2
    assert "made for other weights" in said
    assert not (tmp_path / "wrong").exists()


def test_tensors_that_come_go_or_change_their_shape(tmp_path: Path, run: Run) -> None:
    first = weights(1)
    second = moved(first, 2)
    del second["model.fp8"]
    second["model.new"] = torch.randn(20, 5).half()
    second["model.embed.weight"] = torch.randn(301, 64).bfloat16()
    third = moved(second, 3)
    one, two, three = (
        save_folder(tmp_path / name, tensors, name)
        for name, tensors in (("1", first), ("2", second), ("3", third))
    )
    assert run("diff", one, two, "-o", tmp_path / "a")[0] == 0
    assert run("diff", two, three, "-o", tmp_path / "b")[0] == 0
    assert run("apply", one, tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")[0] == 0
    assert same_files(tmp_path / "out", three)


def test_single_files_work_alike(tmp_path: Path, run: Run) -> None:
    base = weights(1)
    old, new, out = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "out"))
    save_file(base, old)
    save_file(moved(base, 2), new, metadata={"step": "2"})
    assert run("diff", old, new, "-o", tmp_path / "d")[0] == 0
    assert run("apply", old, tmp_path / "d", "-o", out)[0] == 0
    assert out.read_bytes() == new.read_bytes()
    code, text, _ = run("inspect", tmp_path / "d", "--json")
    told = json.loads(text)
    assert code == 0
    assert told["changed"] == sum(tensor["changed"] for tensor in told["tensor_list"]) > 0
    assert told["bytes"] == (tmp_path / "d").stat().st_size


def test_nothing_changed_is_said_and_costs_next_to_nothing(tmp_path: Path, run: Run) -> None:
    old = save_folder(tmp_path / "old", weights(1), "one")
    shutil.copytree(old, tmp_path / "new")
    code, text, _ = run("diff", old, tmp_path / "new", "-o", tmp_path / "d")
    assert code == 0
    assert "no weight differs" in text
    assert (tmp_path / "d").stat().st_size < 4096


def test_verify_names_what_differs_and_exits_with_one(step: CheckpointStep, run: Run) -> None:
    run("diff", step.old, step.new, "-o", step.delta)
    code, text, _ = run("verify", step.old, step.delta, "--json")
    assert code == 1
    names = [line.split(":")[0] for line in json.loads(text)["differences"]]
    assert names == ["model.embed.weight", "model.ids", "model.norm.weight"]


@pytest.mark.parametrize("step", [20], indirect=True)
def test_one_flipped_bit_anywhere_is_found(step: CheckpointStep, run: Run) -> None:
    run("diff", step.old, step.new, "-o", step.delta)
    raw = step.delta.read_bytes()
    for at in range(0, len(raw), max(1, len(raw) // 60)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        step.delta.write_bytes(damaged)
        code, _, said = run("apply", step.old, step.delta, "-o", step.out)
        assert (code, len(said.splitlines())) == (2, 1), f"byte {at}"
        assert not step.out.exists()
    for length in (0, 7, 100, len(raw) - 1):
        step.delta.write_bytes(raw[:length])
        assert run("apply", step.old, step.delta, "-o", step.out)[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("diff", "old", "nowhere", "-o", "d"), "nowhere: no such file or folder"),
        (("diff", "old", "empty", "-o", "d"), "no *.safetensors in it"),
        (("diff", "old", "old", "-o", "there"), "there exists"),
        (("diff", "old", "old", "-o", "no/such/folder"), "make it first"),
        (("diff", "old", "junk.safetensors", "-o", "d"), "not a safetensors file"),
        (("apply", "old", "junk.safetensors", "-o", "d"), "not a delta"),
        (("verify", "old", "junk.safetensors"), "not a manifest"),
        (("inspect", "gone"), "gone: no such file"),
        (("diff", "old", "old", "-o", "d", "--codec", "fsat"), "did you mean"),
        (("diff", "old", "old", "-o", "d", "--threads", "0"), "no number of threads"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, run: Run, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_folder(tmp_path / "old", weights(1, rows=4), "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "there").write_text("")
    (tmp_path / "junk.safetensors").write_text("junk" * 9)
    code, out, err = run(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "d").exists()


def test_a_full_disk_leaves_nothing_behind(
    step: CheckpointStep, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("diff", step.old, step.new, "-o", step.delta)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    code, _, said = run("apply", step.old, step.delta, "-o", step.out)
    assert code == 2
    assert "no space is left" in said
    assert sorted(p.name for p in step.folder.iterdir()) == ["new", "old", "step.delta"]
