"""A wrong node file is refused in one line that names what is wrong."""

import json
from pathlib import Path

import pytest

from rose.engines import process_spec
from rose.errors import ConfigError
from rose.node.config import HostConfig, NodeConfig
from rose.node.proxy_process import proxied_ports
from slo import StepProfile
from weight_transfer import SigningKey

VERIFY_KEY = SigningKey.generate().verify_key.hex
REPLICA = {"id": "guest", "kind": "guest", "model_dir": "m", "port": 9000}
NODE = {"node": "n", "scheduler": "127.0.0.1:1", "run_dir": "r", "log_dir": "l", "unsigned": True}


def _load(tmp_path: Path, config: object) -> NodeConfig:
    path = tmp_path / "node.json"
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    return NodeConfig.load(path)


HOST = {"host": {"page": "p"}}
FOUND = {"folder": "/run/rose", "page_group": "10777"}
DEDICATED = REPLICA | {"id": "d", "kind": "dedicated", "port": 9_100}
ON_GPU = DEDICATED | {"device": 0}
ROOMS = {"discover": FOUND, "replicas": [REPLICA]}


def fields(replica: dict[str, object], **changes: object) -> dict[str, object]:
    return {"replicas": [replica | changes]}


WRONG = [
    # Weights are signed unless the file says that they are not.
    ({"unsigned": False}, '"unsigned": true'),
    ({"verify_key": VERIFY_KEY}, "leave one"),
    ({"unsigned": False, "verify_key": "0" * 63}, "verify_key"),
    ({"relay": {"host": "a..b", "port": 1}}, "relay.host"),
    ({"node": ""}, "node"),
    ({"surprise": 1}, "surprise"),
    # Replicas.
    (fields(REPLICA, port=0), "port"),
    (fields(REPLICA, kind="lodger"), "kind"),
    (fields(REPLICA, kv_backend="gpu"), "kv_backend"),
    (fields(REPLICA, extra_env={"ROSE_VERIFY_KEY": "0" * 64}), "ROSE_VERIFY_KEY"),
    (fields(REPLICA, extra_env={"ROSE_UNSIGNED": "1"}), "ROSE_UNSIGNED"),
    (fields(REPLICA, engine="tgi"), "engine"),
    *(
        (fields(REPLICA, engine=engine, engine_args=[word]), f"engine_args: {said}")
        for engine, word, said in (
            ("vllm", "--port=1", "--port is the node's to set; leave out --port"),
            ("vllm", "--worker_cls=mine", "--worker-cls is the node's to set; leave out --worker"),
            ("vllm", "--tensor-par=2", "the node has tensor_parallel for --tensor-parallel-size; "),
            (
                "vllm",
                "--speculative-config.model=d",
                "a replica does not have drafts of method 'none'",
            ),
            ("vllm", "-tp=2", "-tp is an abbreviation; give the option's long name"),
            ("sglang", "--max-total-tokens=9", "--max-total-tokens is the node's to set; leave"),
            ("sglang", "--dp-size=2", "the node has data_parallel for --dp-size; leave out --dp"),
            (
                "vllm",
                "--enable-lora",
                "the node has lora for --enable-lora; leave out --enable-lora",
            ),
            ("vllm", "--pipeline_par=2", "a replica does not have pipeline stages"),
            ("sglang", "--pp-size=2", "a replica does not have pipeline stages"),
        )
    ),
    (
        fields(REPLICA, engine="sglang", runner="pooling"),
        "runner: sglang does not have it that a replica serves a model that is not generative",
    ),
    (
        fields(REPLICA, engine="sglang", sleep_mode=True, kind="dedicated", device=0),
        "leave sleep_mode out, or run this replica on another engine",
    ),
    (
        fields(REPLICA, engine="sglang", lora={}),
        "lora: sglang does not have it that a replica serves LoRA adapters as versions",
    ),
    (fields(REPLICA, lora={"max_rank": 12}), "max_rank"),
    (fields(REPLICA, lora={"max_adapters": 1}), "max_adapters"),
    (fields(REPLICA, lora={"max_adapters": 2, "jobs": 2}), "max_adapters 2: the newest"),
    (
        fields(REPLICA, lora={"max_adapters": 3, "jobs": 2}, kind="guest"),
        "lora.jobs: several jobs share a dedicated replica",
    ),
    (fields(DEDICATED, step_profile="p"), "has no gate"),
    # GPUs.
    *((fields(ON_GPU, device=device), "device") for device in (-1, "0", True, "MIG-1")),
    (fields(DEDICATED, mps_priority="low"), "need a GPU; name it in `device`"),
    (fields(DEDICATED, extra_env={"VLLM_BATCH_INVARIANT": "1"}), "no engine has such kernels"),
    (fields(DEDICATED, mps_thread_percentage=50), "need a GPU"),
    (fields(DEDICATED, kv_backend="cuda"), "kv_backend cuda is for a GPU"),
    (fields(ON_GPU, mps_priority="high"), "mps_priority"),
    (fields(ON_GPU, mps_thread_percentage=0), "mps_thread_percentage"),
    (fields(ON_GPU, mps_thread_percentage=101), "mps_thread_percentage"),
    # Groups of GPUs.
    ({"fanout": {"rank": 2, "size": 2}}, "rank 2 is none of 0 to 1"),
    ({"fanout": {"rank": 0, "size": 2}}, "needs a relay"),
    ({"fanout": {"rank": 1, "size": 2}}, "leader is missing"),
    ({"fanout": {"rank": 0, "size": 1}}, "fanout.size"),
    # Hosts.
    (fields(REPLICA), "needs a host"),
    (
        HOST | {"replicas": [REPLICA, REPLICA | {"id": "other", "port": 9001}]},
        "guest and other would share one host",
    ),
    (ROOMS | HOST, "leave one of them out"),
    (ROOMS | fields(REPLICA, port=65_530), "beyond 65535"),
    (ROOMS | fields(REPLICA, port=65_535) | {"discover": FOUND | {"at_most": 2}}, "beyond 65535"),
    (ROOMS | {"replicas": [REPLICA, DEDICATED | {"port": 9_007}]}, "d has port 9007"),
    (ROOMS | {"metrics_port": 9_001}, "metrics_port has port 9001"),
    (ROOMS | {"replicas": [REPLICA, REPLICA | {"id": "b"}]}, "would share one host"),
    (ROOMS | {"discover": {}}, "discover.folder"),
    (ROOMS | {"discover": "x"}, "discover"),
    # Certificates of what other machines reach.
    *(
        ({"metrics_port": 1, "metrics_host": host}, "metrics_insecure")
        for host in ("0.0.0.0", "", "10.0.0.1", "node-0")
    ),
    ({"proxy": {"host": "fd00::1", "port": 7_410}}, '"insecure": true'),
    ({"proxy": {"host": "a..b", "port": 7_410, "insecure": True}}, r"proxy\.host"),
    (ROOMS | {"proxy": {"host": "127.0.0.1", "port": 9_003}}, "proxy has port 9003"),
    # No JSON object at all.
    ("{", "no JSON"),
    (None, "cannot be read"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_file_is_refused_in_a_line_that_names_what_is_wrong(
    tmp_path: Path, change: dict[str, object] | str | None, said: str
) -> None:
    whole = NODE | {"replicas": []} | change if isinstance(change, dict) else change
    with pytest.raises(ConfigError, match=said) as caught:
        _load(tmp_path, whole)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"verify_key": VERIFY_KEY, "unsigned": False}, {"ROSE_VERIFY_KEY": VERIFY_KEY}),
        ({"unsigned": True}, {"ROSE_UNSIGNED": "1"}),
    ],
)
def test_an_engine_is_told_whose_weights_it_takes(
    tmp_path: Path, keys: dict[str, object], told: dict[str, str]
) -> None:
    node = _load(tmp_path, NODE | fields(DEDICATED) | keys)
    assert node.kill_file == Path("r/KILL")
    env = process_spec(node.replicas[0].engine_spec(node)).env
    found = {name: env[name] for name in ("ROSE_VERIFY_KEY", "ROSE_UNSIGNED") if name in env}
    assert found == told


@pytest.mark.parametrize("backend", ["auto", "madvise", "cuda"])
def test_only_a_guest_on_a_gpu_gets_the_worker_that_reserves_memory(
    tmp_path: Path, backend: str
) -> None:
    replica = REPLICA | {"kv_backend": backend} | ({"device": 0} if backend == "cuda" else {})
    config = _load(tmp_path, NODE | {"replicas": [replica], "host": {"page": "page"}})
    (guest,) = config.replicas
    process = process_spec(guest.engine_spec(config))
    assert process.env["ROSE_KV_BACKEND"] == backend
    worker = "--worker-cls=executor.vllm.reserved_worker.ReservedKvWorker"
    assert (worker in process.argv) == (backend == "cuda")


@pytest.mark.parametrize(("runner", "interval"), [("generate", 4), ("pooling", 1)])
def test_tokens_come_together_only_where_there_are_any(
    tmp_path: Path, runner: str, interval: int
) -> None:
    # vLLM ends with the first score of a model that is not generative, were it told otherwise.
    replica = REPLICA | {"kind": "dedicated", "runner": runner, "stream_interval": 4}
    node = _load(tmp_path, NODE | {"replicas": [replica]})
    process = process_spec(node.replicas[0].engine_spec(node))
    assert f"--stream-interval={interval}" in process.argv


def test_a_guest_is_started_with_its_own_profile_and_its_hosts(tmp_path: Path) -> None:
    own, hosts = tmp_path / "guest.json", tmp_path / "host.json"
    for path in (own, hosts):
        path.write_text(StepProfile(0.004, 1e-5).to_json())
    host = {"page": "page", "step_profile": str(hosts)}
    replicas = [
        REPLICA | {"step_profile": str(own)},
        REPLICA | {"id": "d", "kind": "dedicated"},
    ]
    config = _load(tmp_path, NODE | {"host": host, "replicas": replicas})
    guest, dedicated = (r.engine_spec(config) for r in config.replicas)
    assert (guest.step_profile, guest.host_step_profile) == (own, hosts)
    assert process_spec(guest).env["ROSE_STEP_PROFILE"] == str(own)
    assert process_spec(guest).env["ROSE_HOST_STEP_PROFILE"] == str(hosts)
    assert (dedicated.step_profile, dedicated.host_step_profile) == (None, None)
    assert dedicated.control_page is None


@pytest.mark.parametrize("where", ["host", "guest"])
@pytest.mark.parametrize(
    ("text", "says"), [(None, "cannot be read"), ("{}", "profile the replica")]
)
def test_a_profile_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, where: str, text: str | None, says: str
) -> None:
    profile = tmp_path / "profile.json"
    if text is not None:
        profile.write_text(text)
    named = {"step_profile": str(profile)}
    host = {"page": "page"} | (named if where == "host" else {})
    replica = REPLICA | (named if where == "guest" else {})
    with pytest.raises(ConfigError, match=says) as error:
        _load(tmp_path, NODE | {"host": host, "replicas": [replica]})
    assert str(profile) in str(error.value)
    assert "\n" not in str(error.value)


def test_each_host_that_is_found_has_the_guest_of_the_file_under_a_number(tmp_path: Path) -> None:
    replicas = [REPLICA | {"device": "host"}, DEDICATED]
    config = _load(tmp_path, NODE | {"discover": FOUND, "replicas": replicas})
    host = HostConfig(page=Path("a.page"), name="a", device="GPU-0a")
    beside = config.with_host(host, 3)
    (guest,) = beside.replicas
    assert (guest.id, guest.port, guest.gpus) == ("guest-3", 9_003, ("GPU-0a",))
    assert (beside.host, beside.discover) == (host, None)
    assert [each.id for each in config.with_host(None).replicas] == ["d"]
    with pytest.raises(ConfigError, match="guest: its host names no GPU that it could share"):
        config.with_host(host.model_copy(update={"device": None}), 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["--dtype=bfloat16", "--block-size=32"]),
        ({"block_size": 16, "dtype": "float16"}, ["--dtype=float16", "--block-size=16"]),
        (
            {"engine_args": ["--trust-remote-code", "--hf-overrides", "{}"]},
            ["--hf-overrides", "{}"],
        ),
    ],
)
def test_a_replica_is_started_as_its_file_says(
    tmp_path: Path, given: dict[str, object], words: list[str]
) -> None:
    config = _load(tmp_path, NODE | fields(DEDICATED, **given))
    argv = process_spec(config.replicas[0].engine_spec(config)).argv
    assert set(words) <= set(argv)


def test_a_guest_is_on_the_gpu_of_the_host_that_the_file_names(tmp_path: Path) -> None:
    said = {"host": {"page": "p", "device": 1}, "replicas": [DEDICATED, REPLICA]}
    said["replicas"][1] |= {"device": "host"}  # type: ignore[index]
    config = _load(tmp_path, NODE | said)
    assert [(each.id, each.gpus) for each in config.replicas] == [("d", ()), ("guest", (1,))]


def test_the_command_line_names_a_folder_in_place_of_any_host(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    said = {"host": {"page": "p"}, "replicas": [REPLICA], "discover": {"at_most": 2}}
    path.write_text(json.dumps(NODE | said))
    config = NodeConfig.load(path, Path("/run/rose"))
    assert config.host is None
    assert config.discover
    assert (config.discover.folder, config.discover.at_most) == (Path("/run/rose"), 2)


@pytest.mark.parametrize(
    ("proxy", "offered"),
    [
        ({}, "http://127.0.0.1:9100"),
        (
            {"proxy": {"host": "fd00::1", "port": 7_410, "insecure": True}},
            "http://[fd00::1]:7410/d%200%2F1",
        ),
    ],
)
def test_turns_of_other_machines_come_by_the_proxy_or_not_at_all(
    tmp_path: Path, proxy: dict[str, object], offered: str
) -> None:
    config = _load(tmp_path, NODE | fields(DEDICATED, id="d 0/1") | proxy)
    assert [config.offered_url(replica) for replica in config.replicas] == [offered]


def test_the_proxy_knows_the_guests_of_hosts_that_are_still_to_come(tmp_path: Path) -> None:
    proxy = {"host": "127.0.0.1", "port": 7_410}
    said = NODE | {"discover": FOUND, "replicas": [REPLICA, DEDICATED], "proxy": proxy}
    ports = proxied_ports(_load(tmp_path, said))
    assert ports == {"d": 9_100} | {f"guest-{slot}": 9_000 + slot for slot in range(8)}


def test_metrics_for_the_network_are_served_at_the_operators_word(tmp_path: Path) -> None:
    said = NODE | {"replicas": [], "metrics_port": 1, "metrics_host": "0.0.0.0"}
    assert _load(tmp_path, said | {"metrics_insecure": True}).metrics_host == "0.0.0.0"
    assert _load(tmp_path, said | {"metrics_host": "::1"}).metrics_port == 1
