"""`rose node` with stand-in engines. argv: journal, then the options of `rose node`."""

import sys
from pathlib import Path

from node_bench import standin_spec

from rose.engines import launch
from rose.node import supervisor
from rose.node.main import main

launch.process_spec = standin_spec(Path(sys.argv[1]))  # type: ignore[attr-defined]
launch.POLL_INTERVAL_S = 0.02
supervisor.FIRST_BACKOFF_S = 0.02
sys.exit(main(sys.argv[2:]))
