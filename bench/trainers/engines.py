"""Two engines with the same settings: a fleet's one replica, and a stock vLLM beside it.

Both are started once, and one idles while the other one is asked.
"""

from pathlib import Path

from bench.trainers.stack import START_S, TrainerStack
from rose.addresses import free_port
from rose.client.blocking import LoopThread
from rose.engines import EngineProcess, EngineRole, EngineSpec

# Nobody reads these turns token by token.
KV_BYTES, MAX_SEQUENCES, STREAM_INTERVAL = 64 << 20, 48, 16
# On a CPU vLLM computes with packed copies of weights, into which nobody can write (see
# weight_transfer.vllm.disable_cpu_packing); on GPUs there are none.
UNPACKED = "the stock engine packs no weights, as replicas on a CPU do not"
_UNPACKED_ENV = {"VLLM_PLUGINS": "rose_unpacked", "ROSE_ROLE": "dedicated"}


class PairedEngines:
    """The fleet (`stack`) and the stock engine (`spec`), from `with` on ready to be asked."""

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

    def __enter__(self) -> "PairedEngines":
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
        """End all of it."""
        self.stack.close()
        if self._stock is not None:
            self._loop.call(self._stock.stop())
