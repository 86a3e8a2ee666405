"""The engine to profile: started as a node would start a guest of the same sizes."""

import argparse
from pathlib import Path

from executor.step_log import STEP_LOG
from rose.engines import Device, EngineRole, EngineSpec
from rose.node.gpu import Gpus, card_environment
from rose.ports import free_port
from rose.profile.plan import DECODE_STEPS

LOG = "engine.log"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is said of the engine alone."""
    parser.add_argument("--port", type=positive, metavar="N", help="default: a free one")
    parser.add_argument("--core", type=int, metavar="N", help="CPU core, as in the node's file")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16")
    parser.add_argument("--device", metavar="GPU", help="its index or UUID; default: the CPU")
    parser.add_argument(
        "--engine-python", type=Path, metavar="FILE", help="interpreter that has its vLLM"
    )
    parser.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="on a GPU"
    )


def spec_of(args: argparse.Namespace, folder: Path, gpus: Gpus) -> EngineSpec:
    """Its steps are logged in `folder`. Raises CardError for a GPU that cannot be used."""
    on_gpu = args.device is not None
    named = card_environment(gpus.card(_device(args.device))) if on_gpu else {}
    return EngineSpec(
        name="profile",
        role=EngineRole.GUEST,
        model_dir=args.model,
        port=args.port or free_port(),
        log=folder / LOG,
        core=args.core,
        dtype=args.dtype,
        kv_bytes=args.kv_bytes,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        stream_interval=DECODE_STEPS,
        control_page=folder / "page",
        python=args.engine_python,
        device=Device.CUDA if on_gpu else Device.CPU,
        enforce_eager=not (on_gpu and args.cuda_graphs),
        extra_env={STEP_LOG: str(folder / "steps"), **named},
        # Turns are token ids; a cached prefix would make a prefill shorter than it is said to be.
        extra_args=("--skip-tokenizer-init", "--no-enable-prefix-caching"),
    )


def positive(text: str) -> int:
    """Of the command line."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _device(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
