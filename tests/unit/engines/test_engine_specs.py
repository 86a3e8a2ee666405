"""Command lines of engines: another interpreter, a GPU, a model without weights."""

import importlib.metadata
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from rose.engines import (
    Device,
    EngineKind,
    EngineRole,
    EngineSpec,
    check_spec,
    launch,
    module_path,
    process_spec,
)
from rose.engines.spec import LACKS, Capability, lacking
from rose.errors import ConfigError, EngineStartError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return EngineSpec(
        "guest", EngineRole.GUEST, tmp_path, 0, tmp_path / "log", control_page=tmp_path / "page"
    )


def interpreter(folder: Path, *options: str) -> Path:
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(options)} "$@"\n')
    script.chmod(0o755)
    return script


def test_an_engine_on_a_gpu_is_told_nothing_of_cores_and_may_capture_graphs(
    spec: EngineSpec,
) -> None:
    on_cpu = process_spec(spec)
    assert on_cpu.env["OMP_NUM_THREADS"] == "1"
    assert "--enforce-eager" in on_cpu.argv
    on_gpu = process_spec(
        replace(
            spec, device=Device.CUDA, enforce_eager=False, kv_backend="cuda", load_format="dummy"
        )
    )
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"} & set(on_gpu.env)
    assert "--enforce-eager" not in on_gpu.argv
    assert "--load-format=dummy" in on_gpu.argv
    assert "--gpu-memory-utilization=0.01" in on_gpu.argv, "a guest starts beside its host"
    assert not any("gpu-memory" in argument for argument in on_cpu.argv)
    assert "--worker-cls=executor.vllm.reserved_worker.ReservedKvWorker" in on_gpu.argv
    host = replace(spec, role=EngineRole.HOST, device=Device.CUDA)
    assert not any("worker-cls" in argument for argument in process_spec(host).argv)
    assert any("reserved_worker" in a for a in process_spec(replace(host, kv_backend="cuda")).argv)


def test_a_model_needs_weights_unless_they_are_made_up(spec: EngineSpec) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        check_spec(spec)
    check_spec(replace(spec, load_format="dummy"))


def test_what_lies_on_a_gpu_is_no_memory_of_this_machine(spec: EngineSpec) -> None:
    large = replace(spec, load_format="dummy", kv_bytes=1 << 50)
    with pytest.raises(EngineStartError, match="processes, weights and KV"):
        check_spec(large)
    check_spec(replace(large, device=Device.CUDA))


def test_another_interpreter_runs_the_engine(spec: EngineSpec, tmp_path: Path) -> None:
    other = replace(spec, python=interpreter(tmp_path), load_format="dummy")
    check_spec(other)
    assert process_spec(other).argv[0] == str(tmp_path / "python")
    assert process_spec(spec).argv[0] == sys.executable


def test_an_interpreter_without_vllm_is_refused_before_it_starts(
    spec: EngineSpec, tmp_path: Path
) -> None:
    without = replace(spec, python=interpreter(tmp_path, "-S"))
    with pytest.raises(ConfigError, match=r"guest: \S+python has no vllm; install it there"):
        check_spec(without)
    with pytest.raises(ConfigError, match=r"guest: \S+nowhere does not run"):
        check_spec(replace(spec, python=tmp_path / "nowhere"))


def test_a_source_tree_is_a_distribution_with_plugins(tmp_path: Path) -> None:
    root, folder = module_path(tmp_path / "metadata").split(":")
    assert root == str(ROOT)
    found = importlib.metadata.distributions(name="rose-rollout", path=[folder])
    points = {(p.group, p.name, p.value) for d in found for p in d.entry_points}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {
        (group, name, value)
        for group, named in project["entry-points"].items()
        for name, value in named.items()
    }
    assert points == asked
    assert (
        "vllm.stat_logger_plugins",
        "rose_host",
        "executor.vllm.host.latency_logger:HostLatencyLogger",
    ) in (points)


def test_an_installed_rose_says_how_another_interpreter_gets_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install"):
        module_path(tmp_path / "metadata", root=tmp_path)


CONFIG = """{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
"hidden_size": 128}"""


@pytest.fixture
def sglang(spec: EngineSpec, tmp_path: Path) -> EngineSpec:
    (tmp_path / "config.json").write_text(CONFIG)
    return replace(
        spec,
        engine=EngineKind.SGLANG,
        role=EngineRole.HOST,
        python=interpreter(tmp_path),
        load_format="dummy",
        dtype="float32",
        kv_bytes=3 << 20,
    )


def test_sizes_mean_the_same_on_sglang(sglang: EngineSpec) -> None:
    process = process_spec(replace(sglang, max_num_seqs=7, max_model_len=99))
    assert process.argv[1:3] == ("-m", "sglang.launch_server")
    # Keys and values of 3 layers with 2 heads of 32 floats.
    tokens = (3 << 20) // (2 * 3 * 2 * 32 * 4)
    assert f"--max-total-tokens={tokens}" in process.argv
    assert {"--max-running-requests=7", "--context-length=99"} <= set(process.argv)
    assert (process.env["SGLANG_PLUGINS"], process.env["ROSE_ROLE"]) == ("rose_host", "host")
    stock = process_spec(replace(sglang, role=EngineRole.STOCK))
    assert stock.env["SGLANG_PLUGINS"] == "none"


def test_a_token_of_latent_attention_has_one_latent_on_every_rank(
    sglang: EngineSpec, tmp_path: Path
) -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIG) | latent))
    for ranks in (1, 2):
        process = process_spec(replace(sglang, tensor_parallel=ranks))
        assert f"--max-total-tokens={(3 << 20) // (3 * (512 + 64) * 4)}" in process.argv


def test_a_model_whose_kv_has_another_shape_is_refused(sglang: EngineSpec, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    with pytest.raises(ConfigError, match="does not say how large a token's KV is"):
        process_spec(sglang)


@pytest.mark.parametrize(
    ("role", "option", "meaning"),
    [
        (EngineRole.HOST, "--speculative-algorithm=EAGLE", "speculative decoding"),
        (EngineRole.HOST, "--disaggregation-mode=prefill", "disaggregated prefill and decode"),
        (EngineRole.GUEST, "--enable-custom-logit-processor", "custom samplers"),
    ],
)
def test_what_breaks_a_promise_on_sglang_is_refused_before_it_starts(
    sglang: EngineSpec, role: EngineRole, option: str, meaning: str
) -> None:
    """In one line, with what to change."""
    named = replace(sglang, role=role, extra_args=(option,), python=None)
    with pytest.raises(ConfigError, match="make install-sglang"):
        check_spec(named)
    looked = replace(named, python=sglang.python)
    with pytest.raises(ConfigError, match=r"has no sglang"):
        check_spec(looked)
    with pytest.raises(ConfigError, match=f"does not have {meaning}; leave out {option[:9]}"):
        launch.check_options(looked)


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["--speculative-config={}"], "none"),
        (["--speculative-config", "no JSON"], "none"),
        (["--speculative-config=[]"], "none"),
        (["--speculative_config.num_speculative_tokens=3"], "none"),
        (['--speculative-config={"method": "eagle3", "model": "head"}'], "eagle3"),
        (["--speculative_config.method", "medusa"], "medusa"),
        (["--speculative-config.method=ngram_gpu"], "ngram_gpu"),
    ],
)
def test_drafts_whose_weights_no_update_reaches_are_refused_before_they_start(
    sglang: EngineSpec, words: list[str], method: str
) -> None:
    """A host may have what a replica may not."""
    named = replace(sglang, engine=EngineKind.VLLM, extra_args=(*words,))
    launch.check_options(replace(named, role=EngineRole.HOST))
    said = (
        f"on vLLM does not have drafts of method '{method}', but of ngram, suffix, mtp, eagle;"
        " leave out"
    )
    for role in (EngineRole.GUEST, EngineRole.DEDICATED):
        with pytest.raises(ConfigError, match=said):
            launch.check_options(replace(named, role=role))


@pytest.mark.parametrize("option", ["-sc={}", "--spec-method=ngram"])
def test_drafts_have_one_option(sglang: EngineSpec, option: str) -> None:
    named = replace(sglang, engine=EngineKind.VLLM, role=EngineRole.GUEST, extra_args=(option,))
    with pytest.raises(ConfigError, match="does not have drafts outside of --speculative-config"):
        launch.check_options(named)


@pytest.mark.parametrize(
    "words",
    [
        ['--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'],
        ["--speculative_config.num_speculative_tokens=3", "--speculative_config.method=suffix"],
    ],
)
def test_drafts_without_weights_have_a_scheduler_of_their_own(
    sglang: EngineSpec, words: list[str]
) -> None:
    launch.check_replica_args(EngineKind.VLLM, words)
    named = replace(sglang, engine=EngineKind.VLLM, extra_args=(*words,))
    schedulers = {
        EngineRole.GUEST: "executor.vllm.guest.scheduler.GatedScheduler",
        EngineRole.DEDICATED: "executor.vllm.drafts.DraftScheduler",
    }
    for role, scheduler in schedulers.items():
        launch.check_options(replace(named, role=role))
        assert f"--scheduler-cls={scheduler}" in process_spec(replace(named, role=role)).argv
    undrafted = process_spec(replace(named, role=EngineRole.DEDICATED, extra_args=()))
    assert not any(word.startswith("--scheduler-cls") for word in undrafted.argv)


def test_what_an_engine_lacks_has_a_reason() -> None:
    for kind in EngineKind:
        assert all(LACKS[kind].values())
    assert lacking(EngineKind.VLLM, Capability.LEND_GPU) is None
    assert lacking(EngineKind.SGLANG, Capability.POOLING)
