"""Streams of changes, as a trainer in delta mode saves them."""

import json
import zlib
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
import zstandard
from front_cases import save_checkpoint

from rose.errors import RefusedError
from rose.integrations.front.checkpoint_folder import INDEX, NotWholeError, WeightRoots
from rose.integrations.front.pulled_weights import PulledWeights

VALUES = [np.full(4, value, np.float32) for value in (1, 2, 3)]


def xor(old: np.ndarray, new: np.ndarray) -> bytes:
    return (old.view(np.uint8) ^ new.view(np.uint8)).tobytes()


def overwrite(old: np.ndarray, new: np.ndarray) -> bytes:
    was, now = old.view(np.uint8), new.view(np.uint8)
    at = np.flatnonzero(was != now).astype("<u4")
    return len(at).to_bytes(4, "little") + at.tobytes() + now[at].tobytes()


def adler(new: np.ndarray) -> str:
    return f"{zlib.adler32(new.tobytes()):08x}"


class DeltaStream:
    """A folder of versions, each of which changes the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "stream"
        self.base = save_checkpoint(folder / "base", 1)
        self.pulling = PulledWeights(WeightRoots([folder]), self.base)

    def save(self, number: int, old: Any, new: Any, **says: Any) -> Path:
        folder = self.folder / f"weight_v{number:06d}"
        folder.mkdir(parents=True)
        encode = overwrite if says.get("delta_encoding") == "overwrite" else xor
        data = zstandard.ZstdCompressor().compress(says.pop("data", None) or encode(old, new))
        entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
        name, wanted = says.pop("name", "weight"), says.pop("wanted", adler(new))
        head = json.dumps({"__metadata__": {name: wanted}, name: entry}).encode()
        file = "model-00000-of-00001.safetensors"
        (folder / file).write_bytes(len(head).to_bytes(8, "little") + head + data)
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        }
        index = {"metadata": metadata | says, "weight_map": {name: file}}
        (folder / INDEX).write_text(json.dumps(index))
        return folder

    def pulled(self, version: int) -> list[float]:
        self.pulling.pull(self.folder, version)
        (tensor,) = (tensor for _, tensor in self.pulling.named())
        return list(tensor.numpy().ravel())


@pytest.fixture
def stream(tmp_path: Path) -> DeltaStream:
    return DeltaStream(tmp_path)


def test_changes_are_applied_in_order_from_the_base_on(stream: DeltaStream) -> None:
    one, two, three = VALUES
    stream.save(1, one, two)
    digest = blake3.blake3(three.tobytes()).hexdigest()
    says = {"delta_encoding": "overwrite", "checksum_format": "blake3", "wanted": digest}
    stream.save(2, two, three, **says)
    assert stream.pulled(0) == [1.0] * 4
    assert stream.pulled(1) == [2.0] * 4
    assert stream.pulled(2) == [3.0] * 4
    # Whoever starts again, and whoever begins anew, goes through all of them.
    again = DeltaStream.__new__(DeltaStream)
    again.folder = stream.folder
    again.pulling = PulledWeights(WeightRoots([stream.base.parent]), stream.base)
    assert again.pulled(2) == [3.0] * 4
    assert stream.pulled(1) == [2.0] * 4


def test_a_stream_may_begin_anew_with_a_whole_checkpoint_and_have_a_step_without_changes(
    stream: DeltaStream,
) -> None:
    save_checkpoint(stream.folder / "weight_v000001", 2)
    stream.save(2, VALUES[1], VALUES[2])
    index = stream.save(3, VALUES[2], VALUES[0]) / INDEX
    index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": {}}))
    assert stream.pulled(2) == [3.0] * 4
    assert stream.pulled(3) == [3.0] * 4


def test_a_version_that_is_not_there_yet_is_waited_for_and_harms_nothing(
    stream: DeltaStream,
) -> None:
    stream.save(1, VALUES[0], VALUES[1])
    with pytest.raises(NotWholeError, match="weight_v000002"):
        stream.pulled(2)
    assert stream.pulling.version == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"wanted": "00000000"},
        {"base_version": "000007"},
        {"delta_encoding": "rot13"},
        {"checksum_format": "crc"},
        {"compression_format": "lz4"},
        {"name": "strange"},
        {"data": bytes(4_000_000)},
        {"delta_encoding": "overwrite", "data": b"\xff\xff\xff\xff"},
        {"delta_encoding": "overwrite", "data": b"\1\0\0\0\xff\0\0\0\1"},
        {"version": "one"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_changes_that_do_not_fit_are_refused_and_the_next_pull_is_right(
    stream: DeltaStream, wrong: dict[str, Any]
) -> None:
    folder = stream.save(1, VALUES[0], VALUES[1], **wrong)
    with pytest.raises(RefusedError):
        stream.pulled(1)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    stream.save(1, VALUES[0], VALUES[1])
    assert stream.pulled(1) == [2.0] * 4
