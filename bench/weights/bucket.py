"""`python -m bench.weights.bucket`: a version through S3 beside the direct way, on one shaped link.

    origin namespace: publisher, S3 server  ──veth, tbf──►  cluster namespace: one relay

Seconds from the call that publishes a version until a relay in the other cluster has fetched,
decoded and proven it: over HTTP from the publisher, and through a bucket beside it, which takes
chunks while others are encoded. Then once more through the bucket, with the relay killed half-way
and started again: the bytes that it fetches in its second life. Needs root, iproute2 and rclone;
exit code 1 when the bucket takes more than 1.2 × as long, 2 where the link cannot be made.
"""

import os
import shutil
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
    shaped_link,
    started,
)
from rose.errors import ConfigError

PROG = "bench.weights.bucket"
MOST_RATIO = 1.2
TENSOR_BYTES = 2 << 20
HTTP_PORT, S3_PORT = PORT, PORT - 1
DIRECT = f"http://{ORIGIN_ADDRESS}:{HTTP_PORT}"
BUCKETS = f"s3://{BUCKET}/runs"


class Ways:
    """Both ways across one link."""

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

    def seconds(self, url: str, seed: int, count: int) -> dict[str, float]:
        """Publish a version at an address or in a bucket; return what it took, and its bytes."""
        root = self._folder / "origin"
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, root)
            if url != DIRECT:
                self._server.start()
                stack.callback(self._server.kill)
            words = ("publish", root, url, seed, count)
            publisher = started(stack, self._link, self._link.origin, *words)
            relay = self._relay(stack, url)
            began_s = time.monotonic()
            publisher.write(b"go")
            published = publisher.event("published")
            published_s = time.monotonic() - began_s
            relay.write(b"go")
            relay.event("ready")
            ready_s = time.monotonic() - began_s
            del published["event"]
            return published | {"published_s": published_s, "ready_s": ready_s}

    def killed(self, url: str, encoded_bytes: float) -> dict[str, float]:
        """Kill a relay half-way; return the bytes across the link before, and fetched after."""
        with ExitStack() as stack:
            self._server.start()
            stack.callback(self._server.kill)
            relay = self._relay(stack, url, folder="killed")
            before = self._link.sent_bytes()
            relay.write(b"go")
            while relay.running and self._link.sent_bytes() - before < encoded_bytes / 2:
                time.sleep(0.02)
            relay.popen.kill()
            relay.popen.wait()
            sent = self._link.sent_bytes() - before
            again = self._relay(stack, url, folder="killed")
            again.write(b"go")
            return {"sent_before": sent, "fetched_after": again.event("ready")["received"]}


def figures(megabytes: int, mbit: int, rounds: int, seed: int) -> dict[str, object]:
    """Measure both ways in turn, `rounds` times each."""
    with (
        tempfile.TemporaryDirectory(prefix="rose-bucket-") as name,
        shaped_link(mbit, 0, 0.0) as link,
    ):
        ways, count = Ways(link, Path(name)), (megabytes << 20) // TENSOR_BYTES
        direct, bucket = [], []
        for number in range(rounds):
            direct.append(ways.seconds(DIRECT, seed, count))
            bucket.append(ways.seconds(f"{BUCKETS}/{number}", seed, count))
        encoded = direct[0]["encoded_bytes"]
        return {
            "mbit": mbit,
            "link_s": encoded * 8 / (mbit * 1e6),
            "direct": direct,
            "bucket": bucket,
            "ratio": min(b["ready_s"] for b in bucket) / min(d["ready_s"] for d in direct),
            "killed": ways.killed(f"{BUCKETS}/0", encoded),
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
