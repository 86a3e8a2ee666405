"""TRL's trainers through ROSE, as released: one import and one call before the trainer is built.

    use(settings)                 GRPOTrainer, RLOOTrainer, …: use_vllm=True, vllm_mode="server",
                                  with or without a rollout_func
    RoseWeightTransfer(settings)  AsyncGRPOTrainer(weight_transfer=…), by TRL's own protocol
    PublishCallback(settings)     a trainer without vLLM: use_vllm=False and a rollout_func

Prompts go to the gateway as to vLLM's own server. Weights go to replicas as versions, while turns
run: nothing is paused, and no NCCL group is made. The trainer's environment needs no vLLM.
"""

import atexit
import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import requests
from transformers import TrainerCallback, TrainerState
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient, pil_to_base64

from rose.contract.gateway import GENERATE, JOB_HEADER, RETRIED
from rose.errors import RefusedError, UnavailableError
from rose.integrations.lora import adapter_of, is_adapted
from rose.integrations.named_weights import Named
from rose.integrations.policy_publisher import PolicyPublisher
from rose.integrations.settings import TrainerSettings
from rose.integrations.tested import check_tested
from rose.security.tokens import TokenFile

if TYPE_CHECKING:
    import torch

Made = dict[str, Any]
"""JSON object of an answer, as TRL's own client returns it."""
Option = Any

TESTED = ("1.16.0",)
check_tested("trl", TESTED)

# Statuses of a gateway that is busy, or whose replicas are not at the wanted version yet.
LATER = RETRIED | {409}
PAUSE_S = 1.0
# Prompts with images that are asked for at once, as by TRL's own client.
MOST_REQUESTS = 64
# Period of health probes while turns are waited for, and the time limit of each.
PROBE_S, HEALTH_S = 2.0, 2.0
# Probes in a row without an answer after which the gateway is gone, despite its connection.
MOST_MISSED = 3


def use(settings: TrainerSettings, *, adapters: bool = False) -> PolicyPublisher:
    """Replace TRL's vLLM client by ROSE's for every trainer that is built after this; return the
    publisher.

    adapters: of a model of PEFT the LoRA adapter is published; else it is merged, and whole weights
    are.

    TRL has no argument for the class of its client, so this replaces the class in
    `trl.generation.vllm_generation`. The publisher is closed when the process exits. Raises
    `ConfigError`.
    """
    publisher = PolicyPublisher(settings)

    class JobClient(RoseVLLMClient):
        """HTTP client of the gateway named in TrainerSettings."""

        def __init__(self, *_: object, connection_timeout: float = 0.0, **__: object) -> None:
            super().__init__(publisher, connection_timeout)

    def sync_adapter(generation: Any) -> None:  # noqa: ANN401 -- TRL's VLLMGeneration
        publish_model(publisher, generation.accelerator.unwrap_model(generation.model))

    vllm_generation.VLLMClient = JobClient
    # Replicas find the places of images, of those too that are several runs of tokens.
    vllm_generation.VLLMGeneration._place_features = lambda _, features, __: features
    if adapters:
        vllm_generation.VLLMGeneration.sync_weights = sync_adapter
    for module in (vllm_generation, vllm_client):
        _need_no_vllm(module)
    atexit.register(publisher.close)
    return publisher


def publish_model(publisher: PolicyPublisher, model: "torch.nn.Module") -> None:
    """Publish a model's weights as the next version, or the LoRA adapter alone of one of PEFT; all
    ranks call it.
    """
    if is_adapted(model):
        lora, named = adapter_of(model)
        publisher.publish(named, lora=lora)
    else:
        publisher.publish(model.named_parameters())


class RoseVLLMClient(VLLMClient):  # type: ignore[misc]  # TRL is not where this is checked
    """TRL's client of a vLLM server, directed at a gateway: the same requests, and weights
    published as versions.

    Each request is repeated, under the same id, while the gateway cannot answer, for at most
    `settings.timeout_s`. Raises `RoseError` with one line.
    """

    def __init__(self, publisher: PolicyPublisher, connection_timeout: float = 0.0) -> None:
        # TRL's own session is not used: it asks for vLLM, and its connections wait for ever.
        self.settings = publisher.settings
        self.publisher = publisher
        self.base_url = self.settings.gateway.rstrip("/")
        self.session = _session(self.settings)
        self.communicator = None
        self.check_server(connection_timeout)
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.0) -> None:
        """Block until the gateway's /health answers 200.

        Raises UnavailableError after `total_timeout` seconds.
        """
        deadline_s = time.monotonic() + total_timeout
        while not self._answers():
            if time.monotonic() >= deadline_s:
                raise UnavailableError(
                    f"no gateway answers at {self.base_url} within {total_timeout:g} s; start"
                    " `rose gateway`, or set ROSE_GATEWAY to where it is"
                )
            time.sleep(retry_interval or PAUSE_S)

    def get_server_info(self) -> Made:
        """Return the fixed server info that TRL asks for: backend `rose`, and logprobs of the
        sampler.
        """
        return {
            "weight_transfer_config": {"backend": "rose"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }

    def init_communicator(self, device: object = 0) -> None:
        """Register the job with the scheduler and load its newest version; no NCCL group is
        made.
        """
        self.publisher.start()

    def generate(self, prompts: Sequence[object], **options: Option) -> Made:
        """Return completions in the form of TRL's client, sampled under versions within the job's
        staleness bound.
        """
        own = {"min_version": self.publisher.oldest_allowed, "request_id": uuid.uuid4().hex}
        options["generation_kwargs"] = {**own, **(options.get("generation_kwargs") or {})}
        made: Made = super().generate(prompts, **options)
        return made

    def image_features(
        self, images: Sequence[Sequence[object] | None], **_: object
    ) -> list[dict[str, Any] | None]:
        """Return what `generate` sends with each prompt: the files of its images in base64, which
        replicas process; None for a prompt without images.
        """
        return [{"images": [*map(pil_to_base64, each)]} if each else None for each in images]

    def _generate_from_features(
        self,
        prompts: Sequence[list[int]],
        features: Sequence[dict[str, Any] | None],
        sampling_params: dict[str, Any],
    ) -> Made:
        """Return completions of prompts with images: a request for each, all of them at once."""
        own = {name: sampling_params.pop(name, None) for name in ("min_version", "request_id")}

        def choices_of(place: int) -> list[Made]:
            body = {
                **own,
                **(features[place] or {}),
                "request_id": f"{own['request_id']}-{place}",
                "model": self.model,
                "token_ids": prompts[place],
                "sampling_params": sampling_params,
            }
            choices: list[Made] = self._post(f"{self.base_url}{GENERATE}", json=body)["choices"]
            return choices

        with ThreadPoolExecutor(min(MOST_REQUESTS, len(prompts))) as pool:
            choices = [each for one in pool.map(choices_of, range(len(prompts))) for each in one]
        rows = [_likely(choice["logprobs"]) for choice in choices]
        return {
            "prompt_ids": [*prompts],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [[[each for each, _ in row] for row in found] for found in rows],
            "logprob_token_ids": [[[token for _, token in row] for row in found] for found in rows],
        }

    def update_named_params(self, metadata: object, named_params: Named) -> None:
        """Publish these tensors as the next version; TRL calls this on its first rank alone, and
        the others take part in gathering.
        """
        self.publisher.publish(named_params, collective=False)

    def reset_prefix_cache(self) -> None:
        """Do nothing: each version has a prefix cache of its own."""

    def close_communicator(self) -> None:
        """Stop serving versions to nodes; published versions stay."""
        self.publisher.close()

    # ---- requests ----

    def _get(self, url: str, **options: Option) -> Made:
        return self._ask("GET", url, options)

    def _post(self, url: str, **options: Option) -> Made:
        return self._ask("POST", url, options)

    def _ask(self, method: str, url: str, options: dict[str, Option]) -> Made:
        failing_since_s: float | None = None
        while True:
            asked = _Asked(self.session, method, url, options)
            missed = 0
            while missed < MOST_MISSED and not asked.done(PROBE_S):
                missed = 0 if self._answers() else missed + 1
            if asked.answer is not None and asked.answer.status_code not in LATER:
                return _read(asked.answer)
            now_s = time.monotonic()
            failing_since_s = now_s if failing_since_s is None else failing_since_s
            if now_s - failing_since_s > self.settings.timeout_s:
                raise UnavailableError(
                    f"the gateway at {self.base_url} gave no turns for"
                    f" {self.settings.timeout_s:g} s: {asked.trouble}; ask `rose status`"
                )
            time.sleep(PAUSE_S)

    def _answers(self) -> bool:
        try:
            answer = self.session.get(f"{self.base_url}/health", timeout=HEALTH_S)
        except requests.RequestException:
            return False
        return bool(answer.status_code == 200)


class RoseWeightTransfer:
    """TRL's `WeightTransferProtocol`, for `AsyncGRPOTrainer(weight_transfer=…)`.

    wait: each sync returns only when replicas serve the version, so that TRL's own count of
    staleness is right. Rollouts continue meanwhile.
    """

    def __init__(self, settings: TrainerSettings, *, wait: bool = True) -> None:
        from trl.experimental.async_grpo import async_rollout_worker

        self.publisher = PolicyPublisher(settings)
        self._wait = wait
        _need_no_vllm(async_rollout_worker)

    def init_weight_transfer(self) -> None:
        """Register the job with the scheduler and load its newest version."""
        self.publisher.start()

    def pause(self) -> None:
        """Do nothing: a replica takes a version between two of its steps."""

    def send_weights(self, iterator: Named) -> None:
        """Publish these tensors as the next version; TRL calls this on its first rank alone, and
        the others take part in gathering.
        """
        self.publisher.publish(iterator, wait=self._wait, collective=False)

    def resume(self) -> None:
        """Do nothing: generation was not paused."""

    def destroy(self) -> None:
        """Stop serving versions to nodes; published versions stay."""
        self.publisher.close()


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Callback for TRL trainers that publishes a version as training begins and after every few
    optimiser steps.

    It is for trainers whose rollout_func asks the gateway itself; a rollout_func beside
    `use_vllm=True` does not need it. Weights are plain or FSDP2's; of a model of PEFT the adapter
    is published.
    """

    def __init__(self, settings: TrainerSettings, every: int = 1) -> None:
        self.publisher = PolicyPublisher(settings)
        self._every = every

    def on_train_begin(
        self, args: object, state: object, control: object, model: "torch.nn.Module", **_: object
    ) -> None:
        """Publish the model's weights: replicas may have another run's, or version 0 if training is
        resumed.
        """
        publish_model(self.publisher, model)

    def on_step_end(
        self,
        args: object,
        state: TrainerState,
        control: object,
        model: "torch.nn.Module",
        **_: object,
    ) -> None:
        """Publish the model's weights after each `every`-th optimiser step."""
        if state.global_step % self._every == 0:
            publish_model(self.publisher, model)

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Stop serving versions to nodes; published versions stay."""
        self.publisher.close()


class _Asked:
    """HTTP request that runs in a thread of its own, so that its caller notices a silent
    gateway.
    """

    def __init__(
        self, session: requests.Session, method: str, url: str, options: dict[str, Any]
    ) -> None:
        self.answer: requests.Response | None = None
        self.trouble = "it does not answer"
        self._request = session, method, url, options
        # A daemon: a request that is given up may wait for ever, and must not keep the process.
        self._thread = threading.Thread(target=self._run, name="rose-turns", daemon=True)
        self._thread.start()

    def done(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds; return True if the request has ended, with an answer or an
        error.
        """
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        session, method, url, options = self._request
        try:
            answer = session.request(method, url, **options)
        except requests.RequestException as error:
            self.trouble = _reason(error)
        else:
            self.trouble, self.answer = _message(answer), answer


class _Shown(requests.auth.AuthBase):
    """Authentication of requests with the newest token of a file."""

    def __init__(self, token: TokenFile) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token.token()}"
        return request


def _likely(logprobs: Made) -> list[list[tuple[float, int]]]:
    """Return (logprob, token) of the sampled token and the others at each place, likely ones first,
    as TRL's own client has them.
    """
    return [
        sorted({(top["logprob"], top["token_id"]) for top in (each, *each["top_logprobs"])})[::-1]
        for each in logprobs["content"]
    ]


def _session(settings: TrainerSettings) -> requests.Session:
    session = requests.Session()
    session.headers[JOB_HEADER] = settings.job
    session.trust_env = False
    shown = settings.credentials()
    shown.check(settings.gateway)
    if shown.token_file:
        session.auth = _Shown(TokenFile(shown.token_file))
    if shown.ca:
        session.verify = str(shown.ca)
    if shown.certificate and shown.key:
        session.cert = str(shown.certificate), str(shown.key)
    return session


def _read(answer: requests.Response) -> Made:
    if answer.status_code != 200:
        raise RefusedError(f"the gateway refused the turns: {_message(answer)}")
    try:
        made: Made = answer.json()
    except requests.JSONDecodeError as error:
        raise RefusedError(f"{answer.url} answers no JSON; is it a gateway?") from error
    return made


def _message(answer: requests.Response) -> str:
    """Return the error line of a gateway's answer, or its status if it has none."""
    with contextlib.suppress(requests.JSONDecodeError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])
    return f"status {answer.status_code}"


def _reason(error: BaseException) -> str:
    """Return the first line of an error's innermost cause, or its type's name."""
    for cause in _causes(error):
        error = cause
    return f"{error}".splitlines()[0] if f"{error}" else type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause


def _need_no_vllm(module: ModuleType) -> None:
    """Make a TRL module accept a missing vLLM, which server mode does not use."""
    if find_spec("vllm") is None:
        vars(module)["is_vllm_available"] = lambda *_, **__: True
