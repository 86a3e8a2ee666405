"""A real S3 server (rclone's) over a folder, for benchmarks and tests; clients get their settings
by the environment.
"""

import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common.processes import BenchProcess
from rose.addresses import host_port
from rose.errors import EngineStartError

BUCKET = "policies"
_START_S = 30.0


def rclone() -> str | None:
    """Return the path of rclone beside this Python or on the path, None if there is none."""
    beside = Path(sys.executable).with_name("rclone")
    return str(beside) if beside.is_file() else shutil.which("rclone")


class S3Server:
    """Server of the bucket BUCKET, which may be killed and started again at its address.

    inside: beginning of a command line that runs it elsewhere, in a network namespace.
    """

    def __init__(
        self, folder: Path, port: int, host: str = "127.0.0.1", inside: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        (folder / BUCKET).mkdir(parents=True)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host_port(host, port)}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "rose",
            "AWS_SECRET_ACCESS_KEY": "of-a-benchmark",
        }
        address, options = host_port(host, port), ("--auth-key", "rose,of-a-benchmark", "--addr")
        argv = [*inside, rclone() or "rclone", "serve", "s3", *options, address, str(folder)]
        self._log = folder / "server.log"
        self._process = BenchProcess("S3 server", argv, self._log, env={"HOME": str(folder)})

    def start(self) -> None:
        """Start the server and return once it listens. Raises EngineStartError."""
        self._log.unlink(missing_ok=True)
        self._process.start()
        until_s = time.monotonic() + _START_S
        while b"Starting s3 server" not in self._log.read_bytes():
            if not self._process.running or time.monotonic() > until_s:
                raise EngineStartError(f"the S3 server does not start: {self._log.read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server; its objects stay."""
        if self._process.running:
            self._process.popen.send_signal(signal.SIGKILL)
            self._process.popen.wait()
