"""Scenario files: YAML or JSON, read with the line and key of whatever is wrong.

    setup: frozen_lake-8b        a set-up by name (setups.py), or `cluster`, `trainer`, `rollouts`
    until_s: 1800
    trainer: {steps: 3, max_staleness: 1}
    traffic: {azure: code, requests_per_s: 24}
    options: {slack_share: 0.3}

What a set-up says holds unless the file says otherwise. Unknown keys are refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from rose.core_yaml import CoreLoader, constructed
from rose.errors import ConfigError
from rose.simulation.calibration import published_engine, read_profile
from rose.simulation.cluster import (
    ClusterError,
    ClusterSpec,
    DedicatedPool,
    EngineSpec,
    GuestSpec,
    HostPool,
    Links,
)
from rose.simulation.policies.catalog import CONSTANTS, SETTINGS
from rose.simulation.scenario import Scenario
from rose.simulation.setups import SETUPS, setup_scenario
from rose.simulation.trainer import TrainerSpec
from rose.simulation.workload import RolloutWorkload, ServingWorkload
from rose.simulation.workloads import (
    ALFWORLD,
    AZURE_CODE_2023,
    AZURE_CONVERSATION_2023,
    CODING_SESSIONS,
    FROZEN_LAKE,
    SessionFile,
    TraceTraffic,
)
from slo import PRESETS, SloSpec, TargetError

T = TypeVar("T")
AZURE = {"code": AZURE_CODE_2023, "conversation": AZURE_CONVERSATION_2023}
ENVIRONMENTS: Mapping[str, RolloutWorkload] = {
    "frozen_lake": FROZEN_LAKE,
    "alfworld": ALFWORLD,
    "coding_sessions": CODING_SESSIONS,
}


class Section:
    """One mapping of a file: keys are taken one by one, and what is left at the end is unknown."""

    def __init__(self, file: Path, node: yaml.Node, key: str = "") -> None:
        self.file = file
        self.key = key
        self.line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise self.wrong("", "give a mapping of keys to values")
        self._nodes: dict[str, yaml.Node] = {}
        for name_node, value in node.value:
            name = str(name_node.value)
            if name in self._nodes:
                raise self.wrong(name, "it is given twice", name_node)
            self._nodes[name] = value
        self._known: list[str] = []

    def wrong(self, key: str, what: str, node: yaml.Node | None = None) -> ConfigError:
        """Return the error about a key, with its file and line."""
        line = node.start_mark.line + 1 if node is not None else self.line_of(key)
        path = ".".join(part for part in (self.key, key) if part)
        return ConfigError(f"{self.file}:{line}: {path or 'the file'}: {what}")

    def line_of(self, key: str) -> int:
        """Line of a key, of the section where it has none."""
        nodes = getattr(self, "_nodes", {})
        return int(nodes[key].start_mark.line + 1) if key in nodes else self.line

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def section(self, key: str) -> "Section | None":
        """A mapping inside, None where the key is not there."""
        self._known.append(key)
        node = self._nodes.get(key)
        path = f"{self.key}.{key}" if self.key else key
        return None if node is None else Section(self.file, node, path)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """A scalar; `default` where the key is not there."""
        self._known.append(key)
        node = self._nodes.get(key)
        if node is None:
            return default
        try:
            said = constructed(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self.wrong(key, f"it cannot be read: {error}") from None
        if kind is float and isinstance(said, int) and not isinstance(said, bool):
            said = float(said)
        if kind is str and isinstance(said, int | float) and not isinstance(said, bool):
            said = str(said)
        if isinstance(said, bool) is not (kind is bool) or not isinstance(said, kind):
            raise self.wrong(key, f"{said!r} is no {_NAMES.get(kind, kind.__name__)}")
        if isinstance(said, float) and not math.isfinite(said):
            raise self.wrong(key, f"{said} is no finite number")
        return said

    def needed(self, key: str, kind: type[T]) -> T:
        """A scalar that has to be there."""
        said = self.value(key, kind)
        if said is None:
            raise self.wrong(key, "it is missing")
        return said

    def choice(self, key: str, known: Mapping[str, T]) -> T:
        """One of several things by its name."""
        name = self.needed(key, str)
        if name not in known:
            raise self.wrong(key, f"there is no {name!r}{_hint(name, known)}")
        return known[name]

    def fill(self, kind: type[T], base: T | None = None, **given: object) -> T:
        """A dataclass of scalars from the keys named as its fields, on top of `base`."""
        hints = get_type_hints(kind)
        values: dict[str, Any] = dict(given)
        for field in fields(kind):  # type: ignore[arg-type]
            if field.name in values:
                continue
            hint = hints[field.name]
            plain = hint if hint in (int, float, bool, str) else None
            if isinstance(hint, type) and issubclass(hint, StrEnum):
                name = self.value(field.name, str)
                if name is not None:
                    choices = {each.value: each for each in hint}
                    if name not in choices:
                        raise self.wrong(field.name, f"{name!r}{_hint(name, choices)}")
                    values[field.name] = choices[name]
            elif plain is not None:
                said = self.value(field.name, plain)
                if said is not None:
                    values[field.name] = said
                elif base is None and field.default is MISSING:
                    raise self.wrong(field.name, "it is missing")
        self.finish()
        return self.made(lambda: kind(**values) if base is None else replace(base, **values))  # type: ignore[type-var]

    def made(self, make: Callable[[], T]) -> T:
        """Return the result of `make`; its error gets the line of the key that it names."""
        try:
            return make()
        except ClusterError as error:
            raise self.wrong(error.key, str(error).partition(": ")[2]) from error
        except (TargetError, ValueError) as error:
            raise self.wrong("", str(error)) from error

    def finish(self) -> None:
        """Refuse what nobody took."""
        for key, node in self._nodes.items():
            if key not in self._known:
                raise self.wrong(key, f"unknown key{_hint(key, self._known)}", node)


_NAMES: Mapping[type, str] = {int: "whole number", float: "number", bool: "true or false"}


def _hint(word: str, known: Mapping[str, object] | list[str]) -> str:
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file. Raises ConfigError with file, line and key."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=CoreLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}{line}: it is no YAML: {what}") from error
    if node is None:
        raise ConfigError(f"{path}:1: the file is empty; give at least `setup: NAME`")
    return _scenario(Section(path, node), path)


def _scenario(top: Section, path: Path) -> Scenario:
    base = top.choice("setup", SETUPS) if "setup" in top else None
    top.value("setup", str)
    scenario = setup_scenario(base) if base is not None else None
    name = top.value("name", str, scenario.name if scenario else path.stem) or path.stem
    cluster = _cluster(top.section("cluster"), scenario, top)
    trainer_section = top.section("trainer")
    if trainer_section is not None:
        trainer = trainer_section.fill(TrainerSpec, scenario.trainer if scenario else None)
    elif scenario is not None:
        trainer = scenario.trainer
    else:
        raise top.wrong("trainer", "it is missing; give it, or a setup")
    rollouts_section = top.section("rollouts")
    if rollouts_section is not None:
        rollouts = _rollouts(rollouts_section, path)
    elif scenario is not None:
        rollouts = scenario.rollouts
    else:
        raise top.wrong("rollouts", "it is missing; give it, or a setup")
    traffic_section = top.section("traffic")
    traffic = scenario.traffic if scenario else None
    if traffic_section is not None:
        traffic = _traffic(traffic_section, path)
    usual = scenario.until_s if scenario else 3_600.0
    until_s = top.value("until_s", float, usual) or usual
    slice_s = top.value("slice_s", float, 10.0) or 10.0
    for key, value in (("until_s", until_s), ("slice_s", slice_s)):
        if value <= 0:
            raise top.wrong(key, f"{value}; give a time above 0")
    options = _options(top.section("options"))
    top.finish()
    return Scenario(
        name=name,
        cluster=cluster,
        trainer=trainer,
        rollouts=rollouts,
        traffic=traffic,
        until_s=until_s,
        slice_s=slice_s,
        assumptions=scenario.assumptions if scenario else (),
        options=options,
    )


def _options(section: Section | None) -> dict[str, float]:
    if section is None:
        return {}
    known = [*CONSTANTS, *SETTINGS]
    options = {}
    for name in known:
        said = section.value(name, float)
        if said is not None:
            options[name] = said
    section.finish()
    return options


def _cluster(section: Section | None, base: Scenario | None, top: Section) -> ClusterSpec:
    if section is None:
        if base is None:
            raise top.wrong("cluster", "it is missing; give it, or a setup")
        return base.cluster
    before = base.cluster if base is not None else None
    dedicated = _dedicated(section, before)
    serving = before.serving if before is not None else None
    serving_section = section.section("serving")
    if serving_section is not None:
        serving = _serving(serving_section, serving)
    links_section = section.section("links")
    links = before.links if before is not None else Links()
    if links_section is not None:
        links = links_section.fill(Links, links)
    usual = before.training_cards if before is not None else None
    cards = section.value("training_cards", int, usual)
    if cards is None:
        raise section.wrong("training_cards", "it is missing")
    section.finish()
    return section.made(lambda: ClusterSpec(dedicated, cards, serving, links))


def _dedicated(section: Section, before: ClusterSpec | None) -> DedicatedPool:
    inner = section.section("dedicated")
    if inner is None:
        if before is None:
            raise section.wrong("dedicated", "it is missing")
        return before.dedicated
    engine = _engine(inner, before.dedicated.engine if before else None)
    replicas = inner.value("replicas", int, before.dedicated.replicas if before else None)
    if replicas is None:
        raise inner.wrong("replicas", "it is missing")
    inner.finish()
    return inner.made(lambda: DedicatedPool(replicas, engine))


def _serving(section: Section, before: HostPool | None) -> HostPool:
    engine = _engine(section, before.engine if before else None)
    hosts = section.value("hosts", int, before.hosts if before else None)
    if hosts is None:
        raise section.wrong("hosts", "it is missing")
    slo = before.slo if before else None
    slo_section = section.section("slo")
    if slo_section is not None:
        preset = None
        if "preset" in slo_section:
            preset = slo_section.choice("preset", PRESETS)
        slo = slo_section.fill(SloSpec, preset, **({} if preset else {"model": engine.model}))
    if slo is None:
        raise section.wrong("slo", "it is missing; give ttft_s and tpot_s, or a preset")
    guest = before.guest if before else None
    guest_section = section.section("guest")
    if guest_section is not None:
        guest_engine = _engine(guest_section, guest.engine if guest else None)
        guest = guest_section.fill(GuestSpec, guest, engine=guest_engine)
    section.finish()
    promised = slo
    return section.made(lambda: HostPool(hosts, engine, promised, guest))


def _engine(section: Section, before: EngineSpec | None) -> EngineSpec:
    """`engine: {model, card, engine, cards}` of the published tables, or `{profile: FILE, …}`."""
    inner = section.section("engine")
    if inner is None:
        if before is None:
            raise section.wrong("engine", "it is missing")
        return before
    profile = inner.value("profile", str)
    if profile is not None:
        file = inner.file.parent / profile
        steps = inner.made(lambda: read_profile(file))
        return inner.fill(EngineSpec, None, steps=steps)
    if "model" in inner or before is None:
        model = inner.needed("model", str)
        card = inner.value("card", str, "h200") or "h200"
        kind = inner.value("engine", str, "vllm") or "vllm"
        cards = inner.value("cards", int)
        try:
            base = published_engine(model, card, kind, cards).spec()
        except ConfigError as error:
            raise inner.wrong("model", str(error)) from error
        return inner.fill(EngineSpec, base, steps=base.steps, model=base.model, cards=base.cards)
    return inner.fill(EngineSpec, before, steps=before.steps)


def _rollouts(section: Section, path: Path) -> RolloutWorkload:
    if "sessions" in section:
        file = path.parent / section.needed("sessions", str)
        section.finish()
        return SessionFile.read(file)
    chosen = section.choice("environment", ENVIRONMENTS)
    section.finish()
    return chosen


def _traffic(section: Section, path: Path) -> ServingWorkload:
    if "trace" in section:
        file = path.parent / section.needed("trace", str)
        speed = section.value("speed", float, 1.0) or 1.0
        repeat = bool(section.value("repeat", bool, False))
        section.finish()
        return section.made(lambda: TraceTraffic(file, speed=speed, repeat=repeat))
    traffic = section.choice("azure", AZURE)
    rate = section.value("requests_per_s", float)
    section.finish()
    if rate is None:
        return traffic
    return section.made(lambda: replace(traffic, rate_per_s=rate))
