"""`bench.gpu.measure` with stand-ins for engines, which start and never answer."""

import os
import sys
from pathlib import Path

from bench.gpu.measure import main
from rose.engines import launch
from tests.unit.node.node_bench import standin_spec

launch.process_spec = standin_spec(Path(os.environ["STANDIN_JOURNAL"]))  # type: ignore[attr-defined]
sys.exit(main())
