"""verl's own agent loop on ROSE's turns, and what its trainers make of them: on a CPU, without Ray.

    verl_loop_main.py images MODEL   an image in each prompt
    verl_loop_main.py routes MODEL   the experts of each position, replayed

Run by the interpreter of `.venv-verl`; the last line of the output is JSON.
"""

import asyncio
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset

from rose.client import Turn
from rose.integrations import TrainerSettings
from rose.integrations.verl import rollout_turns
from rose.integrations.verl.replica import RoseServer
from rose.integrations.verl.turns import Lengths

PROMPT, RESPONSE = 64, 16
LENGTHS = Lengths(PROMPT, RESPONSE, None)
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Pictures(RLHFDataset):  # type: ignore[misc]  # of another environment
    """Data set whose messages have images of PIL themselves."""

    @classmethod
    async def process_multi_modal_info(
        cls, messages: list[dict[str, Any]], **_: object
    ) -> tuple[Any, None, None]:
        parts = [part for message in messages for part in message["content"]]
        return [part["image"] for part in parts if part["type"] == "image"] or None, None, None


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def loop_of(server: RoseServer, tokenizer: Any, processor: Any, kind: str) -> SingleTurnAgentLoop:
    lengths = {"prompt_length": PROMPT, "response_length": RESPONSE}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": lengths}})
    return SingleTurnAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=processor,
        dataset_cls=Pictures,
        data_config=DictConfigWrap(OmegaConf.create({})),
        hf_model_type=kind,
    )


def trained_logprobs(model: Any, processor: Any, output: AgentLoopOutput, image: Any) -> Any:
    """Return the trainer's logprobs of a response to a prompt with this image."""
    pixels = processor.image_processor([[image]], return_tensors="pt")
    tokens = torch.tensor([[*output.prompt_ids, *output.response_ids]])
    with torch.no_grad():
        logits = model(input_ids=tokens, **pixels).logits[0, len(output.prompt_ids) - 1 : -1]
    found = logits.float().log_softmax(-1)
    return found.gather(1, torch.tensor(output.response_ids)[:, None])[:, 0].numpy()


async def images(folder: Path) -> dict[str, Any]:
    """Return how far sampler and trainer differ, with each prompt's own image and with another."""
    server = RoseServer(TrainerSettings.from_env(), LENGTHS, 1, False, False, None)
    # AutoProcessor wants torchvision.
    files, tokenizer = Idefics3ImageProcessorPil.from_pretrained(folder), tokenizer_of(folder)
    template = tokenizer.chat_template
    processor = Idefics3Processor(files, tokenizer, image_seq_len=4, chat_template=template)
    loop = loop_of(server, processor.tokenizer, processor, "idefics3")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    colours = np.random.default_rng(0).integers(0, 255, (4, 30, 40, 3), dtype=np.uint8)
    seen = [Image.fromarray(each) for each in colours]
    text = {"type": "text", "text": "say it"}
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": each}, text]}] for each in seen
    ]
    outputs = await asyncio.gather(*(loop.run(dict(GREEDY), raw_prompt=chat) for chat in chats))
    gaps: dict[str, list[float]] = {"own": [], "another": []}
    for number, output in enumerate(outputs):
        for name, image in (("own", seen[number]), ("another", seen[number - 1])):
            trained = trained_logprobs(model, processor, output, image)
            gaps[name].append(float(np.abs(trained - output.response_logprobs).mean()))
    return {**gaps, "images": [len(each.multi_modal_data["images"]) for each in outputs]}


def mixture(seed: int) -> Any:
    """Return VeOmni's Qwen3-MoE of random weights."""
    from transformers import Qwen3MoeConfig
    from veomni.models.transformers.qwen3_moe.generated import patched_modeling_qwen3_moe_gpu

    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    torch.manual_seed(seed)
    return patched_modeling_qwen3_moe_gpu.Qwen3MoeForCausalLM(config).eval()


def experts_of(model: Any, tokens: list[int]) -> "np.ndarray[Any, Any]":
    """Return the experts that compute each position, (positions, layers, choices)."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: found.append(given[1]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy().astype(np.uint8)


class MixtureClient:
    """Client of a gateway, before whose replica a mixture of experts samples."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def generate(self, prompt: list[int], sampling: Any, **names: Any) -> Turn:
        assert names["routed_experts"]
        sampled = torch.randint(0, 256, (sampling.max_tokens,)).tolist()
        file = io.BytesIO()
        np.save(file, experts_of(self._model, [*prompt, *sampled])[:-1])
        logprobs = (-1.0,) * len(sampled)
        return Turn("a", tuple(sampled), logprobs, (), (), "length", 1, npy=file.getvalue())


async def routes() -> dict[str, Any]:
    """Return how often a trainer with another router chose the sampler's experts, by itself and
    with verl's replay, and what verl counts of them.
    """
    from tensordict import TensorDict
    from verl.trainer.ppo.metric_utils import compute_rollout_moe_load_balance_metrics
    from verl.utils.veomni.router_replay import VeOmniRouterReplay
    from verl.workers.engine.veomni.transformer_impl import VeOmniEngineWithLMHead

    sampler, trainer = mixture(0), mixture(0)
    with torch.no_grad():
        for layer in trainer.model.layers:
            layer.mlp.gate.weight.add_(0.1 * torch.randn(layer.mlp.gate.weight.shape))
    folder = Path(sys.argv[2])
    server = RoseServer(TrainerSettings.from_env(), LENGTHS, 1, False, True, None)
    client = MixtureClient(sampler)

    async def opened(_: object) -> MixtureClient:
        return client

    rollout_turns.RolloutTurns._opened = opened  # type: ignore[assignment,method-assign]
    loop = loop_of(server, tokenizer_of(folder), None, "qwen3_moe")
    replay = VeOmniRouterReplay()
    replay.install(trainer)
    shares: dict[str, list[float]] = {"native": [], "replayed": []}
    for text in ("say it", "and say it again"):
        prompt = [{"role": "user", "content": text}]
        output = await loop.run(dict(GREEDY), raw_prompt=prompt)
        fields = output.as_dict()
        tokens = [*output.prompt_ids, *output.response_ids]
        own = experts_of(sampler, tokens)[:-1]
        shares["native"].append(share(own, experts_of(trainer, tokens)[:-1]))
        ids, experts = (
            torch.nested.as_nested_tensor([row], layout=torch.jagged)
            for row in (torch.tensor(tokens), fields["routed_experts"])
        )
        batch = TensorDict({"input_ids": ids, "routed_experts": experts}, [1])
        engine = SimpleNamespace(_router_replay=replay, use_ulysses_sp=False)
        replay.begin_replay()
        VeOmniEngineWithLMHead._prepare_router_replay_inputs(engine, batch, {"pad_size": 0})
        shares["replayed"].append(share(own, experts_of(trainer, tokens)[:-1]))
        assert replay.num_fired == replay.num_targets
        replay.clear()
    counted = compute_rollout_moe_load_balance_metrics(
        fields["routed_experts"][None], fields["response_mask"][None], 8
    )
    dtype = str(fields["routed_experts"].dtype)
    return {**shares, "dtype": dtype, "shape": [*fields["routed_experts"].shape], **counted}


def share(own: "np.ndarray[Any, Any]", others: "np.ndarray[Any, Any]") -> float:
    """Return the share of positions and layers whose experts are the same."""
    return float((np.sort(own) == np.sort(others)).all(-1).mean())


if __name__ == "__main__":
    found = asyncio.run(images(Path(sys.argv[2])) if sys.argv[1] == "images" else routes())
    sys.stdout.write(json.dumps(found, default=float) + "\n")
