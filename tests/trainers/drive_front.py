"""Drives a front with the client files of prime-rl, slime and AReaL, each as its trainer does.

    python drive_front.py CLIENTS FRONT GATEWAY MODEL FOLDER SEED WHAT…

WHAT: prime, slime, slime-delta, areal, areal-vllm, vllm, watch, abort: one update each, but for
`abort`. `slime-delta` is a chain, which begins with the model. `vllm`, which is vLLM's own trainer
engine, and `watch`, which is `rose publish`, need no front but `ROSE_*` in their environment.

The trainer is a model of transformers whose weights take a random step; after each update what is
served is compared with what this model would have said. A line of JSON for each.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from tests.trainers.stand_in_neighbours import stand_in

PROMPT, TOKENS = [10, 20, 30, 40], 6
Ask = Callable[[list[int], int], list[int]]


class SteppingTrainer:
    """A model that takes steps, saves them, and says what it would answer."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.folder = folder
        self.number = seed

    def step(self) -> Path:
        """Take one, save it as prime-rl's trainer does; its folder."""
        self.number += 1
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)
        folder = self.folder / f"step_{self.number}"
        self.model.save_pretrained(folder)
        (folder / "STABLE").touch()
        return folder

    def greedy(self) -> list[int]:
        """The most likely tokens after the prompt."""
        prompt = torch.tensor([PROMPT])
        made = self.model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
        return made[0, len(PROMPT) :].tolist()


class PrimeRl:
    """`prime_rl.utils.client`: turns at the gateway, weights at the front."""

    def __init__(self, front: str, gateway: str, model: str) -> None:
        from prime_rl.utils.client import InferencePool

        config = SimpleNamespace(
            base_url=f"{gateway}/v1",
            admin_base_url=[front],
            api_key_var="NO_SUCH_KEY",
            headers={},
            headers_from_env={},
            skip_model_check=False,
            wait_for_ready_timeout=60,
        )
        config.model_copy = lambda update: SimpleNamespace(**(vars(config) | update))
        self._new = lambda: InferencePool(config, model, train_client_type="renderer")
        self._gateway, self._model = gateway, model

    def update(self, folder: Path, number: int) -> None:
        async def run() -> None:
            pool = self._new()
            await pool.wait_for_ready(self._model)
            await pool.update_weights(folder, step=number)

        asyncio.run(run())

    def ask(self, prompt: list[int], tokens: int) -> list[int]:
        import httpx

        sampling = {"max_tokens": tokens, "temperature": 0.0, "logprobs": 1}
        body = {"model": self._model, "token_ids": prompt, "sampling_params": sampling}
        answer = httpx.post(f"{self._gateway}/inference/v1/generate", json=body, timeout=60)
        return answer.raise_for_status().json()["choices"][0]["token_ids"]


class Slime:
    """`slime.backends.sglang_utils`: finds the front, takes it for its engine and its router."""

    def __init__(self, front: str, model: str) -> None:
        from slime.backends.sglang_utils import external, sglang_engine

        place = urlsplit(front)
        self._url = front
        args = SimpleNamespace(
            rollout_external=True,
            rollout_external_engine_addrs=[place.netloc],
            sglang_router_ip=place.hostname,
            sglang_router_port=place.port,
            sglang_server_concurrency=64,
            sglang_pp_size=1,
            sglang_dp_size=1,
            sglang_ep_size=1,
            num_gpus_per_node=8,
            rollout_num_gpus_per_engine=1,
            actor_num_gpus_per_node=8,
            actor_num_nodes=1,
            colocate=False,
            debug_rollout_only=False,
            hf_checkpoint=model,
            seed=1,
            offload_rollout=False,
            use_rollout_routing_replay=False,
            fp16=False,
            use_distributed_post=False,
        )
        external.apply_external_engine_info_to_args(args)
        (info,) = external.external_engine_infos_from_args(args)
        self._engine = sglang_engine.SGLangEngine(
            args, 0, worker_type=info.worker_type, num_gpus_per_engine=info.num_gpus
        )
        router = {"router_ip": args.sglang_router_ip, "router_port": args.sglang_router_port}
        self._engine.init(**external.external_engine_init_kwargs(info), **router)
        self._args = args

    def update(self, folder: Path, number: int) -> None:
        engine = self._engine
        engine.health_generate(timeout=60)
        engine.pause_generation()
        engine.flush_cache()
        engine.update_weights_from_disk(model_path=str(folder), weight_version=str(number))
        assert engine.get_weight_version() == str(number)
        engine.continue_generation()

    async def turn(self, prompt: list[int], tokens: int, temperature: float) -> dict[str, Any]:
        """Request a turn like slime.rollout.sglang_rollout."""
        from slime.utils.http_utils import post

        sampling = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": tokens,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        body = {"sampling_params": sampling, "return_logprob": True, "input_ids": prompt}
        headers = {"X-SMG-Routing-Key": "trajectory-1"}
        return await post(f"{self._url}/generate", body, max_retries=1, headers=headers)

    def _run(self, work: Any) -> Any:
        from slime.utils import http_utils

        async def run() -> Any:
            http_utils._http_client = None
            http_utils.init_http_client(self._args)
            return await work()

        return asyncio.run(run())

    def ask(self, prompt: list[int], tokens: int) -> list[int]:
        meta = self._run(lambda: self.turn(prompt, tokens, 0.0))["meta_info"]
        return [token for _, token, *_ in meta["output_token_logprobs"]]

    def abort(self, turns: int, tokens: int) -> dict[str, Any]:
        """End turns in the middle, as slime does once it has enough."""
        from slime.backends.sglang_utils.server_control import abort_servers_until_idle
        from slime.utils.http_utils import get

        async def work() -> dict[str, Any]:
            asked = [
                asyncio.ensure_future(self.turn([*PROMPT, k], tokens, 1.0)) for k in range(turns)
            ]
            loads = f"{self._url}/v1/loads?include=core"
            while (await get(loads))["loads"][0]["num_total_reqs"] < turns:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            urls = [each["url"] for each in (await get(f"{self._url}/workers"))["workers"]]
            await abort_servers_until_idle(urls)
            answers = await asyncio.gather(*asked)
            return {"ends": [each["meta_info"]["finish_reason"]["type"] for each in answers]}

        return self._run(work)


class SlimeDelta(Slime):
    """slime's delta mode: its own diffs of the model, each on the one before."""

    def __init__(self, front: str, model: str, trainer: SteppingTrainer) -> None:
        import torch.distributed as dist
        from slime.backends.megatron_utils.update_weight import update_weight_from_disk_delta

        super().__init__(front, model)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._engine.args.update_weight_local_checkpoint_dir = "/nvme/engine"
        self._engine.args.update_weight_disk_dir = str(trainer.folder / "stream")
        args = SimpleNamespace(
            **vars(self._engine.args),
            update_weight_delta_encoding="xor",
            update_weight_delta_checksum="blake3",
            custom_update_weight_post_write_path=None,
        )

        class Updates(update_weight_from_disk_delta.UpdateWeightFromDiskDelta):
            def _iter_hf_tensors(self) -> Any:
                # Gathered weights are copies; on a CPU slime would keep the live ones as its base.
                for name, weight in trainer.model.named_parameters():
                    yield name, weight.detach().clone()

        self._updates = Updates(args, [], None, model_name="", quantization_config=None)
        self._updates.connect_rollout_engines([_Actor(self._engine)], None)
        self._updates.update_weights()

    def update(self, folder: Path, number: int) -> None:
        self._updates.update_weights()
        assert self._engine.get_weight_version() == str(self._updates.weight_version)


class _Actor:
    """A handle whose calls are made here and now, as Ray's are elsewhere and later."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._engine, name))


class Areal:
    """`areal.engine`: a backend builds requests, `areal.infra.utils.http` sends them."""

    def __init__(self, front: str, backend: Any) -> None:
        self._address, self._backend = urlsplit(front).netloc, backend

    def _send(self, request: Any) -> Any:
        from areal.infra.utils.http import arequest_with_retry

        return asyncio.run(
            arequest_with_retry(
                addr=self._address,
                endpoint=request.endpoint,
                payload=request.payload,
                method=request.method,
                max_retries=1,
                timeout=120,
            )
        )

    def update(self, folder: Path, number: int) -> None:
        backend = self._backend
        self._send(backend.get_health_check_request())
        self._send(backend.get_pause_request())
        meta = SimpleNamespace(use_lora=False, path=folder, version=number)
        for request in backend.build_disk_weight_update_requests(meta).requests:
            self._send(request)
        self._send(backend.get_resume_request())

    def ask(self, prompt: list[int], tokens: int) -> list[int]:
        sampling = SimpleNamespace(
            top_p=1.0,
            top_k=100_000_000,
            max_new_tokens=tokens,
            greedy=True,
            temperature=1.0,
            stop=None,
            stop_token_ids=[],
            ignore_eos=False,
            skip_special_tokens=True,
            frequency_penalty=0.0,
            use_beam_search=False,
            lora_name="",
        )
        asked = SimpleNamespace(
            input_ids=prompt, image_data=None, vision_msg_vllm=None, gconfig=sampling, metadata={}
        )
        request = self._backend.build_generation_request(asked, False, 0)
        made = self._backend.parse_generation_response(self._send(request))
        assert len(made.output_logprobs) == len(made.output_tokens)
        return list(made.output_tokens)


class VllmTrainerEngine:
    """`vllm.distributed.weight_transfer`: sends the model itself, backend `rose`."""

    def __init__(self, gateway: str, model: str, trainer: SteppingTrainer) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.base import ModuleSource

        from rose.integrations.vllm import RoseTrainerInitInfo

        self._engine = WeightTransferTrainerFactory.trainer_init(
            RoseTrainerInitInfo(rank=0), client=object(), source=ModuleSource(trainer.model)
        )
        self.ask = PrimeRl("", gateway, model).ask

    def update(self, folder: Path, number: int) -> None:
        self._engine.send_weights()
        self._engine.shutdown()


class Watcher:
    """`rose publish --watch`, once."""

    def __init__(self, gateway: str, model: str) -> None:
        self.ask = PrimeRl("", gateway, model).ask

    def update(self, folder: Path, number: int) -> None:
        command = [sys.executable, "-m", "rose.cli", "publish", "--once", "--marker=STABLE"]
        subprocess.run([*command, f"--watch={folder.parent}"], check=True, stdout=sys.stderr)


def client(what: str, front: str, gateway: str, model: str, trainer: SteppingTrainer) -> Any:
    """The client of one framework."""
    if what == "vllm":
        return VllmTrainerEngine(gateway, model, trainer)
    if what == "watch":
        return Watcher(gateway, model)
    if what == "prime":
        return PrimeRl(front, gateway, model)
    if what == "slime-delta":
        return SlimeDelta(front, model, trainer)
    if what in ("slime", "abort"):
        return Slime(front, model)
    if what == "areal":
        from areal.engine.sglang_remote import SGLangBackend

        return Areal(front, SGLangBackend())
    from areal.engine.vllm_remote import VLLMBackend

    return Areal(front, VLLMBackend())


def main(argv: list[str]) -> None:
    clients, front, gateway, model, folder, seed, *whats = argv
    sys.path[:0] = [clients, str(Path(clients) / "libraries")]
    stand_in()
    trainer = SteppingTrainer(Path(model), Path(folder), int(seed))
    kept: dict[str, Any] = {}
    for what in whats:
        driven = kept.get(what) or client(what, front, gateway, model, trainer)
        kept[what] = driven
        if what == "abort":
            said = driven.abort(4, 400)
        else:
            began_s = time.monotonic()
            saved = trainer.step()
            saved_s = time.monotonic()
            driven.update(saved, trainer.number)
            updated_s = time.monotonic()
            served, own = driven.ask(PROMPT, TOKENS), trainer.greedy()
            said = {
                "number": trainer.number,
                "served": served,
                "own": own,
                "save_s": round(saved_s - began_s, 3),
                "update_s": round(updated_s - saved_s, 3),
            }
        sys.stdout.write(json.dumps({"what": what, **said}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
