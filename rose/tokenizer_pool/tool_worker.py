"""`python -m rose.tokenizer_pool.tool_worker`: process that finds tool calls in outputs.

It speaks as `worker` does, and parses with vLLM's own tool parsers: they are written for one model
each, and read any output of a policy in training. Importing vLLM takes seconds and hundreds of
megabytes, so only gateways with `--tool-call-parser` have such processes.

A parser is one of vLLM's by name, or `MODULE:CLASS` of one's own: an object made of a tokenizer
whose `extract_tool_calls(text, request)` answers as vLLM's do. Its `request` has `tools`, a list of
objects, and `tool_choice`.
"""

import importlib
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from rose.tokenizer_pool.worker import (
    Done,
    FoundCall,
    ParseTools,
    ToolSetup,
    WorkerService,
    serve,
    unpacked,
)

_MESSAGES = [{"role": "user", "content": "-"}]


class ToolService(WorkerService):
    """Service that finds tool calls in outputs with one parser.

    Raises ValueError or ImportError for an unknown one.
    """

    too_large = "the output needs more memory than one may have"

    def __init__(self, setup: ToolSetup) -> None:
        self._own = ":" in setup.parser
        self._parser: Any = _own(setup.parser) if self._own else _of_vllm(setup.parser)
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(setup.folder, local_files_only=True)

    def _subject(self, job: ParseTools) -> str:
        return "tool calls cannot be found"

    def _do(self, job: ParseTools) -> Done:
        tools = msgspec.json.decode(job.tools)
        request, skip = self._request(tools)
        text = self._tokenizer.decode(unpacked(job.token_ids), skip_special_tokens=skip)
        if job.stop is not None:
            at = text.rfind(job.stop)
            text = text if at < 0 else text[: at + len(job.stop) * job.include_stop]
        found = self._made(tools, request).extract_tool_calls(text, request)
        if not found.tools_called:
            return Done(text=found.content if found.content is not None else text)
        calls = [
            FoundCall(call.function.name, call.function.arguments) for call in found.tool_calls
        ]
        return Done(text=found.content or "", calls=calls)

    def _request(self, tools: Sequence[Any]) -> tuple[Any, bool]:
        """Return the request for a parser, and True if its text is to have no special tokens."""
        if self._own:
            return SimpleNamespace(tools=tools, tool_choice="auto"), False
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=_MESSAGES, tools=tools, tool_choice="auto")
        request = self._made(request.tools, request).adjust_request(request)
        return request, bool(request.skip_special_tokens)

    def _made(self, tools: Sequence[Any], request: Any) -> Any:  # noqa: ANN401 - a parser
        """Return a new parser for a job, since a parser keeps its state."""
        if self._own or len(inspect.signature(self._parser).parameters) < 2:
            return self._parser(self._tokenizer)
        del tools
        return self._parser(self._tokenizer, request.tools)


def _own(name: str) -> Any:  # noqa: ANN401 - a class
    module, _, path = name.partition(":")
    return getattr(importlib.import_module(module), path)


def _of_vllm(name: str) -> Any:  # noqa: ANN401 - a class
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager.get_tool_parser(name)


if __name__ == "__main__":
    serve(ToolSetup, ToolService)
