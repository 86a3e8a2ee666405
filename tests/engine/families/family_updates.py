"""Program: updates a real vLLM replica of each named family twice and says what came of it.

`python -m tests.engine.families.family_updates FOLDER NAME…` writes FOLDER/NAME.json. An engine
starts in a process forked from this one, which has imported vLLM once. See `UpdateOutcome`.
"""

import io
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from tests.engine.families.tiny_families import VISION, make_family
from tests.engine.policy_versions import PolicyVersions
from tests.harness.vision_model import IMAGE, picture
from weight_transfer.apply import replica_weights
from weight_transfer.apply.replica_weights import merged
from weight_transfer.format.tensors import TensorBits, tensor_of

PROMPTS = [[5 * k % 400 for k in range(40)], [(7 * k + 3) % 400 for k in range(100)]]
# Weights that a predicting layer has beside those of other layers.
PREDICTOR = ("enorm", "hnorm", "eh_proj", "shared_head")
MTP = {"method": "mtp", "num_speculative_tokens": 2}
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ROSE_POLICY_VERSION": "0",
    "ROSE_ROLE": "dedicated",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "rose_unpacked",
}


@dataclass
class UpdateOutcome:
    """Result of a family's replica. refused: the line, if it was refused.

    packed: number of modules that each update replaces.
    equal: after the updates it answers as a fresh engine does, tokens and log probabilities.
    missed: kinds of weight of which a stale copy was proven. flipped: an audit's findings.
    """

    family: str
    started: bool = False
    refused: str = ""
    updates: int = 0
    packed: int = 0
    equal: bool = False
    missed: list[str] = field(default_factory=list)
    flipped: list[str] = field(default_factory=list)
    engine: str = "vLLM"


class FamilyReplica:
    """A vLLM engine in this process, or with a process a rank, and its workers' weight methods."""

    def __init__(self, folder: Path, family: str, ranks: int = 1, *, updatable: bool) -> None:
        """Start it. `family`: with "+" and how vLLM quantises its weights at load, or without."""
        from vllm import LLM

        family, _, quantization = family.partition("+")
        extension = "weight_transfer.vllm.worker.WeightWorker" if updatable else ""
        self._pooling, self._sees = family == "reward", family == VISION
        self.drafts = family.endswith("-mtp")
        self.engine: Any = LLM(
            model=str(folder),
            # A processor of images needs its tokenizer.
            skip_tokenizer_init=not (self._pooling or family == VISION),
            enforce_eager=True,
            dtype="bfloat16",
            kv_cache_memory_bytes=96 << 20,
            max_model_len=256,
            max_num_seqs=8,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else UNIPROC,
            logprobs_mode="processed_logprobs",
            seed=0,
            worker_extension_cls=extension,
            quantization=quantization or None,
            # With AMX vLLM takes a backend for latent attention that packs a weight away.
            attention_backend="CPU_MLA" if "deepseek" in family else None,
            runner="pooling" if self._pooling else "generate",
            speculative_config=MTP if self.drafts else None,
        )

    def call(self, method: str, *args: object) -> list[Any]:
        """Return what each rank answers."""
        return list(self.engine.collective_rpc(f"rose_weights_{method}", args=args))

    def answers(self) -> list[Any]:
        from vllm import SamplingParams

        self.engine.reset_prefix_cache()
        if self._sees:
            # The pause of an update does this.
            self.engine.llm_engine.reset_encoder_cache()
        prompts: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        if self._sees:
            for number, prompt in enumerate(prompts):
                prompt["prompt_token_ids"] = [*prompt["prompt_token_ids"], IMAGE, 7]
                with Image.open(io.BytesIO(picture(number))) as shown:
                    prompt["multi_modal_data"] = {"image": shown.convert("RGB")}
        if self._pooling:
            scored = self.engine.encode(prompts, pooling_task="classify", use_tqdm=False)
            return [answer.outputs.data.tolist() for answer in scored]
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
        sampling.detokenize = False
        outputs = self.engine.generate(prompts, sampling, use_tqdm=False)
        return [
            [
                (token, chances[token].logprob)
                for token, chances in zip(o.token_ids, o.logprobs, strict=True)
            ]
            for o in (answer.outputs[0] for answer in outputs)
        ]

    def update(self, paths: dict[str, str], attempt: str) -> dict[str, Any]:
        decode = ("decode", [paths["manifest"]], paths["chunks"], attempt)
        while not all(answer["done"] for answer in self.call(*decode)):
            time.sleep(0.01)
        self.call("load")
        report = merged(self.call("commit"))
        self.call("settle")
        return report

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def changed(tensors: dict[str, TensorBits], seed: int) -> dict[str, TensorBits]:
    """A twentieth of all weights, changed a little."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in tensors.items():
        bits = tensor.bits.copy()
        chosen = rng.random(bits.size) < 0.05
        chosen[:1] |= bits.size < 40
        # Low bits alone: no weight becomes infinite or no number.
        top = {1: 4, 2: 60, 4: 1 << 21}[bits.itemsize]
        flips = rng.integers(1, top, int(chosen.sum())).astype(bits.dtype)
        if tensor.dtype == "float8_e8m0fnu":
            flips[:] = 1
        elif tensor.dtype.startswith("float8"):
            flips[(bits[chosen] & 0x78) == 0x78] = 0
        bits[chosen] ^= flips
        new[name] = TensorBits(name, tensor.dtype, tensor.shape, bits)
    return new


def negated(tensors: dict[str, TensorBits], kind: str) -> dict[str, TensorBits]:
    """Every second weight of one kind with its highest bit flipped."""
    new = dict(tensors)
    for name, tensor in tensors.items():
        if kind_of(name) == kind:
            bits = tensor.bits.copy()
            bits[::2] ^= bits.dtype.type(1 << (8 * bits.itemsize - 1))
            new[name] = TensorBits(name, tensor.dtype, tensor.shape, bits)
    return new


def kind_of(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", "", name)


def outcome(
    name: str, folder: Path, start: type[FamilyReplica] = FamilyReplica, engine: str = "vLLM"
) -> UpdateOutcome:
    """Start, update twice, plant a stale copy of each kind, compare with a fresh engine.

    `name`: a family, with "@2" for two ranks of tensor parallelism, which get no stale copies, or
    with "+" and how vLLM quantises its weights at load.
    """
    result = UpdateOutcome(name, engine=engine)
    family, _, suffix = name.partition("@")
    ranks = int(suffix or 1)
    model = make_family(family.partition("+")[0], folder / "model")
    versions = PolicyVersions(folder / "versions", model)
    replica = start(model, family, ranks, updatable=True)
    result.started = True
    before = replica.answers()
    try:
        (folder / "ranks").mkdir(mode=0o700)
        place = str(folder / "ranks" / "engine") if ranks > 1 else None
        init = ("init", str(model), versions.key.verify_key.hex, None, place)
        result.packed = len(replica.call(*init)[0]["packed"])
        for seed in (1, 2):
            report = replica.update(versions.next(changed(versions.active, seed)), f"a{seed}")
            if not (report["digest_ok"] and report["probe_ok"]):
                raise AssertionError(f"version {seed} is not proven: {report}")
            result.updates = report["version"]
    except Exception as error:
        result.refused = str(error).splitlines()[0]
        return result
    after = replica.answers()
    assert after != before
    result.flipped = audit(replica)
    result.missed = stale(replica, versions) if ranks == 1 else []
    replica.close()
    fresh = start(saved(versions, model, folder / "fresh"), family, ranks, updatable=False)
    result.equal = after == fresh.answers()
    return result


def audit(replica: FamilyReplica) -> list[str]:
    from weight_transfer.apply.probe import Part, judge

    parts = [part for answer in replica.call("audit", 1 << 62, True) for part in answer["parts"]]
    expected = replica.call("digests")[0]
    read = (Part(name, tuple(key), size, total) for name, key, size, total in parts)
    return list(judge(read, expected["digests"], expected["elements"]).flipped)


def stale(replica: FamilyReplica, versions: PolicyVersions) -> list[str]:
    """Return the first kind of which an update that wrote nothing was proven.

    No probe sees what drafts alone have, and those kinds of which no audit finds it are returned.
    """
    number, parent, active = versions.version, versions.version, versions.active
    kinds = sorted(set(map(kind_of, active)))
    drafted = [kind for kind in kinds if replica.drafts and any(key in kind for key in PREDICTOR)]

    def unwritten(new: dict[str, TensorBits]) -> bool:
        nonlocal number
        number += 1
        versions.publisher.publish(number, parent, active, new)
        with (
            patch.object(replica_weights, "write", lambda _: ()),
            patch.object(replica_weights.OpaqueCopy, "write", lambda _: ()),
        ):
            report = replica.update(versions.paths(number), f"stale {number}")
        return bool(report["probe_ok"])

    for kind in (each for each in kinds if each not in drafted):
        if unwritten(negated(active, kind)):
            return [kind]
    if drafted:
        new = active
        for kind in drafted:
            new = negated(new, kind)
        assert unwritten(new)
        found = set(map(kind_of, audit(replica)))
        return [kind for kind in drafted if kind not in found]
    return []


def saved(versions: PolicyVersions, model: Path, folder: Path) -> Path:
    """Write the newest version as a checkpoint into `folder`, and return `folder`."""
    from safetensors.torch import save_file

    shutil.copytree(model, folder)
    tensors = {name: tensor_of(bits).clone() for name, bits in versions.active.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def import_engine() -> None:
    """Import vLLM, so that processes forked from this one have it."""
    import torch
    import vllm
    from vllm.model_executor.models import registry

    torch.set_num_threads(1)
    # Forked processes inspect models themselves rather than start a Python for it.
    registry._run_in_subprocess = lambda run: run()
    assert vllm.LLM


def try_each(
    families: list[str],
    folder: Path,
    suffix: str,
    outcome: Callable[[str, Path], Any],
    failed: Callable[[str, str], Any],
) -> None:
    """Write FOLDER/FAMILY<suffix> for each family: its outcome, found in a forked process.

    failed: makes the outcome of a family and an error's line.
    """
    for family in families:
        child = os.fork()
        if not child:
            work = folder / family
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            try:
                result = outcome(family, work)
            except BaseException as error:
                traceback.print_exc()
                text = str(error).splitlines() or [""]
                result = failed(family, f"{type(error).__name__}: {text[0]}")
            shutil.rmtree(work)
            (folder / f"{family}{suffix}").write_text(json.dumps(asdict(result)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            ended = failed(family, f"its process ended with {status}")
            (folder / f"{family}{suffix}").write_text(json.dumps(asdict(ended)))


def warm() -> None:
    """Compile the kernels of updates, so that processes forked from this one have them."""
    import torch

    from weight_transfer.apply.staging import warm_kernels

    samples = (("bfloat16", np.uint16), ("float32", np.uint32), ("uint8", np.uint8))
    zeros = {d: TensorBits(d, d, (64, 64), np.zeros(4096, bits)) for d, bits in samples}
    warm_kernels(zeros, torch.device("cpu"))


def main(folder: Path, families: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    import_engine()
    warm()
    try_each(families, folder, ".json", outcome, lambda f, line: UpdateOutcome(f, refused=line))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
