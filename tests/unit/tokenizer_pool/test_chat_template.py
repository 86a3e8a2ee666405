"""Conversations become the prompts that `transformers` makes of them."""

import json
from typing import Any

import jinja2
import pytest

from rose.tokenizer_pool.conversation import TemplateError
from rose.tokenizer_pool.worker import render, template_environment

TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>\n  {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "blocks": "{% for m in messages %}\n  {%- if m.role == 'user' %}\n[{{ m.content }}]\n"
    "  {% else %}\n{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}\n{% endif %}"
    "{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}",
    "json": "{{ messages[-1].content | tojson }}{{ messages | tojson }}{{ thinking }}"
    "{{ messages | tojson(indent=2) }}",
    "spaced": "{% for m in messages %}{{ m.content }}  \n{% endfor %}{{ bos_token }}{{ nothing }}",
}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi <é> & 'x'"}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b \n"}],
    [{"role": "user", "content": str(k)} for k in range(9)],
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "thinking": True}


def ours(template: str, talk: list[dict[str, Any]], continues: bool, max_chars: int = 9_999) -> str:
    return render(
        template_environment().from_string(template),
        json.loads(json.dumps(talk)),
        VARIABLES,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        max_chars=max_chars,
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("continues", [False, True])
def test_a_prompt_is_what_transformers_renders(
    template: str, talk: list[dict[str, Any]], continues: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        wanted, _ = render_jinja_template(
            [json.loads(json.dumps(talk))],
            chat_template=template,
            continue_final_message=continues,
            add_generation_prompt=not continues,
            **VARIABLES,
        )
    except ValueError:
        with pytest.raises(TemplateError):
            ours(template, talk, continues)
    else:
        assert ours(template, talk, continues) == wanted[0]


def test_content_in_blocks_is_continued_at_its_last_text() -> None:
    talk = [{"role": "user", "content": [{"text": "a"}, {"image": "x"}, {"text": "b"}]}]
    template = "{% for b in messages[0].content %}{{ b.text }}{% endfor %}!"
    assert ours(template, talk, continues=True) == "ab"


def test_a_prompt_that_grows_too_long_is_stopped_on_its_way() -> None:
    endless = (
        "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="longer than 1000 characters"):
        ours(endless, TALKS[0], continues=False, max_chars=1_000)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ ().__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(100001) %}{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    with pytest.raises((jinja2.TemplateError, OverflowError)):
        ours(template, TALKS[0], continues=False)


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"content": 5}, {"content": []}, {"content": ["x"]}]
)
def test_a_message_without_text_cannot_be_continued(message: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        ours("{{ messages[0].content }}", [message], continues=True)
