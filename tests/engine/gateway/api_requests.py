"""Generated requests of OpenAI's two APIs, and what must be alike in two servers' answers."""

import json
import random
from collections import Counter
from typing import Any

import aiohttp

from tests.harness.conversations import message

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXTS = ("hello world", " a b", "hé hello.", "日本 a", "world", "  two  ", "a\nb\tb", "x\u0301")
STOPS = ("l", "h", "o w", " ", "é", "\ufffd", "##", "hello", "ab", "\x00", "b a")


def _prompt(rng: random.Random, tokens: int, whole: int) -> Any:
    # Behind half a character vLLM repeats the prompt in the output: ROSE does not.
    ids = [*(rng.randrange(tokens) for _ in range(rng.randint(0, 30))), whole]
    text = "".join(rng.choices(TEXTS, k=rng.randint(1, 4)))
    kinds: list[Any] = [text, text, ids, ids, [text, "b"], [ids, [1, whole]], [text, ids]]
    bad: list[Any] = ["", [], [[]], None, 5, {"a": 1}, [1, "a"], [-1], [tokens + 900], [1.5]]
    return rng.choice(bad if rng.random() < 0.06 else kinds)


def _options(rng: random.Random, tokens: int) -> dict[str, Any]:
    some = lambda: [rng.randrange(tokens) for _ in range(3)]  # noqa: E731
    all_options: dict[str, Any] = {
        "stop": rng.choice([rng.choice(STOPS), rng.sample(STOPS, 2), [], None]),
        "include_stop_str_in_output": rng.random() < 0.7,
        "stop_token_ids": some(),
        "min_tokens": rng.choice([0, 1, 5]),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "n": 2,
        "top_k": rng.choice([-1, 0, 1, 20]),
        "top_p": rng.choice([0.1, 0.9, 1.0]),
        "min_p": 0.05,
        "presence_penalty": rng.choice([-1.0, 0.5]),
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "allowed_token_ids": some(),
        "user": "me",
        "spaces_between_special_tokens": False,
        "logit_bias": {"3": 4.0},
        "bad_words": ["hello"],
        "truncate_prompt_tokens": 3,
        "echo": True,
        "prompt_logprobs": 1,
        "priority": rng.choice([0, 1]),
    }
    # With values that no field takes, or that it takes by a way of its own.
    odd = {
        "max_tokens": [0, -1, "4", 4.0, 4.5, True, 10**9, None, [4]],
        "temperature": [-1, "1", "x", None, 2.5, [1]],
        "top_p": [0, 2, -1, "x"],
        "top_k": [-2, 1.5, "x"],
        "n": [0, -1, "2", None, 10**6],
        "stop": [5, [5], [""], {"a": 1}],
        "seed": ["x", 1.5],
        "stream": ["yes", "true", 1, None, 7],
        "stop_token_ids": [5, ["a"], [-1]],
        "min_tokens": [-1, 99, "x"],
        "presence_penalty": [3, "x"],
        "repetition_penalty": [0, -1, "x"],
        "allowed_token_ids": [[], ["a"], [10**6]],
        "min_p": [2, "x"],
        "model": ["other", 7, None],
    }
    chosen = {k: all_options[k] for k in rng.sample(sorted(all_options), rng.randrange(4))}
    if rng.random() < 0.15:
        name = rng.choice(sorted(odd))
        chosen[name] = rng.choice(odd[name])
    return chosen


def request(rng: random.Random, tokens: int, whole: int) -> tuple[str, dict[str, Any]]:
    """A path and a body; `tokens`: the size of the vocabulary; `whole`: one that ends no half."""
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 4, 8, 16]),
        "temperature": rng.choice([0.0, 0.0, 1.0]),
        "seed": rng.randrange(1_000),
        "return_token_ids": True,
    }
    if rng.random() < 0.3:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.5:
        body |= {"prompt": _prompt(rng, tokens, whole)} | _options(rng, tokens)
        body |= rng.choice([{}, {}, {"logprobs": 0}, {"logprobs": 1}, {"logprobs": 5}])
        body |= rng.choice([{}] * 6 + [{"suffix": "x"}, {"add_special_tokens": False}])
        return COMPLETIONS, body
    body["messages"] = [message(rng) for _ in range(rng.randrange(1, 4))]
    body |= _options(rng, tokens)
    body |= rng.choice([{}, {}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 1}])
    body |= rng.choice(
        [{}] * 6
        + [
            {"chat_template_kwargs": {"effort": "low"}},
            {"documents": [{"title": "a", "text": "b"}]},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"max_completion_tokens": 5},
            {"reasoning_effort": "low"},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        ]
    )
    return CHAT, body


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and answer; a stream's choices are put together."""
    async with http.post(url, json=body) as response:
        text = await response.text()
        if not response.content_type.startswith("text/event-stream"):
            return response.status, json.loads(text)
        return response.status, _together(text)


def _together(text: str) -> Any:
    """The answer whose parts a stream's events are."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    whole: dict[int, dict[str, Any]] = {}
    usage = None
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return event
        usage = event.get("usage") or usage
        for part in event["choices"]:
            choice = whole.setdefault(
                part["index"], {"index": part["index"], "text": "", "token_ids": []}
            )
            choice["text"] += part.get("text") or (part.get("delta") or {}).get("content") or ""
            choice["token_ids"] += part.get("token_ids") or ()
            choice |= {k: part[k] for k in ("finish_reason", "stop_reason") if part.get(k)}
    return {"choices": [whole[k] for k in sorted(whole)], "usage": usage}


def comparable(answer: Any) -> Any:
    """Text, tokens, ends, logprobs and counts of an answer."""
    choices = [
        {
            "text": c.get("text") or (c.get("message") or {}).get("content") or "",
            "tokens": c.get("token_ids"),
            "end": (c.get("finish_reason"), c.get("stop_reason")),
            "logprobs": _rounded(c.get("logprobs")),
        }
        for c in answer["choices"]
    ]
    usage = answer.get("usage") or {}
    return choices, {k: usage.get(k) for k in ("prompt_tokens", "completion_tokens")}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        # vLLM adds the likeliest token to the sampled one; its log probability is not ROSE's.
        return {k: _rounded(v) for k, v in value.items() if k not in ("top_logprobs", "token_id")}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


class Comparison:
    """Differences between two servers: ours may refuse more, by name."""

    def __init__(self) -> None:
        self.alike: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.differing: list[str] = []

    def add(self, path: str, body: dict[str, Any], theirs: Any, ours: Any) -> None:
        """One request's two answers, each a status and a body."""
        # vLLM finds some faults only when a stream has begun.
        both = theirs, ours
        statuses = [400 if a[0] == 200 and "error" in a[1] else a[0] for a in both]
        # If a request has two faults, either may be reported.
        alike = statuses[0] == statuses[1] or statuses == [400, 404]
        if statuses[0] == 200 and alike:
            alike = comparable(theirs[1]) == comparable(ours[1])
        if alike:
            self.alike[statuses[0]] += 1
            return
        if statuses == [200, 400]:
            said = ours[1]["error"]
            fields = [name for name in body if name in f"{said.get('param')} {said['message']}"]
            if fields:
                self.refused[fields[-1]] += 1
                return
        answers = [comparable(a[1]) if a[0] == 200 and "error" not in a[1] else a for a in both]
        self.differing.append(
            f"{path} {json.dumps(body)}\n  vLLM {answers[0]}\n  ROSE {answers[1]}"
        )
