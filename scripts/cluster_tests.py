"""Write down a run on programs of others: `python -m scripts.cluster_tests JUNIT OUT [WHICH]`.

WHICH: their versions; without it that of the API server of ROSE_KUBECONFIG. Exit code 1 when a
test failed or was skipped: a night in which nothing was tried is no good night.
"""

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml


def outcome(case: ElementTree.Element) -> str:
    """Return the outcome of a test."""
    kinds = {child.tag for child in case}
    return next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")


def summary(report: Path, version: str, commit: str, now: datetime) -> dict[str, Any]:
    """All that is kept of a run."""
    root = ElementTree.parse(report).getroot()  # noqa: S314 - pytest's, of a moment ago
    cases = list(root.iter("testcase"))
    found = {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}
    counts = {kind: sum(each == kind for each in found.values()) for kind in set(found.values())}
    return {
        "at": now.isoformat(timespec="seconds"),
        "commit": commit,
        "server": version,
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
        "good": set(counts) == {"passed"},
        "tests": dict(sorted(counts.items())),
        "not_passed": {name: what for name, what in sorted(found.items()) if what != "passed"},
    }


def server_version(kubeconfig: Path) -> str:
    said = yaml.safe_load(kubeconfig.read_text())
    cluster, user = said["clusters"][0]["cluster"], said["users"][0]["user"]
    tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
    tls.load_cert_chain(user["client-certificate"], user["client-key"])
    url = f"{cluster['server']}/version"
    with urllib.request.urlopen(url, context=tls) as answer:  # noqa: S310 - of the kubeconfig
        return str(json.load(answer)["gitVersion"])


def main(argv: Sequence[str]) -> int:
    """Write it."""
    report, out = map(Path, argv[:2])
    head = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    version = argv[2] if len(argv) > 2 else server_version(Path(os.environ["ROSE_KUBECONFIG"]))
    found = summary(report, version, commit, datetime.now(UTC))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{out}: {found['tests']} on {version}\n")
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
