"""Names inside an engine that ROSE's adapters use, and whether a version of the engine has them.

None of these surfaces is public. Each is declared once, beside the adapter that uses it, as a text:

    module:name                    a class or function of the engine's package
    module:Class.method(a, b)      a function that takes parameters a and b
    module:Class[a, b|c]           a class whose instances have the attribute a, and b or c

`missing` reads source files and imports none of them, so it also judges a wheel that was only
unpacked, for a GPU or not. A version that ROSE is tested with is not probed.
"""

import ast
import importlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.util import find_spec
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

    @property
    def installed(self) -> str:
        """Name and version of the engine that is installed here; its name alone if none is."""
        try:
            return f"{self.name} {importlib.import_module(f'{self.package}.version').__version__}"
        except ImportError:
            return self.name

    def check(self, surfaces: Iterable[str], version: str | None = None) -> Support:
        """Return the support of the engine that is installed here, or of another `version` of it.

        A probed one is logged. Raises ExecutorError as `support` does.
        """
        if version is None:
            version = str(importlib.import_module(f"{self.package}.version").__version__)
        found = find_spec(self.package)
        roots = list(found.submodule_search_locations or ()) if found else []
        support = self.support(version, Path(roots[0] if roots else os.devnull), surfaces)
        if support is Support.PROBED:
            # Engines show the lines of their own loggers' children.
            logging.getLogger(f"{self.package}.rose").warning(
                "%s %s has what ROSE uses of it, and is not tested with ROSE", self.name, version
            )
        return support

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
    return list(_missing(root, tuple(surfaces)))


# Several parts of one engine ask for the same; its syntax trees are not kept.
@lru_cache(maxsize=16)
def _missing(root: Path, surfaces: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(lack for surface in surfaces for lack in _lacking(root, surface))
    finally:
        _tree.cache_clear()


def _lacking(root: Path, surface: str) -> Iterator[str]:
    match = _SURFACE.fullmatch(surface)
    if match is None:
        raise ValueError(f"{surface!r} is no surface")
    module, name = match["module"], match["name"]
    found = _definition(root, module, name.split("."))
    if found is None:
        yield f"{name} in {module}"
        return
    where, node = found
    takes = set(_parameters(root, where, node))
    has = set(_attributes(root, where, node))
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


@lru_cache(maxsize=256)
def _tree(root: Path, module: str) -> ast.Module:
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        try:
            return ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
    return ast.Module([], [])


def _definition(root: Path, module: str, names: Sequence[str]) -> tuple[str, _Definition] | None:
    """Return a class or function with the module that defines it; methods may be inherited."""
    first, *rest = names
    node = next((each for each in _inside(_tree(root, module)) if each.name == first), None)
    if node is None or not rest:
        return None if node is None else (module, node)
    for where, each in _lineage(root, module, node):
        for method in _inside(each):
            if method.name == rest[0]:
                return where, method
    return None


def _lineage(root: Path, module: str, node: _Definition) -> Iterator[tuple[str, _Definition]]:
    """Yield a class, and those of its bases that the engine's package defines, with their
    modules.
    """
    yield module, node
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        if isinstance(base, ast.Name):
            place = _imported(root, module, base.id)
            found = _definition(root, place, [base.id])
            if found is not None:
                yield from _lineage(root, *found)


def _imported(root: Path, module: str, name: str) -> str:
    """Return the module from which `module` imports a name: `module` itself if it does not."""
    for each in ast.walk(_tree(root, module)):
        if isinstance(each, ast.ImportFrom) and any(name == alias.name for alias in each.names):
            return (each.module or "").removeprefix(f"{root.name}.")
    return module


def _inside(node: ast.AST) -> Iterator[_Definition]:
    """Yield the classes and functions in a node's body, and those under an `if` or `try` there."""
    for each in getattr(node, "body", ()):
        if isinstance(each, _Definition):
            yield each
        elif isinstance(each, ast.If | ast.Try | ast.With):
            yield from _inside(each)


def _parameters(root: Path, module: str, node: _Definition) -> Iterator[str]:
    """Yield the parameters of a function, or of a class's constructor or fields."""
    if isinstance(node, ast.ClassDef):
        made = _definition(root, module, [node.name, "__init__"])
        yield from _attributes(root, module, node) if made is None else _parameters(root, *made)
        return
    arguments = node.args
    for each in arguments.posonlyargs + arguments.args + arguments.kwonlyargs:
        yield each.arg


def _attributes(root: Path, module: str, node: _Definition) -> Iterator[str]:
    """Yield the names that a class or a base of it defines, annotates or assigns to `self`."""
    for _, of in _lineage(root, module, node):
        for each in ast.walk(of):
            match each:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    yield name
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield name
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield name
                case ast.Assign(targets=targets):
                    yield from (each.id for each in targets if isinstance(each, ast.Name))
