"""Answers of the driver's library become a card, its usage, and its clients."""

import re
import sys
from pathlib import Path

import pytest

import rose.nvml
from rose.nvml import CardError, Client, Nvml, card_of, insist_usable
from tests.fakes.cuda.nvml import (
    CARD,
    CLIENTS,
    IDLE,
    MPS_CLIENTS,
    StandInLibrary,
    bindings_of,
    card,
)


def read(**answers: object) -> Nvml:
    return Nvml(lambda: bindings_of(lambda name: StandInLibrary(**answers)))


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
        ({"nvmlInitWithFlags": -9}, "refuses nvmlInit .*load the NVIDIA driver"),
        ({"nvmlInitWithFlags": -18}, "its owner must reload"),
        ({"nvmlInitWithFlags": -999}, r"status 999: Unknown Error\); see what nvidia-smi says"),
        ({"nvmlInitWithFlags": -4711}, r"status 4711: .*\); see what nvidia-smi says"),
        (
            {"nvmlDeviceGetCount_v2": None},
            "refuses nvmlDeviceGetCount .*too old to know it; update",
        ),
        ({"nvmlDeviceGetName": -15}, r"refuses nvmlDeviceGetName \(NVML status 15: GPU is lost\)"),
        ({"nvmlDeviceGetComputeRunningProcesses_v3": -15}, "status 15"),
        ({"nvmlDeviceGetComputeRunningProcesses_v3": None}, "too old to know it; update"),
    ],
)
def test_a_driver_that_refuses_is_told_in_one_line(answers: dict[str, object], told: str) -> None:
    def look() -> None:
        nvml = read(**answers)
        nvml.usage(nvml.cards()[0])

    with pytest.raises(CardError, match=told) as caught:
        look()
    assert "\n" not in str(caught.value)


def test_a_machine_without_the_drivers_library_is_told_so() -> None:
    def nothing_there(name: str) -> None:
        assert name == "libnvidia-ml.so.1", "the line names another library"
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    with pytest.raises(CardError, match=r"no NVIDIA driver is here .* run on a machine with"):
        Nvml(lambda: bindings_of(nothing_there))


def test_a_python_without_the_bindings_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(CardError, match="pip install nvidia-ml-py"):
        Nvml()


MIB = 1 << 20
NOT_TOLD = 2**64 - 1


def clients(**answers: object) -> tuple[Client, ...]:
    return read(**answers).clients(CARD)


def test_memory_is_told_by_process() -> None:
    told = {CLIENTS: ((100, 700 * MIB), (200, 9 * MIB))}
    assert clients(**told) == (Client(100, 700 * MIB), Client(200, 9 * MIB))


@pytest.mark.parametrize("used", [0, NOT_TOLD])
def test_memory_that_is_not_told_is_not_taken_for_none_at_all(used: int) -> None:
    """A client has a context at least, so 0 is what a driver says that cannot look."""
    assert clients(**{CLIENTS: ((100, used),)}) == (Client(100, None),)


def test_clients_of_mps_are_known_from_either_list_and_counted_once() -> None:
    told = {
        CLIENTS: ((100, NOT_TOLD), (1, 30 * MIB)),
        MPS_CLIENTS: ((100, 700 * MIB), (200, 800 * MIB)),
    }
    assert set(clients(**told)) == {
        Client(100, 700 * MIB, mps=True),
        Client(200, 800 * MIB, mps=True),
        Client(1, 30 * MIB),
    }


@pytest.mark.parametrize("answer", [None, -3, -13])
def test_a_driver_without_mps_still_tells_its_clients(answer: int | None) -> None:
    told = {CLIENTS: ((100, MIB),), MPS_CLIENTS: answer}
    assert clients(**told) == (Client(100, MIB),)


def test_free_memory_is_read_alone() -> None:
    assert read().free_bytes(CARD) == 140 << 30


@pytest.mark.parametrize("device", [1, "GPU-b", "GPU-b0"])
def test_a_card_is_named_by_index_or_uuid(device: int | str) -> None:
    cards = (card(uuid="GPU-a0"), card(index=1, uuid="GPU-b0"))
    assert card_of(cards, device) is cards[1]


@pytest.mark.parametrize("device", [2, -1, "GPU-c", "GPU-", "1", ""])
def test_an_unknown_or_doubtful_card_is_refused_with_those_that_are_there(
    device: int | str,
) -> None:
    cards = (card(uuid="GPU-a0"), card(index=1, uuid="GPU-b0"))
    with pytest.raises(CardError, match=r"0: Stand-in GPU GPU-a0, 1: Stand-in GPU GPU-b0; name"):
        card_of(cards, device)


def test_without_a_gpu_that_is_said() -> None:
    with pytest.raises(CardError, match="sees no GPU"):
        card_of((), 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cuda": (12, 4), "driver": "550.54"}, "driver 550.54 serves CUDA 12.4, and 12.8"),
        ({"cuda": (0, 0)}, "serves CUDA unknown"),
        ({"mig": True}, "MIG is on"),
        ({"compute_mode": "prohibited"}, "its owner must allow work"),
    ],
)
def test_a_card_on_which_nothing_runs_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(CardError, match=told) as caught:
        insist_usable(card(**changes))
    assert "; " in str(caught.value), "what to do is missing"


def test_no_function_that_changes_a_card_is_named_anywhere() -> None:
    folder = Path(rose.nvml.__file__).parent
    called = {
        word
        for path in folder.glob("*.py")
        for word in re.findall(r"nvml[A-Z]\w+", path.read_text(encoding="utf-8"))
    }
    assert len(called) > 10
    changing = re.compile(r"Set|Reset|Clear|Create|Destroy|Attach|Enable|Modify")
    assert not {name for name in called if changing.search(name)}
