"""Names inside an engine that ROSE's adapters use, and whether a version of the engine has them.

None of these surfaces is public. Each is declared once, beside the adapter that uses it, as a text:

    module:name                    a class or function of the engine's package
    module:Class.method(a, b)      a function that takes parameters a and b
    module:Class[a, b|c]           a class whose instances have the attribute a, and b or c

`missing` reads source files and imports none of them, so it also judges a wheel that was only
unpacked, for a GPU or not. A version that ROSE is tested with is not probed.
"""

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

from executor.errors import ExecutorError

VERSIONS: Final = "ROSE_ENGINE_VERSIONS"
"""Environment variable: `probed` (default) or `tested`, which refuses versions not tested with."""
_SURFACE = re.compile(
    r"(?P<module>[\w.]+):(?P<name>[\w.]+)(?:\((?P<takes>[\w, ]*)\))?(?:\[(?P<has>[\w,| ]*)\])?"
)
_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Support(StrEnum):
    """Support of an engine's version: tested with, or only probed for what ROSE uses."""

    TESTED = "tested"
    PROBED = "probed"


@dataclass(frozen=True, slots=True)
class EngineVersions:
    """Versions of one engine: `tested` ones, and the window of those that may be probed.

    window: the first release inside, and the first beyond. package: name of its top module.
    """

    name: str
    package: str
    tested: tuple[str, ...]
    window: tuple[str, str]

    def support(
        self,
        version: str,
        root: Path,
        surfaces: Iterable[str],
        environ: Mapping[str, str] = os.environ,
    ) -> Support:
        """Return the support of a version whose package lies in the folder `root`.

        Raises ExecutorError for one outside of the window, one that lacks any of `surfaces`, and,
        if the environment allows tested versions alone, any other.
        """
        # The part after a plus names the device for which it was built.
        public = version.partition("+")[0]
        if public in self.tested:
            return Support.TESTED
        install = f"install one of {', '.join(self.tested)}"
        first, beyond = map(_release, self.window)
        if not first <= _release(public) < beyond:
            between = f"{self.window[0]} up to before {self.window[1]}"
            raise ExecutorError(
                f"ROSE works with {self.name} {between}, and this is {version}; {install}"
            )
        if environ.get(VERSIONS) == Support.TESTED:
            raise ExecutorError(
                f"ROSE is not tested with {self.name} {version}; {install}, or leave out {VERSIONS}"
            )
        if lacks := missing(root, surfaces):
            raise ExecutorError(f"{self.name} {version} has no {lacks[0]}; {install}")
        return Support.PROBED


def missing(root: Path, surfaces: Iterable[str]) -> list[str]:
    """Return what the package in the folder `root` lacks, as texts such as `Scheduler.running`."""
    return [lack for surface in surfaces for lack in _lacking(root, surface)]


def _lacking(root: Path, surface: str) -> Iterator[str]:
    match = _SURFACE.fullmatch(surface)
    if match is None:
        raise ValueError(f"{surface!r} is no surface")
    name = match["name"]
    found = _definition(root, match["module"], name.split("."))
    if found is None:
        yield f"{name} in {match['module']}"
        return
    takes, has = _parameters(found), _attributes(found)
    for parameter in _words(match["takes"]):
        if parameter not in takes:
            yield f"parameter {parameter} of {name}"
    for attribute in _words(match["has"]):
        if has.isdisjoint(attribute.split("|")):
            yield f"{name}.{attribute.replace('|', ' or ')}"


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _release(version: str) -> tuple[int, ...]:
    match = _RELEASE.match(version)
    return tuple(map(int, match[0].split("."))) if match else ()


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _definition(root: Path, module: str, names: Sequence[str]) -> _Definition | None:
    path = root.joinpath(*module.split("."))
    tree = _tree(path.with_suffix(".py")) or _tree(path / "__init__.py")
    found: ast.AST | None = tree
    for name in names:
        inside = () if found is None else _inside(found)
        found = next((each for each in inside if each.name == name), None)
    return found if isinstance(found, _Definition) else None


def _inside(node: ast.AST) -> Iterator[_Definition]:
    """Yield the classes and functions in a node's body, and those under an `if` or `try` there."""
    for each in getattr(node, "body", ()):
        if isinstance(each, _Definition):
            yield each
        elif isinstance(each, ast.If | ast.Try | ast.With):
            yield from _inside(each)


def _parameters(node: _Definition) -> set[str]:
    if isinstance(node, ast.ClassDef):
        made = next((each for each in _inside(node) if each.name == "__init__"), None)
        return _attributes(node) if made is None else _parameters(made)
    arguments = node.args
    return {each.arg for each in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}


def _attributes(node: _Definition) -> set[str]:
    """Return the names that a class defines, annotates or assigns to `self`."""
    found: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found.update(each.id for each in targets if isinstance(each, ast.Name))
    return found
