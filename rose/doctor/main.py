"""`rose doctor --config FILE`: 0 nothing is wrong, 1 something is, 2 the file cannot be used."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rose.cli.main import Parser
from rose.doctor.checks import Finding, Severity, daemon_of, gpu_checks, host_checks, node_checks
from rose.node.config import NodeConfig
from rose.node.memory.gauges import Gpus


def main(argv: Sequence[str] | None = None) -> int:
    """Check a machine; a file that cannot be used raises ConfigError, which `rose` says."""
    parser = Parser(
        prog="rose doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="the node's JSON file")
    config = NodeConfig.load(parser.parse_args(argv).config)
    found = list[Finding]()
    for finding in diagnose(config):
        found.append(finding)
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
    wrong = sum(finding.level is Severity.WRONG for finding in found)
    sys.stdout.write(f"node {config.node}: {len(found)} checks, {wrong} wrong\n")
    return 1 if wrong else 0


def diagnose(config: NodeConfig, gpus: Gpus | None = None) -> Iterator[Finding]:
    """Check everything; nothing is changed and nothing is raised."""
    gpus = gpus or Gpus()
    if config.host:
        yield from host_checks(config.host, daemon_runs=daemon_of(config) is not None)
    yield from gpu_checks(config, gpus)
    yield from node_checks(config, gpus)


if __name__ == "__main__":
    sys.exit(main())
