"""What the driver's library says becomes a card and a look at it."""

import pytest
from standin_gpu import CARD, IDLE, StandInLibrary

from rose.bench.gpu.errors import CardError
from rose.bench.gpu.nvml import Nvml


def read(**answers: object) -> Nvml:
    return Nvml(lambda: StandInLibrary(**answers))


def test_a_card_and_its_load_are_read() -> None:
    nvml = read()
    assert nvml.cards() == (CARD,)
    assert nvml.usage(CARD) == IDLE


def test_what_a_card_does_not_tell_is_none() -> None:
    nvml = read(
        nvmlDeviceGetMigMode=-3,
        nvmlDeviceGetPersistenceMode=-3,
        nvmlDeviceGetEnforcedPowerLimit=None,
        nvmlDeviceGetTemperature=-3,
        nvmlDeviceGetClockInfo=None,
    )
    (card,) = nvml.cards()
    look = nvml.usage(card)
    assert (card.mig, card.persistence, card.power_limit_w) == (False, None, None)
    assert (look.temperature_c, look.sm_mhz, look.memory_mhz) == (None, None, None)


def test_mig_exclusive_mode_and_clocks_held_down_are_seen() -> None:
    nvml = read(
        nvmlDeviceGetMigMode=1,
        nvmlDeviceGetComputeMode=3,
        nvmlDeviceGetPersistenceMode=0,
        nvmlSystemGetCudaDriverVersion_v2=12_080,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x1 | 0x4 | 0x40,
    )
    (card,) = nvml.cards()
    assert (card.mig, card.compute_mode, card.persistence) == (True, "exclusive process", False)
    assert card.cuda == (12, 8)
    assert nvml.usage(card).slowed == ("power cap", "heat (hardware)")


def test_a_cut_card_that_hides_its_memory_is_still_told() -> None:
    (card,) = read(nvmlDeviceGetMigMode=1, nvmlDeviceGetMemoryInfo=-4).cards()
    assert card.mig
    assert card.memory_bytes == 0


@pytest.mark.parametrize("count", [0, 1, 64, 65, 200])
def test_every_process_is_counted(count: int) -> None:
    pids = tuple(range(100, 100 + count))
    nvml = read(nvmlDeviceGetComputeRunningProcesses_v3=pids)
    assert nvml.usage(nvml.cards()[0]).processes == pids


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"nvmlInit_v2": -9}, "load the NVIDIA driver"),
        ({"nvmlInit_v2": -18}, "its owner must reload"),
        ({"nvmlInit_v2": -999}, r"status 999\); see what nvidia-smi says"),
        ({"nvmlDeviceGetCount_v2": None}, "does not answer nvmlDeviceGetCount_v2; update it"),
        ({"nvmlDeviceGetComputeRunningProcesses_v3": -15}, "status 15"),
        ({"nvmlDeviceGetComputeRunningProcesses_v3": None}, "status -1"),
    ],
)
def test_a_driver_that_refuses_is_told_in_one_line(answers: dict[str, object], told: str) -> None:
    def look() -> None:
        nvml = read(**answers)
        nvml.usage(nvml.cards()[0])

    with pytest.raises(CardError, match=told) as caught:
        look()
    assert "\n" not in str(caught.value)
