"""YAML by version 1.2's core schema, in which only true and false are booleans.

`Off` and `no` are text, as are `22:00` and `2026-01-01`; `1e9` is a number; a duplicate key is an
error. PyYAML alone reads version 1.1, where they are False, 1320, a date and text.
"""

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
)


class CoreLoader(yaml.SafeLoader):
    """PyYAML loader of YAML 1.2's core schema, which refuses duplicate keys; anchors and tags are
    as in SafeLoader.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's name and type

    def construct_yaml_int(self, node: Any) -> int:  # noqa: ANN401 - untyped in PyYAML
        text = str(self.construct_scalar(node))
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:  # noqa: ANN401
        keys: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.value in keys:
                what = f"the key {key_node.value} is given twice"
                raise ConstructorError(None, None, what, key_node.start_mark)
            if isinstance(key_node, yaml.ScalarNode):
                keys.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


for _name, _pattern, _first in _SCALARS:
    CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))
CoreLoader.add_implicit_resolver(_TAG + "null", re.compile(r"^$"), [""])
CoreLoader.add_constructor(_TAG + "int", CoreLoader.construct_yaml_int)


def constructed(node: yaml.Node) -> Any:  # noqa: ANN401 - whatever the file says
    """Return the Python value of a parsed YAML node. Raises yaml.YAMLError."""
    return CoreLoader("").construct_document(node)


def documents(path: Path) -> list[tuple[Any, yaml.Node]]:
    """Return the value of each document of a YAML or JSON file with its node, without empty ones.

    Raises OSError, and ValueError for invalid YAML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            # JSON has tabs between its values alone, where YAML has none.
            text = text.replace("\t", " ")
        nodes = list(yaml.compose_all(text, Loader=CoreLoader))
        found = [(constructed(node), node) for node in nodes if node is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValueError(f"{line}{getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return [each for each in found if each[0] is not None]


def line_of(node: yaml.Node, path: Sequence[str | int]) -> int:
    """Return the line, from 1, of the value at a path of keys and indices below a node; of the
    last value on the way that is there, if the path goes on beyond it.
    """
    line = node.start_mark.line + 1
    for part in path:
        inner: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    line, inner = key.start_mark.line + 1, value
        elif isinstance(node, yaml.SequenceNode) and part in range(len(node.value)):
            inner = node.value[part]
            line = inner.start_mark.line + 1
        if inner is None:
            break
        node = inner
    return line
