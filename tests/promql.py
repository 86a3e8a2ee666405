"""Names in a PromQL expression: its metrics with their labels, and the labels it groups by.

No parser: promtool is that, where it is installed. This finds the names in a millisecond.
"""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
    (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<range>\[[^\]]*\])
  | (?P<number>\d[\w.]*)
  | (?P<word>[A-Za-z_:$][\w:]*)
  | (?P<sign>=~|!~|!=|==|>=|<=|[^\s\w])
    """,
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "start", "end", *_GROUPING}


@dataclass
class Asked:
    """metrics: labels that stand in the braces of each; grouped: labels of by, on and the like."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)


def asked_by(expression: str) -> Asked:
    """The names in an expression. Raises ValueError for brackets that do not match."""
    tokens = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(expression)]
    _check_brackets([text for kind, text in tokens if kind == "sign"], expression)
    asked = Asked()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "word":
            continue
        if text in _GROUPING and following == "(":
            end = next(n for n in range(at, len(tokens)) if tokens[n][1] == ")")
            asked.grouped.update(t for k, t in tokens[at:end] if k == "word")
            at = end
        elif text not in _WORDS and following != "(" and following not in _GROUPING:
            labels = asked.metrics.setdefault(text, set())
            if following == "{":
                end = next(n for n in range(at, len(tokens)) if tokens[n][1] == "}")
                labels.update(t for k, t in tokens[at:end] if k == "word")
                at = end
    return asked


def _check_brackets(signs: list[str], expression: str) -> None:
    opened: list[str] = []
    for sign in signs:
        if sign in "([{":
            opened.append({"(": ")", "[": "]", "{": "}"}[sign])
        elif sign in ")]}" and (not opened or opened.pop() != sign):
            raise ValueError(f"brackets do not match: {expression}")
    if opened:
        raise ValueError(f"brackets do not match: {expression}")
