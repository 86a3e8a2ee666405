"""A trainer on a Ray cluster, with dedicated replicas on GPUs of the same cluster while it trains.

    python ray_pool.py REPLICAS NODE.json -- bash verl_grpo.sh MODEL

NODE.json is a node's file (docs/node.md) with one dedicated replica: its id, port and device are
left to the pool, which starts such a node in an actor for each replica.
"""

import json
import subprocess
import sys
from pathlib import Path

import ray

from rose.integrations.ray import DedicatedPool

OF_THE_POOL = {"id", "kind", "port", "device"}


def main(replicas: int, file: Path, trainer: list[str]) -> int:
    """Run the trainer to its end; the pool goes with it."""
    node = json.loads(file.read_text())
    [replica] = node.pop("replicas")
    node.pop("node", None)
    own = {name: value for name, value in replica.items() if name not in OF_THE_POOL}
    ray.init()
    with DedicatedPool(replicas, 1, node=node, replica=own, placement="SPREAD") as pool:
        pool.wait_healthy()
        for place in pool.places():
            sys.stdout.write(f"{place['node']} on {place['host']}, GPU {place['gpu']}\n")
        return subprocess.run(trainer, check=False).returncode  # noqa: S603 - of who started this


if __name__ == "__main__":
    border = sys.argv.index("--")
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[border + 1 :]))
