"""Conversations of every shape that chat takes, generated; and templates that read them."""

import random
from typing import Any

TEMPLATES = {
    "text": """{% for m in messages %}<{{ m.role }}|{{ m.name }}>{{ m['content'] }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}[{{ f.name }}:
{{- f.arguments | tojson }}]{% endfor %}{{ m.reasoning_content or '' }}
{% endfor %}{{ documents }}{{ effort }}{% if add_generation_prompt %}<assistant>{% endif %}""",
    "parts": """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m['content'] %}({{ part.type }}:{{ part.text }}:{{ part.more }})
{%- endfor %}{% endif %}{{ m.tool_call_id }}
{% endfor %}""",
    "developer": """{% macro show(given) %}{% for each in given | list %}{{ each.text }};
{%- endfor %}{% endmacro %}{% set rest = messages[0:] %}{% for m in rest %}
{%- if m.role == 'developer' %}<dev {{ m.tools }}>{% endif %}{{ show(m.content) }}
{% endfor %}""",
    "system": """{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}
{%- for m in messages %}{% if not loop.first and m.role == 'system' %}
{{- raise_exception('a system message that is not the first') }}{% endif %}{{ m.content }}
{% endfor %}""",
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
BAD = [7, 1.5, True, {"text": "x"}, [7], [IMAGE]]


def part(rng: random.Random) -> Any:
    text = rng.choice(["hi", "", "two\nlines", "é{{ x }}", "x-anthropic-billing-header a\nrest"])
    return rng.choice(
        [
            {"type": "text", "text": text},
            {"type": "text", "text": text, "more": "field"},
            {"type": "refusal", "refusal": text},
        ]
    )


def call(rng: random.Random) -> Any:
    arguments = rng.choice(['{"a": 1}', "", "{bad", "[]", "42", '"s"', "null", '{"b": {"c": []}}'])
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def message(rng: random.Random) -> dict[str, Any]:
    role = rng.choice(["system", "user", "user", "assistant", "assistant", "tool", "developer"])
    content = rng.choice(["hello", "", [part(rng) for _ in range(rng.randrange(4))]])
    made: dict[str, Any] = {"role": role, "content": content}
    if rng.random() < 0.08:
        made["content"] = rng.choice(BAD)
    if role == "assistant":
        if rng.random() < 0.4:
            made["tool_calls"] = [call(rng) for _ in range(rng.randrange(3))]
            made["content"] = rng.choice([None, made["content"]])
        if rng.random() < 0.2:
            made[rng.choice(["reasoning", "reasoning_content"])] = "because"
    if role == "tool":
        made["tool_call_id"] = "c1"
    if rng.random() < 0.1:
        made["name"] = "bob"
    return made
