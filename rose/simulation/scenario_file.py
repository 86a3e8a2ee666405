"""Scenario files: YAML or JSON, read with the line and key of whatever is wrong.

    setup: frozen_lake-8b        a set-up by name (setups.py), or `cluster`, `trainer`, `rollouts`
    until_s: 1800
    trainer: {steps: 3, max_staleness: 1}
    traffic: {azure: code, requests_per_s: 24}
    options: {slack_share: 0.3}

A set-up's values hold for keys that the file does not give. Unknown keys are refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from rose.core_yaml import CoreLoader, constructed
from rose.errors import ConfigError, RoseError
from rose.simulation.checked import CHECKED, Positive
from rose.simulation.engine_specs import EngineFigures, published_engine, read_profile
from rose.simulation.policies import check_options
from rose.simulation.scenario import (
    ClusterSpec,
    DedicatedReplicas,
    GuestSpec,
    HostPool,
    Links,
    Scenario,
    TrainerSpec,
)
from rose.simulation.setups import SETUPS, setup_scenario
from rose.simulation.workloads.episodes import (
    ALFWORLD,
    CODING_SESSIONS,
    FROZEN_LAKE,
    RolloutWorkload,
    SessionFile,
)
from rose.simulation.workloads.traffic import (
    AZURE_CODE_2023,
    AZURE_CONVERSATION_2023,
    ServingWorkload,
    TraceTraffic,
)
from slo import PRESETS

AZURE = {"code": AZURE_CODE_2023, "conversation": AZURE_CONVERSATION_2023}
ENVIRONMENTS: Mapping[str, RolloutWorkload] = {
    "frozen_lake": FROZEN_LAKE,
    "alfworld": ALFWORLD,
    "coding_sessions": CODING_SESSIONS,
}
# Keys that stand for an engine of the published tables.
TABLE_KEYS = ("model", "card", "engine", "cards")

SLO_KEYS = ("preset", "ttft_s", "tpot_s", "percentile")
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
MISSING = ("missing", "missing_argument")
NO_MAPPING = ("dataclass_type", "model_type", "model_attributes_type", "dict_type")

Keys = tuple[str, ...]


class RolloutsSection(BaseModel):
    """Section `rollouts` of a scenario file: an environment's name, or a file of sessions."""

    model_config = CHECKED
    environment: Literal["frozen_lake", "alfworld", "coding_sessions"] = "frozen_lake"
    sessions: str = ""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("give either environment or sessions")
        return self

    def workload(self, folder: Path) -> RolloutWorkload:
        """Return the workload that the section names.

        Raises RoseError for a file that does not hold sessions.
        """
        if self.sessions:
            return SessionFile.read(folder / self.sessions)
        return ENVIRONMENTS[self.environment]


class TrafficSection(BaseModel):
    """Section `traffic` of a scenario file: users generated after an Azure trace, or a recorded
    trace.
    """

    model_config = CHECKED
    azure: Literal["code", "conversation"] = "code"
    requests_per_s: Positive = 0.0
    trace: str = ""
    speed: Positive = 1.0
    repeat: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = self.model_fields_set
        if not (given >= {"azure"} and given <= {"azure", "requests_per_s"}) and not (
            given >= {"trace"} and given <= {"trace", "speed", "repeat"}
        ):
            raise ValueError("give azure with requests_per_s, or trace with speed and repeat")
        return self

    def workload(self, folder: Path) -> ServingWorkload:
        """Return the traffic that the section names; a trace is read only as it is played."""
        if self.trace:
            return TraceTraffic(folder / self.trace, speed=self.speed, repeat=self.repeat)
        usual = AZURE[self.azure]
        return replace(usual, rate_per_s=self.requests_per_s) if self.requests_per_s else usual


def _option(name: str) -> str:
    """Return the name of an option unchanged. Raises ValueError for an unknown one."""
    try:
        check_options((name,))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return name


def _text(value: object) -> object:
    """Return a number as text, for a name that looks like a number; other values unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class ScenarioFile(BaseModel):
    """Content of a scenario file, with the set-up's values for keys that the file does not give."""

    model_config = CHECKED
    name: Annotated[str, BeforeValidator(_text)]
    cluster: ClusterSpec
    trainer: TrainerSpec
    rollouts: RolloutsSection | None = None
    traffic: TrafficSection | None = None
    until_s: Positive = 3_600.0
    slice_s: Positive = 10.0
    options: dict[
        Annotated[str, AfterValidator(_option)], Annotated[float, Field(strict=True)]
    ] = {}


# Class of each section, by the section's key.
SECTIONS: Mapping[str, type] = {
    "": ScenarioFile,
    "cluster": ClusterSpec,
    "dedicated": DedicatedReplicas,
    "serving": HostPool,
    "guest": GuestSpec,
    "engine": EngineFigures,
    "links": Links,
    "trainer": TrainerSpec,
    "rollouts": RolloutsSection,
    "traffic": TrafficSection,
}


def read_scenario(path: Path) -> Scenario:
    """Return the scenario in a YAML or JSON file. Raises ConfigError with file, line and key."""
    return _Reader(path).scenario()


class _Reader:
    """Reader of one scenario file, which knows the line of each value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = path.parent
        # Line of each value, by the keys that lead to it.
        self._lines: dict[Keys, int] = {}

    def scenario(self) -> Scenario:
        """Return the file's scenario. Raises ConfigError with file, line and key."""
        said = self._tree()
        setup = said.pop("setup", None)
        if setup is not None and str(setup) not in SETUPS:
            raise self._wrong(("setup",), f"there is no {setup!r}{_hint(str(setup), SETUPS)}")
        base = setup_scenario(setup) if setup is not None else None
        usual: dict[str, Any] = {"name": self._path.stem}
        if base is not None:
            usual = {key: getattr(base, key) for key in ("name", "cluster", "trainer", "until_s")}
        elif "rollouts" not in said:
            raise self._wrong(("rollouts",), "it is missing; give it, or a setup")
        try:
            file = ScenarioFile.model_validate(usual | self._merged(said, usual, ()))
            rollouts = file.rollouts.workload(self._folder) if file.rollouts else None
            traffic = file.traffic.workload(self._folder) if file.traffic else None
        except ValidationError as error:
            raise self._refused(error) from error
        if rollouts is None:
            assert base is not None
            rollouts = base.rollouts
        return Scenario(
            name=file.name or self._path.stem,
            cluster=file.cluster,
            trainer=file.trainer,
            rollouts=rollouts,
            traffic=traffic or (base.traffic if base else None),
            until_s=file.until_s,
            slice_s=file.slice_s,
            assumptions=base.assumptions if base else (),
            options=file.options,
        )

    # ---- the file's values ----

    def _tree(self) -> dict[str, Any]:
        """Return the file's values as a dictionary. Raises ConfigError."""
        try:
            node = yaml.compose(self._path.read_text(encoding="utf-8"), Loader=CoreLoader)
            if node is None:
                raise self._wrong((), "it is empty; give at least `setup: NAME`")
            self._note(node, ())
            said = constructed(node)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            self._lines[()] = mark.line + 1 if mark is not None else 1
            what = getattr(error, "problem", None) or str(error)
            raise self._wrong((), f"it cannot be read: {what}") from error
        except RecursionError:
            raise self._wrong((), "it is nested too deep") from None
        if not isinstance(said, dict):
            raise self._wrong((), "give a mapping of keys to values")
        return said

    def _note(self, node: yaml.Node, at: Keys) -> None:
        """Record the line of each value below a node.

        Raises ConfigError for a key without a value.
        """
        self._lines[at] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise self._wrong(at, "a key is no text")
                self._note(value, (*at, str(key.value)))
        elif node.tag == "tag:yaml.org,2002:null":
            raise self._wrong(at, "it has no value")

    def _merged(self, said: object, usual: object, at: Keys) -> Any:  # noqa: ANN401
        """Return the file's values, with the set-up's for keys that the file does not give."""
        if not isinstance(said, dict):
            return said
        if at[-1:] == ("engine",):
            return self._engine(said, usual, at)
        if at[-1:] == ("slo",):
            return self._slo(said, usual, at)
        values = _values(usual)
        return values | {k: self._merged(v, values.get(k), (*at, str(k))) for k, v in said.items()}

    def _engine(self, said: dict[str, Any], usual: object, at: Keys) -> dict[str, Any]:
        """Return an engine's fields: of a step profile, of the published tables, or the set-up's
        with changes.
        """
        try:
            if "profile" in said:
                return said | {"profile": read_profile(self._folder / str(said["profile"]))}
            if "model" not in said:
                return _values(usual) | said
            names = {key: str(said[key]) for key in ("model", "card", "engine") if key in said}
            engine = published_engine(**names, cards=said.get("cards"))
        except RoseError as error:
            raise self._wrong(
                (*at, "profile" if "profile" in said else "model"), str(error)
            ) from error
        return _values(engine) | {k: v for k, v in said.items() if k not in TABLE_KEYS}

    def _slo(self, said: dict[str, Any], usual: object, at: Keys) -> dict[str, Any]:
        for key in said:
            if key not in SLO_KEYS:
                raise self._wrong((*at, str(key)), f"unknown key{_hint(str(key), SLO_KEYS)}")
        if "preset" in said:
            name = str(said["preset"])
            if name not in PRESETS:
                raise self._wrong((*at, "preset"), f"there is no {name!r}{_hint(name, PRESETS)}")
            usual = PRESETS[name]
        given = {key: value for key, value in said.items() if key != "preset"}
        return {"model": "users"} | _values(usual) | given

    # ---- its errors ----

    def _wrong(self, at: Keys, what: str) -> ConfigError:
        """Return the error about a key, with the line of the key or of the nearest section around
        it.
        """
        line = next(
            (self._lines[at[:n]] for n in range(len(at), -1, -1) if at[:n] in self._lines), 1
        )
        return ConfigError(f"{self._path}:{line}: {'.'.join(at) or 'the file'}: {what}")

    def _refused(self, error: ValidationError) -> ConfigError:
        # A missing key may be a misspelled one, so unknown keys are named first.
        errors = error.errors()
        first = next((each for each in errors if each["type"] in UNKNOWN), errors[0])
        at = tuple(str(key) for key in first["loc"] if key != "[key]")
        kind = first["type"]
        if kind in UNKNOWN:
            section = SECTIONS[at[-2] if len(at) > 1 else ""]
            what = f"unknown key{_hint(at[-1], section.__annotations__)}"
        elif kind in MISSING:
            what = "it is missing" if len(at) > 1 else "it is missing; give it, or a setup"
        elif kind == "value_error":
            what = str(first["ctx"]["error"])
        elif kind in NO_MAPPING:
            what = "give a mapping of keys to values"
        else:
            message = first["msg"].replace("Input should be", "it should be")
            what = f"{first['input']!r:.80}; {message}"
        return self._wrong(at, what)


def _values(usual: object) -> dict[str, Any]:
    """Return the fields of a dataclass as a dictionary, a dictionary unchanged, and {} for anything
    else.
    """
    if isinstance(usual, dict):
        return usual
    if not is_dataclass(usual):
        return {}
    return {field.name: getattr(usual, field.name) for field in fields(usual)}


def _hint(word: str, known: Collection[str]) -> str:
    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
