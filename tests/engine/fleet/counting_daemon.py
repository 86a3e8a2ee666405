"""`rose node` of whichever release is on the path, with counting engines.

argv: the folder of the engines' journals, then the options of `rose node`.
"""

import sys
from pathlib import Path

from rose.cli.main import main
from rose.engines import EngineSpec, launch
from rose.node.guest import supervisor
from rose.process.child import ProcessSpec

folder = Path(sys.argv[1])
engine = Path(__file__).with_name("counting_engine.py")


def counting(spec: EngineSpec) -> ProcessSpec:
    journal = folder / f"{spec.name}.journal"
    argv = (sys.executable, "-S", str(engine), str(spec.port), str(journal), spec.model_dir.name)
    return ProcessSpec(spec.name, argv, log=spec.log, family=True)


launch.process_spec = counting  # type: ignore[attr-defined]
launch.POLL_INTERVAL_S = 0.02
supervisor.FIRST_BACKOFF_S = 0.02
sys.exit(main(["node", *sys.argv[2:]]))
