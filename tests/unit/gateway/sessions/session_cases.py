"""A gateway with tools, whose template closes an assistant's message with a token."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rose.gateway import Gateway
from tests.fakes.replica import StandInReplica
from tests.fakes.tool_parser import in_process
from tests.harness.tokenizer_kinds import ids_of, save_byte_tokenizer, text_of
from tests.unit.gateway.gateway_cases import serving
from tests.unit.gateway.wire_cases import get

EOS = 256
# Calls are written as the stand-in parser reads them; thoughts of earlier messages are left out.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SESSION = {"X-Session-ID": "s"}


def save_session_tokenizer(folder: Path) -> Path:
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@asynccontextmanager
async def sessions_served(
    tokenizer: Path, replica: StandInReplica | None = None, **settings: Any
) -> AsyncIterator[tuple[StandInReplica, Gateway, Any]]:
    limits = {"tokenizer": tokenizer, "max_model_len": 2_000, "text_timeout_s": 30.0, **settings}
    replica = replica or StandInReplica(version=3)
    async with serving(replica, "own-0", **limits) as (replica, gw, session):
        assert gw._codec is not None
        gw._codec._tool_pool = in_process(tokenizer)
        yield replica, gw, session


def writes(replica: StandInReplica, text: str, *, ends: bool = True) -> int:
    """The replica's next outputs are this text, and the end of sequence; returns its length."""
    replica.script = ids_of(text) + [EOS] * ends
    replica.stop_after = len(replica.script) if ends else None
    return len(replica.script)


def prompt_text(replica: StandInReplica, at: int = -1) -> str:
    """Text of the prompt that the replica got."""
    tokens = replica.requests[at]["token_ids"]
    parts = [text_of([token]) if token != EOS else "<eos>" for token in tokens]
    return "".join(parts).replace("Ċ", "\n")


async def trajectories(session: Any, name: str = "s") -> list[Any]:
    answer = await get(session, f"/rose/v1/sessions/{name}")
    assert answer["session_id"] == name
    found: list[Any] = answer["trajectories"]
    return found
