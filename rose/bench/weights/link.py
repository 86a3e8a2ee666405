"""End to end: a base across a shaped link, to several receivers on the other side of it."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench.weights.link_node import JOB
from rose.bench.weights.shaped import ORIGIN_ADDRESS, LinkUnavailableError, ShapedLink, shaped_link
from weight_transfer import ChunkStore, Manifest, Publisher, SigningKey, TensorBits

# So slow that the cores of one small machine can play the machines on both sides of it.
MBIT, DELAY_MS, LOSS_PERCENT = 25, 20, 0.1
RECEIVERS = (1, 4, 8)
TENSORS, ROWS, COLUMNS = 16, 1_024, 1_024
CHUNK_BYTES = 1 << 20
PORT = 18_900
_END_S = 20.0


def link_figures(seed: int) -> dict[str, object]:
    """A row for each number of receivers, or why there is none."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rose-link-") as folder,
            shaped_link(MBIT, DELAY_MS, LOSS_PERCENT) as link,
        ):
            manifest = _published(Path(folder) / "origin", seed)
            rows = [_run(link, Path(folder), manifest, count) for count in RECEIVERS]
            shape = {"mbit": MBIT, "delay_ms": DELAY_MS, "loss_percent": LOSS_PERCENT}
            if not link.delayed:
                shape = {"mbit": MBIT, "delay_ms": 0, "loss_percent": 0}
            return {"link": shape, "netem": link.delayed, "rows": rows}
    except LinkUnavailableError as error:
        return {"skipped": str(error)}


def _published(root: Path, seed: int) -> Manifest:
    """A base of 32 MiB of weights, which hardly compress."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for number in range(TENSORS):
        name = f"layers.{number}.weight"
        bits = rng.integers(0, 1 << 16, ROWS * COLUMNS, dtype="<u2")
        tensors[name] = TensorBits(name, "bfloat16", (ROWS, COLUMNS), bits)
    publisher = Publisher(
        ChunkStore(root), JOB, "bench", SigningKey.generate(), chunk_bytes=CHUNK_BYTES
    )
    return publisher.publish_base(1, tensors)


def _run(link: ShapedLink, folder: Path, manifest: Manifest, count: int) -> dict[str, object]:
    origin = f"http://{ORIGIN_ADDRESS}:{PORT}"
    members = [f"http://127.0.0.1:{PORT + 1 + n}" for n in range(count)]
    with ExitStack() as stack:
        _start(stack, link.inside(link.origin, _node("origin", folder / "origin", origin)))
        receivers = [
            _start(
                stack,
                link.inside(
                    link.cluster,
                    _node("receive", folder / f"{count}-{n}", member, origin, *members),
                ),
            )
            for n, member in enumerate(members)
        ]
        before, began_s = link.sent_bytes(), time.monotonic()
        for receiver in receivers:
            receiver.stdin.write("go\n")
            receiver.stdin.flush()
        said = [_heard(receiver, "ready") for receiver in receivers]
        ready_s, sent = time.monotonic() - began_s, link.sent_bytes() - before
    encoded = manifest.wire_bytes + manifest.size
    link_s = encoded * 8 / (MBIT * 1e6)
    fetched_s = max(one["fetched_s"] for one in said)
    return {
        "receivers": count,
        "encoded_bytes": encoded,
        "link_bytes": sent,
        "received_bytes": sum(one["received"] for one in said),
        "link_s": link_s,
        "fetched_s": fetched_s,
        "ready_s": ready_s,
        "link_bytes_over_encoded": sent / encoded,
        "goodput_of_link": link_s / fetched_s,
        "ready_over_link": ready_s / link_s,
    }


def _node(*words: object) -> list[str]:
    return [sys.executable, "-m", "rose.bench.weights.link_node", *map(str, words)]


def _start(stack: ExitStack, argv: Sequence[str]) -> Any:  # noqa: ANN401 -- pipes are never None
    process = stack.enter_context(
        subprocess.Popen(  # noqa: S603 -- our own program
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    )
    stack.callback(_end, process)
    _heard(process, "up")
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _heard(process: Any, event: str) -> dict[str, Any]:  # noqa: ANN401 -- as above
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a node of the link benchmark ended with {process.wait()}")
    said: dict[str, Any] = json.loads(line)
    assert said["event"] == event, said
    return said
