"""TRL's calls of a vLLM server, made to a gateway: bounded, named, by fresh policies.

TRL itself is a stand-in here; `tests/trainers` has the real one.
"""

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.integrations import PolicyPublisher, TrainerSettings, tested
from tests.harness.policies import trainer_settings

WITHOUT_VLLM = "is_vllm_available"


class TheirClient:
    """TRL's, as far as it is inherited."""

    def generate(self, prompts: Any, features: Any = None, **options: Any) -> Any:
        if features is not None:
            asked = {"n": 2, "logprobs": 1, **options["generation_kwargs"]}
            return self._generate_from_features(prompts, features, asked)  # type: ignore[attr-defined]
        asked = {"prompt": prompts, **options["generation_kwargs"]}
        return self._post(f"{self.base_url}/v1/completions", json=asked)  # type: ignore[attr-defined]


@pytest.fixture
def generation() -> ModuleType:
    """TRL's module that builds the client."""
    made = ModuleType("trl.generation.vllm_generation")
    kind = type("VLLMGeneration", (), {})
    vars(made).update(
        {"VLLMClient": TheirClient, "VLLMGeneration": kind, WITHOUT_VLLM: lambda: False}
    )
    return made


@pytest.fixture
def plugin(generation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`rose.integrations.trl` beside a TRL that is none."""
    package, client = ModuleType("trl.generation"), ModuleType("trl.generation.vllm_client")
    transformers, worker = ModuleType("transformers"), ModuleType("async_rollout_worker")
    vars(package)["vllm_generation"] = generation
    vars(client).update(VLLMClient=TheirClient, pil_to_base64=lambda image: f"base64 of {image}")
    vars(transformers).update(TrainerCallback=object, TrainerState=object)
    asynchronous = ModuleType("trl.experimental.async_grpo")
    vars(asynchronous)["async_rollout_worker"] = worker
    for module in (package, client, transformers, asynchronous):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("trl", "trl.experimental"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(tested, "version", {"trl": "1.16.0"}.__getitem__)
    monkeypatch.delitem(sys.modules, "rose.integrations.trl", raising=False)
    made = importlib.import_module("rose.integrations.trl")
    monkeypatch.setattr(made, "PAUSE_S", 0.001)
    monkeypatch.setattr(made, "PROBE_S", 0.02)
    monkeypatch.setattr(made, "HEALTH_S", 30.0)
    monkeypatch.setattr(made, "find_spec", lambda name: None)
    yield made
    del sys.modules["rose.integrations.trl"]


@dataclass
class AnsweringGateway:
    """Answers one after the other; the last of them for ever."""

    answers: list[Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=list)
    healthy: bool = True
    asked: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""


def says(status: int, body: object) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(http: BaseHTTPRequestHandler) -> None:
        raw = json.dumps(body).encode()
        http.send_response(status)
        http.send_header("Content-Length", str(len(raw)))
        http.end_headers()
        http.wfile.write(raw)

    return answer


@pytest.fixture
def gateway() -> Iterator[AnsweringGateway]:
    there = AnsweringGateway()

    class GatewayHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                says(200 if there.healthy else 503, {})(self)
            else:
                says(200, {"data": [{"id": "policy"}]})(self)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            there.asked.append((dict(self.headers), json.loads(body)))
            answer = there.answers.pop(0) if len(there.answers) > 1 else there.answers[0]
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), GatewayHandler)
    there.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield there
    there.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def settings(gateway: AnsweringGateway, tmp_path: Path) -> TrainerSettings:
    return trainer_settings(tmp_path, gateway=gateway.url, timeout_s=60.0)


class Published(PolicyPublisher):
    """One that is at version 7."""

    version = 7  # type: ignore[assignment]  # a property of others

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__(settings)
        self.given: list[tuple[Any, dict[str, Any]]] = []

    def publish(self, named: Any, **options: Any) -> int:
        self.given.append((named, options))
        return 8


GONE = {"error": {"message": "no replica", "code": 503}}


@pytest.fixture
def client(plugin: Any, settings: TrainerSettings) -> Any:
    return plugin.RoseVLLMClient(Published(settings), 60.0)


@pytest.fixture
def impatient(plugin: Any, settings: TrainerSettings) -> Any:
    return plugin.RoseVLLMClient(Published(replace(settings, timeout_s=0.05)), 60.0)


def test_turns_are_the_jobs_and_of_fresh_policies(client: Any, gateway: AnsweringGateway) -> None:
    gateway.answers = [says(200, {"choices": []})]
    assert client.generate([[1, 2]], generation_kwargs={"top_k": 3}) == {"choices": []}
    ((headers, asked),) = gateway.asked
    assert headers["X-Rose-Job"] == "grpo"
    assert asked["min_version"] == 6, "one behind the newest, as the job allows"
    assert (asked["top_k"], asked["prompt"], client.model) == (3, [[1, 2]], "policy")


def test_a_gateway_that_cannot_now_is_asked_the_same_again(
    client: Any, gateway: AnsweringGateway
) -> None:
    gateway.answers = [*(says(s, GONE) for s in (503, 429, 409)), says(200, {"choices": [1]})]
    assert client.generate([[1]]) == {"choices": [1]}
    assert len({asked["request_id"] for _, asked in gateway.asked}) == 1
    assert len(gateway.asked) == 4


def test_what_replicas_cannot_do_is_said_and_not_tried_again(
    client: Any, gateway: AnsweringGateway
) -> None:
    gateway.answers = [says(400, {"error": {"message": "min_p is not supported"}})]
    with pytest.raises(RefusedError, match="min_p is not supported"):
        client.generate([[1]])
    assert len(gateway.asked) == 1


def test_prompts_with_images_are_a_request_each(client: Any, gateway: AnsweringGateway) -> None:
    likely = [{"token_id": token, "logprob": logprob} for token, logprob in ((9, -2.0), (4, -0.5))]
    content = [{"token_id": 9, "logprob": -2.0, "top_logprobs": likely}]
    choice = {"token_ids": [9], "logprobs": {"content": content}}
    gateway.answers = [says(200, {"choices": [choice, choice]})]
    features = client.image_features([["cat", "dog"], None])
    made = client.generate([[1, 2], [3]], features=features)
    first, second = sorted((body for _, body in gateway.asked), key=lambda each: each["token_ids"])
    assert first["images"] == ["base64 of cat", "base64 of dog"]
    assert "images" not in second
    assert first["request_id"].removesuffix("-0") == second["request_id"].removesuffix("-1")
    for asked in (first, second):
        assert (asked["min_version"], asked["model"]) == (6, "policy")
        assert asked["sampling_params"] == {"n": 2, "logprobs": 1}
    assert made == {
        "prompt_ids": [[1, 2], [3]],
        "completion_ids": [[9]] * 4,
        "logprobs": [[[-0.5, -2.0]]] * 4,
        "logprob_token_ids": [[[4, 9]]] * 4,
    }


@pytest.mark.parametrize(
    ("silent", "words"),
    [(False, r"no turns for 0\.05 s: no replica"), (True, "it does not answer")],
)
def test_a_gateway_that_never_can_or_falls_silent_ends_the_wait_in_one_line(
    impatient: Any, gateway: AnsweringGateway, silent: bool, words: str
) -> None:
    def fall_silent(http: BaseHTTPRequestHandler) -> None:
        gateway.healthy = False
        gateway.released.wait()

    gateway.answers = [fall_silent if silent else says(503, GONE)]
    with pytest.raises(UnavailableError, match=words) as told:
        impatient.generate([[1]])
    assert "\n" not in str(told.value)


def test_long_turns_are_waited_for_while_their_gateway_lives(
    client: Any, gateway: AnsweringGateway
) -> None:
    probes = iter(range(20))
    answers = client._answers

    def probed() -> bool:
        if next(probes) == 10:
            gateway.released.set()
        return bool(answers())

    def late(http: BaseHTTPRequestHandler) -> None:
        gateway.released.wait()
        says(200, {"choices": [2]})(http)

    client._answers, gateway.answers = probed, [late]
    assert client.generate([[1]]) == {"choices": [2]}


def test_a_gateway_that_is_not_there_is_said_with_what_to_do(
    plugin: Any, settings: TrainerSettings, gateway: AnsweringGateway
) -> None:
    gateway.healthy = False
    with pytest.raises(UnavailableError, match="start `rose gateway`") as told:
        plugin.RoseVLLMClient(Published(settings), 0.01)
    assert "\n" not in str(told.value)


def test_all_ranks_walk_the_weights_and_the_first_alone_publishes(client: Any) -> None:
    named = iter(())
    client.update_named_params([], named)
    assert client.publisher.given == [(named, {"collective": False})]


def test_server_mode_means_rose_from_then_on_and_needs_no_vllm(
    plugin: Any, generation: ModuleType, settings: TrainerSettings
) -> None:
    publisher = plugin.use(settings)
    client = generation.VLLMClient(base_url="http://0.0.0.0:8000", connection_timeout=60.0)
    assert isinstance(client, plugin.RoseVLLMClient)
    assert (client.publisher, client.base_url) == (publisher, settings.gateway)
    assert vars(generation)[WITHOUT_VLLM](min_version="0.28.0")
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"


def test_its_weight_transfer_pauses_nothing_and_publishes(
    plugin: Any, settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "PolicyPublisher", Published)
    weights, named = plugin.RoseWeightTransfer(settings, wait=False), iter(())
    weights.pause()
    weights.send_weights(named)
    weights.resume()
    assert weights.publisher.given == [(named, {"wait": False, "collective": False})]


def test_a_callback_publishes_before_the_first_step_and_after_every_so_many(
    plugin: Any, settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EmptyModel:
        def named_parameters(self) -> list[object]:
            return []

    @dataclass
    class State:
        global_step: int

    monkeypatch.setattr(plugin, "PolicyPublisher", Published)
    callback = plugin.PublishCallback(settings, every=2)
    callback.on_train_begin(None, State(0), None, model=EmptyModel())
    for step in range(1, 5):
        callback.on_step_end(None, State(step), None, model=EmptyModel())
    assert len(callback.publisher.given) == 3


def test_another_trl_is_refused_as_it_is_imported(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "version", {"trl": "9.0"}.__getitem__)
    with pytest.raises(ConfigError, match=r"trl 9\.0 was never tried"):
        importlib.reload(plugin)
