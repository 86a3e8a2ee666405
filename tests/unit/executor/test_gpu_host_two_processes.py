"""A host under vLLM's scheduler and a borrower in another process, over a real socket."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_host_cases import GpuHostRig, gpu_host
from kv_cases import undisturbed

from tests.fakes.driver import PAGE, StandInDevice

BORROWER = Path(__file__).with_name("standin_borrower_main.py")
KV_PAGES, LENT_PAGES = 32, 24
PROMPT = [token % 96 for token in range(400)]


@contextmanager
def borrower(rig: GpuHostRig, device: StandInDevice) -> Iterator[subprocess.Popen[str]]:
    path = rig.page.path.parent / "pages"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(BORROWER), str(path), device.uuid.hex(), str(LENT_PAGES)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def turn_until(rig: GpuHostRig, done: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, "it did not happen"
        rig.scheduler.lender.pending = True  # An idle host's loop goes on.
        rig.turn()
        rig.check()


def test_what_is_lent_comes_back_when_it_is_asked_for_and_when_the_guest_is_killed(
    tmp_path: Path,
) -> None:
    device = StandInDevice((KV_PAGES + 2) * PAGE)
    with gpu_host(tmp_path, device, by_handle=True) as rig, borrower(rig, device) as child:
        turn_until(rig, lambda: rig.published.bytes_lent == LENT_PAGES * PAGE)
        assert child.stdout is not None
        assert child.stdout.readline() == "taken\n"
        before = rig.published.granules_lent
        rig.add("asked", PROMPT, 20)
        for _ in range(50):
            rig.turn()
        assert rig.published.reserve_missing > 0
        assert not rig.ends, "it keeps what it has, and the host does not touch it"
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        turn_until(rig, lambda: "asked" in rig.ends)
        assert rig.outputs["asked"] == undisturbed(PROMPT, 20)
        assert rig.published.granules_lent < before

        child.kill()
        child.wait()
        turn_until(rig, lambda: rig.reservation.source.lent == 0)
        rig.add("after", PROMPT[::-1] + PROMPT[:60], 20)
        turn_until(rig, lambda: "after" in rig.ends)
        rig.scheduler.stop_lending()
        for _ in range(20):
            rig.now_ns += 10**9
            rig.scheduler.schedule()
        assert rig.lender is None
        assert len(rig.own_memory()) == KV_PAGES, "nothing of it is lost"
