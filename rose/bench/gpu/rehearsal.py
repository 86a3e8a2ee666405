"""`--rehearse`: the pieces with host and guests on this machine's CPUs, with tiny models.

Every line of code that a card will need runs, from start to picture. No figure means anything.
"""

import os
from pathlib import Path

import psutil

from rose.bench.gpu.process import MARK
from rose.bench.gpu.serve.sizes import REHEARSAL
from rose.bench.gpu.sizes import Sizes
from rose.nvml import Card, Client, Usage

PLACE = "cpu"
OUT, LOGS = Path("out/gpu-rehearsal/results"), Path("out/gpu-rehearsal/logs")
SIZES = Sizes(serving=REHEARSAL)


class StandInCard:
    """CardReader of a card that is not there. Who computes on it is what a piece started."""

    def cards(self) -> tuple[Card, ...]:
        """One, whose name says what it is."""
        return (
            Card(
                index=0,
                name="Rehearsal on CPU",
                uuid="no-card",
                driver="none",
                cuda=(99, 0),
                mig=False,
                compute_mode="default",
                persistence=None,
                memory_bytes=psutil.virtual_memory().total,
                power_limit_w=None,
                sm_mhz_most=None,
                memory_mhz_most=None,
            ),
        )

    def clients(self, card: Card) -> tuple[Client, ...]:
        """As `usage` has them; memory of a card that is not there is nobody's."""
        return tuple(Client(pid, None) for pid in self.usage(card).processes)

    def free_bytes(self, card: Card) -> int:
        return self.usage(card).free_bytes

    def usage(self, card: Card) -> Usage:
        """Processes that pieces of this process left behind, and their memory."""
        left = [process for process in psutil.process_iter() if _is_of_a_piece(process)]
        return Usage(
            free_bytes=1 << 60,  # engines look at the machine's memory themselves
            used_bytes=0,
            processes=tuple(process.pid for process in left),
            sm_mhz=None,
            memory_mhz=None,
            power_w=None,
            temperature_c=None,
            slowed=(),
        )


def _is_of_a_piece(process: psutil.Process) -> bool:
    try:
        ours = process.environ().get(MARK) == str(os.getpid())
        return ours and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
