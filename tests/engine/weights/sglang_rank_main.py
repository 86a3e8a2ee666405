"""One rank of a model of SGLang's, loaded by its own loader: traced, proved, updated, audited.

Run by an interpreter that has SGLang, once for each rank:
`sglang_rank_main.py MODEL RANK SIZE PORT MANIFEST CHUNKS`. Prints one line of JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from weight_transfer.apply.loader_map import LoaderMap
from weight_transfer.apply.probe import Audit
from weight_transfer.apply.receiver import Receiver
from weight_transfer.apply.reference import load_fresh, overlay
from weight_transfer.apply.staging import place, write
from weight_transfer.apply.trace_loader import trace_loader
from weight_transfer.format.checkpoint import read_model_dir
from weight_transfer.format.manifest import Manifest
from weight_transfer.sglang import SglangLoader

MODEL, RANK, SIZE, PORT, MANIFEST, CHUNKS = sys.argv[1:]


def loader() -> SglangLoader:
    """Return the loader of a rank whose groups are joined, as a scheduler's process joins them."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=MODEL,
        device="cpu",
        tp_size=int(SIZE),
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        dtype="float32",
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=int(RANK)))
    bootstrap._init_parallel_groups(
        backend="gloo",
        dist_init_method=f"tcp://127.0.0.1:{PORT}",
        server_args=arguments,
        gpu_id=int(RANK),
    )
    config = ModelConfig.from_server_args(arguments)
    return SglangLoader(config, LoadConfig(), torch.device("cpu"))


def never() -> torch.nn.Module:
    raise AssertionError("every parameter of these models is a copy")


def main() -> None:
    engine = loader()
    base = read_model_dir(Path(MODEL))
    live = load_fresh(engine, base, overlay(base))
    trace = trace_loader(engine.skeleton(torch.device("meta")), base)
    found = LoaderMap.prove(live, trace, base, never)
    manifest = Manifest.from_bytes(Path(MANIFEST).read_bytes())
    chunks = {ref.id: (Path(CHUNKS) / ref.id).read_bytes() for ref in manifest.chunks}
    staged = Receiver(base).decode(manifest, chunks, None, time.time())
    wrong = write(place(found, staged))
    fresh = dict(load_fresh(engine, base, overlay(base, staged.tensors)).named_parameters())
    same = all(torch.equal(p, fresh[name]) for name, p in live.named_parameters())
    parts = [[p.tensor, p.key, p.elements, p.total] for p in Audit(found).step(1 << 40)]
    said: dict[str, Any] = {"wrong": wrong, "same": same, "parts": parts}
    said |= {"transformed": dict(found.transformed), "loose": found.loose}
    sys.stdout.write("\n" + json.dumps(said) + "\n")


main()
