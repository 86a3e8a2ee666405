"""Cost of a sparse update inside the engine, beside a full reload of the same model.

    python -m bench.micro.weight_pause --rounds 7 > out/bench/weight_pause.json

A real vLLM engine on CPU with random bf16 weights. Each round changes a share of all weights,
stages the update, and takes the time of what happens under the pause: the scatter with its
read-back, and one probe forward. Full reloads are vLLM's own `reload_weights` from files that the
page cache has, and the engine's loader run on weights in memory. --experts N makes each layer a
mixture of so many, two of which compute each token.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common.report import parser_of, put_judged
from bench.common.tiny_models import TinyModel, changed
from weight_transfer import ChunkStore, SigningKey, VersionPublisher, read_model_dir

# Share of all weights that a round changes.
SHARE = 0.01
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ROSE_ROLE": "guest",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "rose_unpacked",
}


def save_model(folder: Path, hidden: int, layers: int, experts: int) -> None:
    """Write a random bfloat16 Qwen2, or with `experts` a Qwen3-MoE, in Hugging Face's layout."""
    dense = TinyModel(
        hidden=hidden,
        layers=layers,
        heads=hidden // 64,
        kv_heads=hidden // 128,
        mlp=4 * hidden,
        vocabulary=32_000,
        dtype="bfloat16",
    )
    if not experts:
        dense.save(folder, words=False)
        return
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = dense.config().to_dict() | {"head_dim": 64, "num_experts_per_tok": 2}
    config |= {"num_experts": experts, "moe_intermediate_size": hidden}
    config.pop("model_type")
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).to(torch.bfloat16)
    made.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def start_engine(folder: Path) -> Any:  # noqa: ANN401 -- vLLM's
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
        max_model_len=512,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        worker_extension_cls="weight_transfer.vllm.worker.WeightWorker",
    )


class PauseBench:
    """One engine and the versions that it goes through."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._llm = start_engine(folder)
        self._folder = folder
        self._store, key = ChunkStore(root / "store"), SigningKey.generate()
        self._publisher = VersionPublisher(self._store, job="bench", trainer="bench", key=key)
        self.base = self._active = read_model_dir(folder)
        self._version = 0
        self.init_s = timed(
            lambda: self._call("rose_weights_init", str(folder), key.verify_key.hex)
        )

    def round(self) -> dict[str, float]:
        """Publish, stage and commit one update; return seconds of its parts."""
        version = self._version + 1
        new = changed(self._active, SHARE, version)
        self._publisher.publish(version, self._version, self._active, new)
        paths = [str(self._store.manifest_path(version))], str(self._store.chunks_dir)
        self._call("rose_weights_decode", *paths, f"version {version}")
        began_s = time.perf_counter()
        pieces = []
        done = False
        while not done:
            began_piece_s = time.perf_counter()
            done = self._call("rose_weights_load", 1)["done"]
            pieces.append(time.perf_counter() - began_piece_s)
        stage_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        report = self._call("rose_weights_commit")
        inside_s = time.perf_counter() - began_s
        if not (report["digest_ok"] and report["probe_ok"]):
            raise RuntimeError(f"the update was not proven: {report}")
        self._version, self._active = version, new
        times = {"apply_s": report["apply_s"], "probe_s": report["probe_s"]}
        # The first piece waited for the decoding thread, and held up no turn.
        longest_s = max(pieces[1:])
        times |= {"inside_s": inside_s, "stage_s": stage_s, "longest_piece_s": longest_s}
        return times | {"changed": float(report["changed_elements"])}

    def reloads(self, rounds: int) -> dict[str, list[float]]:
        """Return seconds of full reloads; the engine serves its first weights afterwards."""
        path = {"weights_path": str(self._folder)}
        reload = lambda: self._llm.collective_rpc("reload_weights", kwargs=path)  # noqa: E731
        fresh = lambda: self._llm.collective_rpc(load_from_memory)  # noqa: E731
        return {
            "reload_weights_s": [timed(reload) for _ in range(rounds)],
            "loader_s": [timed(fresh) for _ in range(rounds)],
        }

    def _call(self, method: str, *args: object) -> Any:  # noqa: ANN401 -- JSON
        return self._llm.collective_rpc(method, args=args)[0]


def load_from_memory(worker: Any) -> None:  # noqa: ANN401 -- vLLM's
    """Load the active weights anew in a worker, with nothing read from disk."""
    from weight_transfer.apply.reference import load_fresh, overlay
    from weight_transfer.vllm.live_model import VllmLoader

    tensors = worker.rose_weights.tensors
    runner = worker.model_runner
    load_fresh(VllmLoader(runner.vllm_config, runner.device), tensors, overlay(tensors))


def timed(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def summary(
    bench: PauseBench, rounds: list[dict[str, float]], reloads: dict[str, list[float]]
) -> Any:  # noqa: ANN401 -- JSON
    """Return medians, and their shares of a reload."""
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    middle |= {name: statistics.median(values) for name, values in reloads.items()}
    full_s = min(middle["reload_weights_s"], middle["loader_s"])
    weights = sum(tensor.bits.size for tensor in bench.base.values())
    return {
        "weights": weights,
        "share_changed": middle["changed"] / weights,
        "init_s": bench.init_s,
        "median": middle,
        "apply_share_of_reload": middle["apply_s"] / full_s,
        "pause_share_of_reload": middle["inside_s"] / full_s,
        "rounds": rounds,
        "reloads": reloads,
    }


def main() -> None:
    numbers: dict[str, Any] = {"rounds": 7, "hidden": 768, "layers": 12, "experts": 0}
    arguments = parser_of(__doc__, "bench.micro.weight_pause", **numbers).parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_model(root / "model", arguments.hidden, arguments.layers, arguments.experts)
        bench = PauseBench(root, root / "model")
        rounds = [bench.round() for _ in range(arguments.rounds)]
        reloads = bench.reloads(arguments.rounds)
        put_judged(summary(bench, rounds, reloads), arguments.out, good=True)


if __name__ == "__main__":
    main()
