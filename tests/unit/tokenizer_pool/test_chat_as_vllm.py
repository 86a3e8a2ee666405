"""Conversations are rendered as vLLM's own functions render them, or both refuse."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

from rose.tokenizer_pool.worker import Chat, Done, Refused, Setup, TextService
from tests.engine.families.tiny_families import make_family
from tests.harness.conversations import TEMPLATES, message

GENERATED = 700


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("model")
    make_family("llama", folder)
    return ModelConfig(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True)


def by_vllm(
    config: ModelConfig, tokenizer: Any, template: str, messages: Any, more: dict[str, Any]
) -> str | None:
    """Return the prompt, None where vLLM answers 400."""
    try:
        asked = ChatCompletionRequest(model="m", messages=json.loads(json.dumps(messages)))
        form = resolve_chat_template_content_format(
            template, None, "auto", tokenizer, model_config=config
        )
        conversation, _, _ = parse_chat_messages(asked.messages, config, form)
        prompt: str = safe_apply_chat_template(
            config,
            tokenizer,
            conversation,
            tools=None,
            chat_template=template,
            tokenize=False,
            **more,
        )
    except (ValueError, TypeError, VLLMValidationError):
        return None
    return prompt


def setup(template: str | None, tool_template: str | None) -> Setup:
    return Setup(plain().to_str(), template, tool_template, {}, 100_000, 1 << 30, 10.0)


def plain() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_generated_conversations_are_rendered_alike(name: str, config: ModelConfig) -> None:
    template = TEMPLATES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain(), chat_template=template)
    service = TextService(setup(template, template))
    rng = random.Random(name)
    differing, answered = [], 0
    for _ in range(GENERATED):
        messages = [message(rng) for _ in range(rng.randrange(1, 5))]
        documents = rng.choice([None, [], [{"title": "a", "text": "b"}]])
        variables = rng.choice([{}, {"effort": "low"}])
        begins = rng.random() < 0.7
        goes_on = not begins and messages[-1]["role"] == "assistant" and rng.random() < 0.7
        asked = {"add_generation_prompt": begins, "continue_final_message": goes_on}
        more = {"documents": documents, **variables, **asked}
        expected = by_vllm(config, tokenizer, template, messages, more)
        job = Chat(json.dumps(messages).encode(), variables, documents=documents, **asked)
        ours: str | None
        try:
            ours = service._rendered(job, Done())
        except Exception:
            ours = None
        answered += expected is not None
        if ours != expected:
            differing.append((messages, expected, ours))
    assert not differing, (len(differing), differing[0])
    assert answered > GENERATED / 8
    assert isinstance(service.answer(Chat(b'[{"role": 1}]', {})), Refused)
    assert isinstance(service.answer(Chat(b'[{"role": "user", "content": "x"}]', {})), Done)


def test_tools_are_rendered_by_the_template_for_them() -> None:
    service = TextService(setup("plain", "{{ tools[0].function.name }}"))
    asked = b'[{"role": "user", "content": "x"}]'
    assert service._rendered(Chat(asked, {}), Done()) == "plain"
    tools = b'[{"type": "function", "function": {"name": "search"}}]'
    assert service._rendered(Chat(asked, {}, tools=tools), Done()) == "search"
    assert isinstance(TextService(setup(None, "tools")).answer(Chat(asked, {})), Refused)
