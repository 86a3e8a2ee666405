"""What an engine is told: another interpreter, a GPU, a model without weights."""

import importlib.metadata
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from rose.engines import Device, EngineRole, EngineSpec, check_spec, module_path, process_spec
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
