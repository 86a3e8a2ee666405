"""`rose init`: the files that start ROSE on a machine."""

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from rose.addresses import DefaultPort, free_port
from rose.cli.machine import init
from rose.cli.main import main
from rose.engines import EngineKind
from rose.main.scheduler import settings_of
from rose.node.config import NodeConfig
from tests.fakes.cuda.nvml import card
from weight_transfer import SigningKey

ROOT = Path(__file__).parents[3]
VLLM = ("vllm.entrypoints.openai.api_server", "--model")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model, on a machine without servers and without a GPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "policy" / name).write_text('{"max_position_embeddings": 256}')
    monkeypatch.setattr(init, "servers", list)
    monkeypatch.setattr(init, "cards", tuple)


def rose_init(*words: str) -> int:
    return main(["init", "--policy", "policy", *words])


@contextmanager
def stand_in_server(words: Sequence[str], environment: dict[str, str]) -> Iterator[int]:
    """A process called vllm that sleeps, with these words behind it; yields its id."""
    script = Path("vllm").absolute()
    script.write_text("import sys; print(flush=True); sys.stdin.read()")
    argv = [sys.executable, str(script), *words]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.communicate()


def test_what_it_writes_starts_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rose_init("--host-model", "org/model") == 0
    folder = tmp_path / "run"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "a command line may have secrets"
    config = NodeConfig.load(folder / "node.json")
    key = SigningKey.load(folder / init.KEY)
    [guest] = config.replicas
    assert config.verify_key == key.verify_key.hex
    assert (guest.model_dir, guest.gpus) == (tmp_path / "policy", ())
    assert guest.max_model_len == 256, "the model is made for no more"
    assert config.host is not None
    assert f"export ROSE_CONTROL_PAGE={config.host.page}\n" in (folder / "host.sh").read_text()
    assert "--model org/model" in (folder / "host.sh").read_text()
    assert "--harvest" not in (folder / "gateway.sh").read_text(), "nothing is lent by itself"
    said = capsys.readouterr().out
    for command in ("run/host.sh", "run/gateway.sh", "rose node --config run/node.json"):
        assert f"  {command}\n" in said


def test_default_ports_of_all_processes_differ() -> None:
    values = yaml.safe_load((ROOT / "helm/rose/values.yaml").read_text())
    chart = [
        port
        for part in (values[name] for name in ("scheduler", "gateway", "relay", "node"))
        for key, port in [*part.items(), *part.get("alerts", {}).items()]
        if key.lower().endswith("port")
    ]
    scheduler = settings_of(["--store", "s", "--log-dir", "l"])
    own = [scheduler.port, int(scheduler.alerts_address.rpartition(":")[2])]
    for ports in (chart, own, list(init.PORTS.values())):
        assert sorted(map(DefaultPort, ports)) == sorted(set(ports))
    assert len(chart) == 9


def test_ports_that_are_taken_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = free_port()
    monkeypatch.setitem(init.PORTS, "scheduler", taken)
    with socket.create_server(("127.0.0.1", taken)):
        assert rose_init("--host-model", "m") == 0
    scheduler = json.loads((tmp_path / "run/node.json").read_text())["scheduler"]
    assert scheduler != f"127.0.0.1:{taken}"
    assert f"  --port {scheduler.rpartition(':')[2]} \\\n" in (
        (tmp_path / "run/gateway.sh").read_text()
    )
    said = capsys.readouterr().out
    assert f"rose policy set --create everywhere mode=Active --scheduler {scheduler}" in said


@pytest.mark.parametrize(
    ("words", "environment", "engine", "devices"),
    [
        (VLLM, {"CUDA_VISIBLE_DEVICES": "3"}, EngineKind.VLLM, "3"),
        (("serve", "./policy"), {}, EngineKind.VLLM, ""),
        (("sglang.launch_server", "--model-path"), {}, EngineKind.SGLANG, ""),
        (VLLM, {"ROSE_ROLE": "guest"}, None, ""),
        (("bench",), {}, None, ""),
    ],
)
def test_a_server_is_known_by_its_command_line(
    words: Sequence[str], environment: dict[str, str], engine: EngineKind | None, devices: str
) -> None:
    with stand_in_server(words, environment) as pid:
        found = init.Server.of(psutil.Process(pid))
    assert (found and found.engine) == engine
    if found:
        assert found.devices == devices
        there = [str(Path(word).absolute()) if "/" in word else word for word in words]
        assert list(found.words[2:]) == there


def test_the_host_is_the_server_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("python", "-m", *VLLM, "big model", "--port", "8000", "-tp", "1")
    server = init.Server(7, EngineKind.VLLM, words, "1")
    monkeypatch.setattr(init, "servers", lambda: [server])
    monkeypatch.setattr(init, "cards", lambda: (card(index=0), card(index=1)))
    assert rose_init("over there") == 0
    script = (tmp_path / "over there/host.sh").read_text()
    assert (
        "exec python -m vllm.entrypoints.openai.api_server \\\n  --model 'big model' \\\n" in script
    )
    assert "CUDA_VISIBLE_DEVICES=1\n" in script
    assert f"mkdir -p '{tmp_path}/over there/logs'\n" in (
        (tmp_path / "over there/gateway.sh").read_text()
    )
    assert NodeConfig.load(tmp_path / "over there/node.json").replicas[0].gpus == (1,)


@pytest.mark.parametrize(
    ("server", "words", "heads", "host", "guest"),
    [
        # A server's GPUs: as many of those that it sees as it has ranks.
        (("-tp", "2"), [], 32, (0, 1), (0, 1)),
        (
            ("--tensor-parallel-size=2", "--data-parallel-size", "2"),
            [],
            32,
            (0, 1, 2, 3),
            (0, 1, 2, 3),
        ),
        (("-tp", "2", "CUDA 3,1,0"), [], 32, (3, 1), (3, 1)),
        (("CUDA 1,2",), [], 32, (1,), (1,)),
        # A guest of fewer ranks, where more would not share its heads.
        (("-tp", "4"), [], 6, (0, 1, 2, 3), (0, 1, 2)),
        (("-tp", "2"), [], 7, (0, 1), (0,)),
        (None, ["--host-model", "m", "--gpu", "2,3"], 32, (2, 3), (2, 3)),
        (None, ["--host-model", "m", "--gpu", "2"], 32, (2,), (2,)),
    ],
)
def test_a_host_of_several_gpus_shares_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: tuple[str, ...] | None,
    words: list[str],
    heads: int,
    host: tuple[int, ...],
    guest: tuple[int, ...],
) -> None:
    if server is not None:
        *_, seen = ("", *(word.removeprefix("CUDA ") for word in server if "CUDA" in word))
        line = ("vllm", "serve", "m", *(word for word in server if "CUDA" not in word))
        monkeypatch.setattr(init, "servers", lambda: [init.Server(7, EngineKind.VLLM, line, seen)])
    monkeypatch.setattr(init, "cards", lambda: tuple(card(index=index) for index in range(4)))
    (tmp_path / "policy/config.json").write_text(json.dumps({"num_attention_heads": heads}))
    assert rose_init(*words) == 0
    config = NodeConfig.load(tmp_path / "run/node.json")
    assert config.host is not None
    assert (config.host.gpus, config.replicas[0].gpus) == (host, guest)
    script = (tmp_path / "run/host.sh").read_text()
    assert f"CUDA_VISIBLE_DEVICES={','.join(map(str, host))}\n" in script
    assert ("--tensor-parallel-size 2" in script) == (words[-1:] == ["2,3"])


SERVER = init.Server(7, EngineKind.VLLM, ("vllm", "serve", "m"), "0,1")


@pytest.mark.parametrize(
    ("servers", "words", "error"),
    [
        ([], [], "no vLLM or SGLang server of yours runs here; name the model of one to start by"),
        ([SERVER] * 2, [], "2 servers of yours run here (process 7, process 7); name the model"),
        ([SERVER], ["--gpu", "0,1"], "the NVIDIA driver sees no GPU; run on a machine with one"),
        ([], ["--host-model", "m", "policy"], "policy is not empty; name another folder, or"),
        ([], ["--host-model", "m", "--policy", "no"], "no has no config.json; give a folder in"),
        ([], ["--host-model", "m", "--gpu", "1"], "the NVIDIA driver sees no GPU; run on a"),
    ],
)
def test_what_is_missing_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    servers: list[init.Server],
    words: list[str],
    error: str,
) -> None:
    monkeypatch.setattr(init, "servers", lambda: servers)
    assert rose_init(*words) == 2
    assert capsys.readouterr().err.startswith(f"rose: {error}")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
