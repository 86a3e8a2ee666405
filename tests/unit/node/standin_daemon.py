"""`rose node` with stand-in engines. argv: journal, then the options of `rose node`.

Where a file `gpu` lies beside the journal, a stand-in for its driver has one idle card.
"""

import sys
from pathlib import Path

from node_bench import stand_in

from rose.main.node import main
from rose.node import daemon
from rose.node.guest.memory_gauges import Gpus
from tests.fakes.cuda.nvml import CARD, StandInReader

journal = Path(sys.argv[1])
stand_in(journal, setattr)
if journal.with_name("gpu").exists():
    daemon.Gpus = lambda: Gpus(lambda: StandInReader(CARD))  # type: ignore[assignment,misc]
sys.exit(main(sys.argv[2:]))
