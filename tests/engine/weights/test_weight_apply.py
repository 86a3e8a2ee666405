"""Real vLLM: versions applied while serving compute exactly what a dense load computes."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_starts import EngineStarts
from tiny_model import VOCABULARY, save_tiny_model

from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import WrongBaseError
from weight_transfer.format.checkpoint import read_model_dir
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import TensorBits, tensor_bits, tensor_of
from weight_transfer.publish.version_publisher import VersionPublisher

pytestmark = [
    pytest.mark.engine,
    pytest.mark.starts_others,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # The worker sets it, in this process here.
    "ROSE_POLICY_VERSION": "0",
    "ROSE_ROLE": "guest",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "rose_unpacked",
}


def sgd_like(tensors: dict[str, TensorBits], seed: int, size: float) -> dict[str, TensorBits]:
    import torch

    torch.manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        weight = tensor_of(tensor).float()
        moved[name] = tensor_bits(name, (weight + size * torch.randn_like(weight)).bfloat16())
    return moved


@dataclass
class ServedEngine:
    llm: Any
    publisher: VersionPublisher
    store: ChunkStore
    model_dir: Path
    base: dict[str, TensorBits]
    active: dict[str, TensorBits]
    version: int = 0
    requests: int = field(default=0)
    attempts: int = 0

    def rpc(self, method: str, *args: object) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def run(self, hook: Any) -> Any:
        return self.llm.collective_rpc(hook)[0]

    def publish(self, new: dict[str, TensorBits]) -> Any:
        return self.publisher.publish(self.version + 1, self.version, self.active, new)

    def stage(self, version: int) -> Any:
        return self.load([str(self.store.manifest_path(version))])

    def load(self, manifests: list[str], chunks: str = "") -> Any:
        """Decode versions and load them at once."""
        self.attempts += 1
        chunks = chunks or str(self.store.chunks_dir)
        self.rpc("rose_weights_decode", manifests, chunks, str(self.attempts))
        return self.rpc("rose_weights_load")

    def apply(self, new: dict[str, TensorBits]) -> dict[str, Any]:
        manifest = self.publish(new)
        self.stage(manifest.version)
        report: dict[str, Any] = self.rpc("rose_weights_commit")
        self.version, self.active = manifest.version, new
        self.llm.reset_prefix_cache()
        return report

    def start(self, tokens: int) -> str:
        from vllm import SamplingParams

        self.requests += 1
        name = f"request-{self.requests}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": [(5 * k) % VOCABULARY for k in range(40)]}
        self.llm.llm_engine.add_request(name, prompt, sampling)
        return name

    def finish(self) -> list[int]:
        for _ in range(1000):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    return list(output.outputs[0].token_ids)
        raise AssertionError("the request never finished")

    def greedy(self) -> list[int]:
        self.start(32)
        return self.finish()


def install_plugins(folder: Path) -> None:
    """Make vLLM discover the plugins that this tree declares, whichever tree was installed."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    info = folder / "rose_tree-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rose-tree\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in plugins.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))


@contextmanager
def served_model(root: Path, place: str | None = None, **options: Any) -> Iterator[ServedEngine]:
    """A tiny model in vLLM with these `options` of it; the checkpoint is shared at `place`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        install_plugins(root / "plugins")
        patch.syspath_prepend(root / "plugins")
        # Processes of the engine have the path from here.
        paths = [str(root / "plugins"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        save_tiny_model(root / "model", dtype="bfloat16")
        base = read_model_dir(root / "model")
        from vllm import LLM

        llm = LLM(
            model=str(root / "model"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            kv_cache_memory_bytes=67108864,
            max_model_len=512,
            worker_extension_cls="weight_transfer.vllm.worker.WeightWorker",
            **options,
        )
        store, key = ChunkStore(root / "store"), SigningKey.generate()
        publisher = VersionPublisher(store, job="test", trainer="test", key=key)
        served = ServedEngine(llm, publisher, store, root / "model", base, base)
        served.rpc("rose_weights_init", str(root / "model"), key.verify_key.hex, None, place)
        yield served
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, engine_starts: EngineStarts
) -> Iterator[ServedEngine]:
    engine_starts.note()
    executor = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    with served_model(
        tmp_path_factory.mktemp("weights"), distributed_executor_backend=executor
    ) as served:
        yield served


def flip(parameter: str, index: int, mask: int) -> Any:
    """Return a worker function that flips bits of one live weight."""

    def hook(worker: Any) -> None:
        import torch

        with torch.inference_mode():
            weight = dict(worker.model_runner.model.named_parameters())[parameter]
            weight.view(-1).view(torch.int16)[index] ^= mask

    return hook


def prove(worker: Any) -> tuple[bool, bool, float]:
    """Return True if live weights and values computed from them are the active version's."""
    from weight_transfer.apply.probe import compare, judge
    from weight_transfer.apply.reference import finish, reference_in_pieces

    weights = worker.rose_weights
    weights.settle()
    engine, tensors = weights.engine, weights.tensors
    pieces = reference_in_pieces(engine, tensors, None, (), weights.load_plan)
    probe = compare(engine.prober.logits(engine.model), finish(pieces).logits)
    found = judge(weights.audit().step(1 << 62), weights.digests, weights.elements)
    return not found.flipped, probe.ok, probe.max_abs_diff


def active_version(worker: Any) -> int:
    return int(worker.rose_weights.version)


def proofs_hold(report: dict[str, Any]) -> bool:
    return bool(report["digest_ok"] and report["probe_ok"] and not report["probe_max_abs_diff"])


def test_versions_activate_with_proofs_while_a_request_runs(served: ServedEngine) -> None:
    before = served.greedy()
    served.start(64)
    for _ in range(5):
        served.llm.llm_engine.step()
    sparse = sgd_like(served.active, seed=1, size=1e-5)
    manifest = served.publish(sparse)
    staged = served.stage(manifest.version)
    served.llm.llm_engine.step()
    report = served.rpc("rose_weights_commit")
    served.version, served.active = manifest.version, sparse
    assert len(served.finish()) == 64
    served.llm.reset_prefix_cache()
    assert proofs_hold(report), report
    assert report["version"] == 1 == served.run(active_version)
    assert os.environ["ROSE_POLICY_VERSION"] == "1", "a guest's page is told"
    assert 0 < report["changed_elements"] == staged["changed_elements"] == manifest.changed
    assert report["wire_bytes"] == manifest.wire_bytes

    assert proofs_hold(served.apply(sgd_like(served.active, seed=2, size=1e-4)))
    other_dir = served.model_dir.parent / "other"
    save_tiny_model(other_dir, dtype="bfloat16", seed=7)
    other = read_model_dir(other_dir)
    dense = served.apply(other)
    assert proofs_hold(dense)
    assert served.greedy() != before

    assert proofs_hold(served.apply(served.base))
    assert served.greedy() == before, "the first weights came back, so must their tokens"


def test_one_corrupted_live_weight_is_caught(served: ServedEngine) -> None:
    names = ("model.layers.1.mlp.gate_up_proj.weight", "model.layers.0.self_attn.qkv_proj.weight")
    for parameter in names:
        served.run(flip(parameter, index=1234, mask=0x4000))
        digest_ok, probe_ok, difference = served.run(prove)
        served.run(flip(parameter, index=1234, mask=0x4000))
        assert not digest_ok
        assert not probe_ok
        assert difference > 0
    assert served.run(prove) == (True, True, 0.0)


def test_a_stale_packed_copy_is_caught_by_the_probe_alone(served: ServedEngine) -> None:
    def pack(worker: Any) -> None:
        layer = worker.model_runner.model.lm_head
        copy = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, _weight, bias: served_linear(x, copy, bias)

    def unpack(worker: Any) -> None:
        worker.model_runner.model.lm_head.cpu_linear = served_linear

    from torch.nn.functional import linear as served_linear

    served.run(pack)
    report = served.apply(sgd_like(served.active, seed=3, size=1e-3))
    served.run(unpack)
    assert report["digest_ok"], "parameters are right: only the computation shows it"
    assert not report["probe_ok"]
    served.version, served.active = report["version"], served.base
    assert served.run(active_version) == report["version"] == 4, "went back"
    assert served.run(prove) == (True, True, 0.0)


def test_an_update_for_other_weights_is_refused(served: ServedEngine) -> None:
    served.publisher.publish(90, 89, served.active, sgd_like(served.active, seed=4, size=1e-4))
    with pytest.raises(WrongBaseError):
        served.stage(90)
    assert served.run(prove) == (True, True, 0.0)


def test_an_update_is_prepared_between_the_engines_steps(served: ServedEngine) -> None:
    moved = sgd_like(served.active, seed=8, size=1e-4)
    served.publisher.publish(88, 4, served.active, moved)
    served.publisher.publish(89, 88, moved, served.active)
    served.start(64)
    before = served.run(prove)
    manifests = [str(served.store.manifest_path(88))]
    chunks = str(served.store.chunks_dir)
    while not served.rpc("rose_weights_decode", manifests, chunks, "between steps")["done"]:
        served.llm.llm_engine.step()
    pieces = 0
    while not served.rpc("rose_weights_load", 1)["done"]:
        pieces += 1
        served.llm.llm_engine.step()
    assert pieces >= 5, "a piece for each layer at least"
    assert served.run(prove) == before == (True, True, 0.0), "nothing was written"
    report = served.rpc("rose_weights_commit")
    assert proofs_hold(report)
    assert report["loose"] == 0
    assert len(served.finish()) == 64
    served.stage(89)
    assert proofs_hold(served.rpc("rose_weights_commit"))
    assert os.environ["ROSE_POLICY_VERSION"] == "89"
    assert served.run(prove) == before
    served.version = 89


def test_a_fresh_load_has_one_layer_in_memory_at_a_time(served: ServedEngine) -> None:
    """Beside embeddings and head; what it computes is what a load of the whole model computes."""

    def measure(worker: Any) -> tuple[list[int], dict[str, int], bool]:
        import torch

        from weight_transfer.apply.reference import (
            LayeredModel,
            finish,
            overlay,
            reference_in_pieces,
        )

        weights = worker.rose_weights
        engine, tensors = weights.engine, weights.tensors
        layered = LayeredModel(engine, weights.load_plan, overlay(tensors), ())

        def held() -> int:
            return sum(t.nbytes for t in dict(layered.model.named_parameters()).values()
                       if not t.is_meta)  # fmt: skip

        pieces, peaks = layered.pieces(), []
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                logits = end.value
                break
            peaks.append(held())
        whole = finish(reference_in_pieces(engine, tensors, None, (), None)).logits
        sizes = {"layer": 0, "outside": 0}
        for name, tensor in engine.model.named_parameters():
            sizes["layer" if "layers.0." in name else "outside"] += (
                tensor.nbytes if "layers.0." in name or ".layers." not in name else 0
            )
        return peaks, sizes, torch.equal(logits, whole)

    peaks, sizes, equal = served.run(measure)
    assert equal
    assert sizes["layer"] > 0
    assert peaks[0] == sizes["outside"], "the layers have no weights yet"
    assert max(peaks) == sizes["outside"] + sizes["layer"]
    assert len(peaks) >= 5, "a piece for each layer"


def test_a_chain_and_then_a_base_come_into_force_at_once(served: ServedEngine) -> None:
    """A replica that lags gets several manifests, or all weights anew."""
    first, held = served.version + 2, served.version
    one, two, three = (sgd_like(served.base, seed=seed, size=1e-4) for seed in (11, 12, 13))
    served.publisher.publish(first, held, served.active, one)
    served.publisher.publish(first + 1, first, one, two)
    served.publisher.publish_base(first + 2, three)
    chain = [str(served.store.manifest_path(version)) for version in (first, first + 1)]
    base = [str(served.store.manifest_path(first + 2, base=True))]
    for manifests, version in ((chain, first + 1), (base, first + 2)):
        served.load(manifests)
        report = served.rpc("rose_weights_commit")
        assert proofs_hold(report), report
        assert report["version"] == version == served.run(active_version)
    served.version, served.active = first + 2, three


def test_another_jobs_weights_come_into_force_through_a_base_only(
    served: ServedEngine, tmp_path: Path
) -> None:
    """A replica that another job leased gets versions below its own, and back again."""
    store = ChunkStore(tmp_path)
    other = VersionPublisher(store, "other", "test", served.publisher._key)
    theirs = sgd_like(served.base, seed=21, size=1e-3)
    other.publish_base(0, served.base)
    other.publish(1, 0, served.base, theirs)
    base, first = (str(store.manifest_path(v, base=not v)) for v in (0, 1))
    chunks, own = str(store.chunks_dir), served.run(active_version)
    served.start(20)
    before = served.finish()
    served.start(20)
    assert served.finish() == before
    with pytest.raises(WrongBaseError, match="rebase"):
        served.load([first], chunks)
    assert served.run(active_version) == own
    assert served.load([base, first], chunks)["job"] == "other"
    report = served.rpc("rose_weights_commit")
    assert proofs_hold(report), report
    assert report["version"] == 1 == served.run(active_version)
    served.llm.reset_prefix_cache()
    served.start(20)
    assert served.finish() != before
    # Back: its first job's base has a version of its own, whatever the other one's number is.
    served.publisher.publish_base(served.version, served.active)
    served.load([str(served.store.manifest_path(served.version, base=True))])
    report = served.rpc("rose_weights_commit")
    assert proofs_hold(report), report
    served.llm.reset_prefix_cache()
    assert served.run(active_version) == own
    served.start(20)
    assert served.finish() == before


def test_faulty_workers_claim_what_is_not_there(served: ServedEngine) -> None:
    """The demo's controls: by an engine's own report nobody can tell."""

    def becomes(kind: str) -> Any:
        def hook(worker: Any) -> None:
            from bench.demo import faulty_worker

            worker.rose_weights.__class__ = getattr(faulty_worker, kind)

        return hook

    moved = sgd_like(served.active, seed=5, size=1e-3)
    stale, wrong = served.version + 1, served.version + 2
    for version in (stale, wrong):
        served.publisher.publish(version, served.version, served.active, moved)

    served.run(becomes("StaleWeights"))
    served.stage(stale)
    assert proofs_hold(served.rpc("rose_weights_commit"))
    assert served.run(active_version) == stale
    assert served.run(prove) == (True, True, 0.0), "the weights are the ones from before"

    served.run(becomes("PermutedWeights"))
    served.stage(wrong)
    assert proofs_hold(served.rpc("rose_weights_commit"))
    assert served.run(active_version) == wrong
    digest_ok, probe_ok, _ = served.run(prove)
    assert not digest_ok
    assert not probe_ok
