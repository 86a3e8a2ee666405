"""`python -m bench.weights.bucket`: a version through S3 beside the direct way, on one shaped link.

    origin namespace: publisher, S3 server  ──veth, tbf──►  cluster namespace: one relay

Seconds from a version that is durable at its publisher until a relay in the other cluster has
fetched, decoded and proven it: over HTTP from the publisher, and through a bucket beside it, the
copy included. Then once more through the bucket, with the relay killed half-way and started again:
the bytes that it fetches in its second life. Needs root, iproute2 and rclone; exit code 1 when the
bucket takes more than 1.2 × as long, 2 where the link cannot be made.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.common.processes import BenchProcess
from bench.common.report import parser_of, put_judged, reported
from bench.common.s3_server import BUCKET, S3Server
from bench.weights.link import (
    ORIGIN_ADDRESS,
    PORT,
    LinkUnavailableError,
    ShapedLink,
    published,
    shaped_link,
    started,
)
from rose.errors import ConfigError

PROG = "bench.weights.bucket"
MOST_RATIO = 1.2
TENSOR_BYTES = 2 << 20
HTTP_PORT, S3_PORT = PORT, PORT - 1
DIRECT = f"http://{ORIGIN_ADDRESS}:{HTTP_PORT}"
COPY = f"s3://{BUCKET}/runs/job"


class Ways:
    """Both ways across one link, from one root."""

    def __init__(self, link: ShapedLink, folder: Path) -> None:
        self._link, self._folder = link, folder
        inside = link.inside(link.origin, ())
        self._server = S3Server(folder / "s3", S3_PORT, ORIGIN_ADDRESS, inside)
        os.environ.update(self._server.environment)
        self._relays = 0

    def _relay(self, stack: ExitStack, origin: str, *, folder: str = "") -> BenchProcess:
        self._relays += 1
        at = self._folder / (folder or f"relay-{self._relays}")
        member = f"http://127.0.0.1:{PORT + self._relays}"
        return started(stack, self._link, self._link.cluster, "receive", at, member, origin, member)

    def direct_s(self) -> float:
        """Return the seconds over HTTP."""
        with ExitStack() as stack:
            root = self._folder / "origin"
            started(stack, self._link, self._link.origin, "origin", root, DIRECT)
            relay = self._relay(stack, DIRECT)
            began_s = time.monotonic()
            relay.write(b"go")
            relay.event("ready")
            return time.monotonic() - began_s

    def through_bucket(self) -> dict[str, float]:
        """Return the seconds through the bucket, and those of the copy among them."""
        with ExitStack() as stack:
            self._server.start()
            stack.callback(self._server.kill)
            root = self._folder / "origin"
            copier = started(stack, self._link, self._link.origin, "copy", root, COPY)
            relay = self._relay(stack, COPY)
            began_s = time.monotonic()
            copier.write(b"go")
            copier.event("copied")
            copied_s = time.monotonic() - began_s
            relay.write(b"go")
            relay.event("ready")
            return {"copied_s": copied_s, "ready_s": time.monotonic() - began_s}

    def killed(self, encoded_bytes: int) -> dict[str, float]:
        """Kill a relay half-way; return the bytes across the link before, and fetched after."""
        with ExitStack() as stack:
            self._server.start()
            stack.callback(self._server.kill)
            relay = self._relay(stack, COPY, folder="killed")
            before = self._link.sent_bytes()
            relay.write(b"go")
            while self._link.sent_bytes() - before < encoded_bytes / 2:
                time.sleep(0.02)
            relay.popen.kill()
            relay.popen.wait()
            sent = self._link.sent_bytes() - before
            again = self._relay(stack, COPY, folder="killed")
            again.write(b"go")
            return {"sent_before": sent, "fetched_after": again.event("ready")["received"]}


def figures(megabytes: int, mbit: int, rounds: int, seed: int) -> dict[str, object]:
    """Measure both ways in turn, `rounds` times each."""
    with (
        tempfile.TemporaryDirectory(prefix="rose-bucket-") as name,
        shaped_link(mbit, 0, 0.0) as link,
    ):
        folder = Path(name)
        manifest = published(folder / "origin", seed, (megabytes << 20) // TENSOR_BYTES)
        encoded = manifest.wire_bytes + manifest.size
        ways, direct, bucket = Ways(link, folder), [], []
        for _ in range(rounds):
            direct.append(ways.direct_s())
            bucket.append(ways.through_bucket())
        return {
            "mbit": mbit,
            "encoded_bytes": encoded,
            "link_s": encoded * 8 / (mbit * 1e6),
            "direct_s": direct,
            "bucket": bucket,
            "ratio": min(b["ready_s"] for b in bucket) / min(direct),
            "killed": ways.killed(encoded),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, PROG, megabytes=1_000, mbit=800, rounds=2, seed=7)
    options = parser.parse_args(argv)

    def work() -> int:
        try:
            found = figures(options.megabytes, options.mbit, options.rounds, options.seed)
        except LinkUnavailableError as error:
            raise ConfigError(str(error)) from error
        ratio = found["ratio"]
        assert isinstance(ratio, float)
        return put_judged(found, options.out, good=ratio <= MOST_RATIO)

    return reported(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
