"""Folders of checkpoints: when one is whole, and what is read of it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from front_cases import save_checkpoint

from rose.errors import ConfigError, RefusedError
from rose.integrations.front.checkpoint_folder import (
    NotWholeError,
    WeightRoots,
    look,
    named_tensors,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_all_tensors_are_read_as_they_were_saved(tmp_path: Path) -> None:
    roots = WeightRoots([tmp_path])
    folder = save_checkpoint(tmp_path / "1", 1, FIRST, "a")
    save_checkpoint(folder, 2, SECOND, "b")
    read = {name: tensor.numpy() for name, tensor in named_tensors(look(folder, roots), roots)}
    assert sorted(read) == ["a", "b"]
    assert np.array_equal(read["b"], np.full((2, 2), 2, np.float32))


def test_files_that_change_under_the_reader_are_no_version(tmp_path: Path) -> None:
    roots = WeightRoots([tmp_path])
    folder = save_checkpoint(tmp_path / "1", 1)
    saved = look(folder, roots)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(20)
    with pytest.raises(RefusedError, match="went while it was read"):
        list(named_tensors(saved, roots))
    save_checkpoint(folder, 2)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    with pytest.raises(RefusedError, match="changed while it was read"):
        list(named_tensors(saved, roots))
    (folder / "model.safetensors").unlink()
    with pytest.raises(RefusedError, match="went while it was read"):
        list(named_tensors(saved, roots))


def test_a_folder_is_whole_once_all_files_of_it_are(tmp_path: Path) -> None:
    roots = WeightRoots([tmp_path])
    folder = tmp_path / "1"

    def why() -> str:
        with pytest.raises(NotWholeError) as error:
            look(folder, roots)
        return str(error.value)

    assert "no such folder" in why()
    folder.mkdir()
    assert "has no *.safetensors" in why()
    save_checkpoint(folder, 1, FIRST, "a")
    assert "1 of 2 files" in why()
    save_checkpoint(folder, 1, SECOND, "b")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "mod')
    assert "cannot be read yet" in why()
    index.write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND, "c": "more.safetensors"}}))
    assert "more.safetensors" in why()
    half = (save_checkpoint(folder, 1, "more.safetensors", "c") / "more.safetensors").read_bytes()
    (folder / "more.safetensors").write_bytes(half[:-3])
    assert "no whole checkpoint yet" in why()
    (folder / "more.safetensors").write_bytes(half)
    assert [shard.path for shard in look(folder, roots).shards] == [
        FIRST,
        SECOND,
        "more.safetensors",
    ]


def test_a_marker_is_waited_for_in_the_folder_or_above(tmp_path: Path) -> None:
    roots = WeightRoots([tmp_path])
    folder = save_checkpoint(tmp_path / "step_1/weight")
    with pytest.raises(NotWholeError, match="has no STABLE yet"):
        look(folder, roots, "STABLE")
    (tmp_path / "step_1/STABLE").touch()
    assert look(folder, roots, "STABLE").folder == folder


def test_what_is_no_checkpoint_of_whole_weights_is_refused_at_once(tmp_path: Path) -> None:
    roots = WeightRoots([tmp_path])
    adapter = save_checkpoint(tmp_path / "adapter", 1, "adapter_model.safetensors")
    twice = save_checkpoint(tmp_path / "twice", 1, "a.safetensors")
    save_checkpoint(twice, 1, "b.safetensors")
    fifo = tmp_path / "fifo"
    fifo.mkdir()
    os.mkfifo(fifo / "model.safetensors")
    above = save_checkpoint(tmp_path / "above")
    (above / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../twice/a.safetensors"}})
    )
    for folder, why in (
        (adapter, "adapter"),
        (twice, "two of its files"),
        (fifo, "no file below"),
        (above, "not in its folder"),
    ):
        with pytest.raises(RefusedError, match=why) as error:
            look(folder, roots)
        assert not isinstance(error.value, NotWholeError)


def test_roots_are_folders_that_exist_and_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--weights-root"):
        WeightRoots([])
    with pytest.raises(ConfigError, match="no such folder"):
        WeightRoots([tmp_path / "none"])
