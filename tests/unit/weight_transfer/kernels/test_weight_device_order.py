"""Order of work on a device, recorded by a stand-in device."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_transfer.apply.staging import Decoded, Staging
from weight_transfer.errors import DeviceMemoryError
from weight_transfer.format.tensors import DeviceBits
from weight_transfer.kernels import device as exchange
from weight_transfer.kernels.processor import Change, processor_of


class LoggedDevice(TorchDispatchMode):
    """Host memory that notes what is done to it, in order; launches do what kernels would."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.room = 1 << 40

    @contextmanager
    def aside(self, _: torch.device) -> Iterator[None]:
        self.log.append("aside")
        yield
        self.log.append("ended aside")

    def wait_for_steps(self, _: torch.device) -> None:
        self.log.append("settle")

    def uploaded(self, piece: exchange.Packed, device: torch.device) -> torch.Tensor:
        self.log.append("upload")
        self.room -= piece.nbytes
        if self.room < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 MiB.\nMore.")
        return torch.from_numpy(piece.host).to(device)

    def launch(self, piece: Any, held: torch.Tensor, counts: torch.Tensor, *, back: bool) -> None:
        self.log.append(f"launch {piece.row}")
        places, old, new = (part.numpy() for part in piece.views(held))
        live = piece.target.flat.numpy()
        counts.numpy()[piece.row, 0] += np.count_nonzero(live[places] != (new if back else old))
        live[places] = old if back else new

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in ("_local_scalar_dense", "empty", "zeros", "zero_", "copy_", "_to_copy"):
            self.log.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LoggedDevice:
    made = LoggedDevice()
    monkeypatch.setattr(exchange, "aside", made.aside)
    monkeypatch.setattr(exchange, "wait_for_steps", made.wait_for_steps)
    monkeypatch.setattr(exchange, "launch", made.launch)
    monkeypatch.setattr(exchange, "uploaded", made.uploaded)
    monkeypatch.setattr(exchange, "PIECE_BYTES", 4096)
    return made


def changes(count: int, size: int) -> list[tuple[DeviceBits, Change]]:
    places = np.arange(size)
    return [
        (
            DeviceBits(torch.zeros(size, dtype=torch.int16)),
            Change(places, np.zeros(size, "<u2"), np.full(size, number + 1, "<u2")),
        )
        for number in range(count)
    ]


def live_of(made: list[tuple[DeviceBits, Change]]) -> list[int]:
    return [int(target.flat.sum()) for target, _ in made]


def test_staging_goes_beside_the_engine_and_launches_nothing(device: LoggedDevice) -> None:
    made = changes(3, 100)
    processor_of(*(target for target, _ in made)).stage(made, 1 << 20)
    assert device.log == ["aside", "upload", "upload", "upload", "ended aside"]
    assert live_of(made) == [0, 0, 0]


def test_under_the_pause_the_device_is_waited_for_before_and_nothing_is_between_launches(
    device: LoggedDevice,
) -> None:
    made = changes(3, 100)
    staged = exchange.stage(made, 1 << 20)
    device.log.clear()
    with device:
        found = staged.run()
    assert device.log == ["settle", "zero_", "launch 0", "launch 1", "launch 2"]
    assert not found.any()
    assert live_of(made) == [100, 200, 300]


def test_beyond_what_is_granted_pieces_pass_through_one_slot_that_is_there_before_the_pause(
    device: LoggedDevice,
) -> None:
    made = changes(3, 450)
    staged = exchange.stage(made, 4000)
    assert (len(staged.resident), len(staged.streamed)) == (1, 2)
    device.log.clear()
    with device:
        staged.run()
    moved = ["copy_", "launch 1", "copy_", "launch 2"]
    assert device.log == ["settle", "zero_", "launch 0", *moved], "no memory is asked for"
    assert live_of(made) == [450, 900, 1350]
    staged.run(back=True)
    assert live_of(made) == [0, 0, 0]


def test_a_device_without_room_is_one_line_and_nothing_is_written(device: LoggedDevice) -> None:
    device.room = 5000
    made = changes(3, 450)
    with pytest.raises(DeviceMemoryError) as refused:
        exchange.stage(made, 1 << 20)
    assert "\n" not in str(refused.value)
    assert "nothing was written" in str(refused.value)
    assert live_of(made) == [0, 0, 0]
    assert not any("launch" in line for line in device.log)

    def decode() -> Decoded:
        exchange.stage(changes(1, 10), 1 << 20)
        raise AssertionError("it has no room")

    staging = Staging(decode, pytest.fail)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError):
            staging.step()
    staging.drop()


def test_a_piece_that_fails_is_told_each_time_and_what_was_decoded_is_forgotten() -> None:
    class Held:
        """Stands for an update that takes memory of a device."""

    known: list[weakref.ref[Any]] = []

    def decode() -> Any:
        held = Held()
        known.append(weakref.ref(held))
        return held

    def pieces(decoded: Any) -> Iterator[None]:
        yield
        raise DeviceMemoryError("no room")

    staging = Staging(decode, pieces)  # type: ignore[arg-type]
    assert not staging.step(1)
    assert known[0]() is not None
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="no room"):
            staging.step()
    gc.collect()
    assert known[0]() is None
