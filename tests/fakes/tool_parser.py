"""A tool parser of one's own, as `--tool-call-parser MODULE:CLASS` takes it."""

import json
import re
from types import SimpleNamespace
from typing import Any

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
