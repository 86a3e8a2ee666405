"""Two engines with the same settings: a fleet's one replica, and a stock vLLM beside it.

Both are started once, and one idles while the other one is asked. The front and the ratios of the
measurements on them stand here too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Self

from bench.common.report import OUT, parser_of
from bench.trainers.stack import START_S, TrainerStack
from rose.addresses import free_port
from rose.client.blocking import LoopThread
from rose.compare.bootstrap import Estimate, PairedWindow, ratio_of_percentiles
from rose.engines import EngineProcess, EngineRole, EngineSpec

# These turns are not read token by token.
KV_BYTES, MAX_SEQUENCES, STREAM_INTERVAL = 64 << 20, 48, 16
# On a CPU vLLM computes with packed copies of weights, into which an update cannot write (see
# weight_transfer.vllm.disable_cpu_packing); on GPUs there are none.
UNPACKED = "the stock engine packs no weights, as replicas on a CPU do not"
_UNPACKED_ENV = {"VLLM_PLUGINS": "rose_unpacked", "ROSE_ROLE": "dedicated"}


class PairedEngines:
    """The fleet (`stack`) and the stock engine (`spec`), ready inside `with`."""

    def __init__(
        self, folder: Path, model: Path, loop: LoopThread, *, unpacked: bool = False
    ) -> None:
        """`unpacked`: the stock engine computes as a replica does on a CPU."""
        self._loop = loop
        replica = {
            "kv_bytes": KV_BYTES,
            "max_sequences": MAX_SEQUENCES,
            "stream_interval": STREAM_INTERVAL,
        }
        self.stack = TrainerStack(folder / "rose", model, replica=replica)
        self.spec = EngineSpec(
            name="stock",
            role=EngineRole.STOCK,
            model_dir=model,
            port=free_port(),
            log=folder / "stock.log",
            kv_bytes=KV_BYTES,
            max_num_seqs=MAX_SEQUENCES,
            stream_interval=STREAM_INTERVAL,
            extra_env={"VLLM_SERVER_DEV_MODE": "1"} | (_UNPACKED_ENV if unpacked else {}),
            extra_args=(
                "--logprobs-mode=processed_logprobs",
                "--generation-config=vllm",
                "--disable-log-stats",
            ),
        )
        self._stock: EngineProcess | None = None

    def __enter__(self) -> Self:
        try:
            self._stock = self._loop.call(EngineProcess.start(self.spec))
            self.stack.__enter__()
            self.stack.wait_ready()
            self._loop.call(self._stock.wait_healthy(START_S))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stack.close()
        if self._stock is not None:
            self._loop.call(self._stock.stop())


def windows_of(above: Sequence[float], below: Sequence[float], size: int) -> list[PairedWindow]:
    """Return pairs of measurements taken side by side, in windows of `size`: units of chance."""
    starts = range(0, min(len(above), len(below)) - size + 1, size)
    return [PairedWindow(above[k : k + size], below[k : k + size]) for k in starts]


def ratio_of_medians(windows: Sequence[PairedWindow]) -> Estimate:
    """Return the ratio of medians over paired windows, with its interval."""
    return ratio_of_percentiles(windows, 50, seed=0)


def ratio_text(ratio: Estimate) -> str:
    """Return a ratio and its interval for people."""
    if ratio.ci95 is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.ci95[0]:.2f} to {ratio.ci95[1]:.2f})"


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first third of the values and of the last."""
    third = max(1, len(values) // 3)
    return fmean(values[:third]), fmean(values[-third:])


def measuring_parser(doc: str | None, prog: str, **numbers: float) -> argparse.ArgumentParser:
    """Return a parser with `--out`, `--unpacked` and the numbers."""
    parser = parser_of(doc, prog, OUT / "trainers", **numbers)
    parser.add_argument("--unpacked", action="store_true", help=UNPACKED)
    return parser
