"""Coding agents as they are released, each on a gateway: one task is one trajectory of tokens.

The policy is a stand-in that writes a call of the agent's own tool, and then the answer.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.replica import StandInReplica
from tests.harness.tokenizer_kinds import ids_of
from tests.unit.gateway.gateway_cases import base_url
from tests.unit.gateway.sessions.session_cases import (
    EOS,
    prompt_text,
    save_session_tokenizer,
    sessions_served,
    trajectories,
)

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(180)]
TASK = "what does note.txt say?"
CODEX = """model = "rose-policy"
model_provider = "rose"
web_search = "disabled"
[features]
multi_agent = false
[model_providers.rose]
name = "rose"
base_url = "URL/v1"
wire_api = "responses"
http_headers = { "X-Session-ID" = "s" }
"""


@dataclass(frozen=True, slots=True)
class Harness:
    """Agent's command, its further environment, and the call with which it reads a file."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    call: Mapping[str, object]


def claude(url: str, home: Path) -> Harness:
    bundled = find_spec("claude_agent_sdk")
    inside = [*(bundled.submodule_search_locations or ())] if bundled else []
    found = shutil.which("claude", path=os.pathsep.join([f"{at}/_bundled" for at in inside]))
    found = os.environ.get("ROSE_CLAUDE") or found or shutil.which("claude")
    if found is None:
        pytest.skip("claude is not there: pip install claude-agent-sdk, or name it in ROSE_CLAUDE")
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "-",
        "ANTHROPIC_CUSTOM_HEADERS": "X-Session-ID: s",
        "ANTHROPIC_MODEL": "rose-policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    call = {"name": "Bash", "arguments": {"command": "cat note.txt", "description": "read"}}
    return Harness((found, "-p", TASK, "--allowedTools", "Bash(cat:*)"), environment, call)


def codex(url: str, home: Path) -> Harness:
    found = os.environ.get("ROSE_CODEX") or shutil.which("codex")
    if found is None:
        pytest.skip("codex is not there: npm install @openai/codex, or name it in ROSE_CODEX")
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX.replace("URL", url))
    call = {"name": "exec_command", "arguments": {"cmd": "cat note.txt"}}
    return Harness((found, "exec", "--skip-git-repo-check", TASK), {}, call)


class ScriptedReplica(StandInReplica):
    """Replica whose outputs are `outputs`, one after the other."""

    outputs: list[str]

    async def _stream(self, http: Any, write: Any, asked: dict[str, Any]) -> bool:
        self.script = [*ids_of(self.outputs.pop(0)), EOS]
        self.stop_after = len(self.script)
        return await super()._stream(http, write, asked)


@pytest.mark.parametrize("agent", [claude, codex])
async def test_a_task_of_a_coding_agent_is_one_trajectory(agent: Any, tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    (work / "note.txt").write_text("hello")
    tokenizer = save_session_tokenizer(tmp_path / "tokenizer")
    limits = {"max_model_len": 1 << 20, "max_body_bytes": 64 << 20}
    replica = ScriptedReplica()
    async with sessions_served(tokenizer, replica, **limits) as (_, gateway, session):
        harness = agent(base_url(gateway), home)
        called = f"I look. <call>{json.dumps(harness.call)}</call>"
        replica.outputs = [called, "It says hello."]
        environment = {**os.environ, "HOME": str(home), **harness.environment}
        environment.pop("PYTHONPATH", None)
        process = await asyncio.create_subprocess_exec(
            *harness.command,
            cwd=work,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        (found,) = await trajectories(session)
    assert b"It says hello." in printed, printed
    assert sum(found["loss_mask"]) == len(called) + len("It says hello.") + 2
    assert len(found["turns"]) == 2
    assert f"<assistant>{called}<eos>\n<tool>" in prompt_text(replica)
    assert found["token_ids"][: found["turns"][1]["start"]] == replica.requests[-1]["token_ids"]
