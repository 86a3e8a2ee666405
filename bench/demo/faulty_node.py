"""`python -m bench.demo.faulty_node --config FILE`: a node whose engines may have a faulty worker.

Its file says which, `"worker"` of a replica. The files of `rose node` cannot.
"""

import sys
from dataclasses import replace
from typing import Any

from rose.engines import EngineSpec
from rose.main.node import main
from rose.node.config import NodeConfig, ReplicaConfig


class FaultyReplica(ReplicaConfig):
    """A replica whose engine gets the worker extension `worker`, a dotted path."""

    worker: str

    def engine_spec(self, *args: Any, **named: Any) -> EngineSpec:  # noqa: ANN401 - as the node asks
        spec = super().engine_spec(*args, **named)
        # The last one counts.
        return replace(spec, extra_args=(*spec.extra_args, f"--worker-extension-cls={self.worker}"))


class FaultyNodeConfig(NodeConfig):
    """A node's file of the demo's controls."""

    replicas: tuple[FaultyReplica, ...]


if __name__ == "__main__":
    sys.exit(main(config=FaultyNodeConfig))
