"""A tool parser of one's own, as `--tool-call-parser MODULE:CLASS` takes it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from rose.tokenizer_pool.pool import TextRefused
from rose.tokenizer_pool.tool_worker import ToolService
from rose.tokenizer_pool.worker import Done, ParseTools, Refused, ToolSetup

PARSER = "tests.fakes.tool_parser:StandInToolParser"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
WROTE = 'ok <call>{"name": "f", "arguments": {"x": 1}}</call>'
CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)


class StandInToolParser:
    """Finds `<call>{"name": …, "arguments": {…}}</call>`; chokes on `<choke>`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def extract_tool_calls(self, text: str, request: Any) -> Any:
        """The calls of functions that the request offers."""
        if "<choke>" in text:
            raise ValueError("this is\nnot to be parsed")
        offered = {tool["function"]["name"] for tool in request.tools}
        found = [json.loads(each) for each in CALL.findall(text)]
        calls = [
            SimpleNamespace(
                function=SimpleNamespace(name=each["name"], arguments=json.dumps(each["arguments"]))
            )
            for each in found
            if each["name"] in offered
        ]
        content = CALL.sub("", text) or None
        return SimpleNamespace(tools_called=bool(calls), tool_calls=calls, content=content)


def in_process(folder: Path) -> Any:
    """Stands in for the pool of processes: vLLM's real one is an engine test's."""
    service = ToolService(ToolSetup(PARSER, str(folder), 0, 0.0))

    async def run(job: ParseTools) -> Done:
        answer = service.answer(job)
        if isinstance(answer, Refused):
            raise TextRefused(answer.message)
        return answer

    return SimpleNamespace(run=run, close=AsyncMock())
