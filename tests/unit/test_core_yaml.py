"""YAML is read by version 1.2: a scalar is what it looks like, a key is given once."""

from pathlib import Path

import pytest

from rose.cli.cluster.policy import _read
from rose.core_yaml import documents
from rose.errors import ConfigError

SCALARS = {
    "Off": "Off",
    "no": "no",
    "22:00": "22:00",
    "09:00": "09:00",
    "2026-01-01": "2026-01-01",
    "1e9": 1e9,
    "-1.5e-3": -1.5e-3,
    "010": 10,
    "0x1F": 31,
    "0o17": 15,
    "true": True,
    "~": None,
    "": None,
    "'1e9'": "1e9",
    ".5": 0.5,
    "8Gi": "8Gi",
}


@pytest.mark.parametrize("text", SCALARS)
def test_a_scalar_is_what_it_looks_like(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"\ufeffa: {text}\n---\n", encoding="utf-8")
    [(said, _)] = documents(file)
    assert said == {"a": SCALARS[text]}
    assert type(said["a"]) is type(SCALARS[text])


def test_a_key_is_given_once_at_any_depth(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a:\n  b: 1\n  b: 2\n")
    with pytest.raises(ValueError, match="line 3: the key b is given twice"):
        documents(file)


OBJECT = "apiVersion: rose.dev/v1alpha1\nkind: RoseCapacityPolicy\nmetadata: {name: chat}\n"


@pytest.mark.parametrize("text", ["name: chat\nmode: Off\n", f"{OBJECT}spec: {{mode: Off}}\n"])
def test_a_policy_of_yaml_is_that_of_json_and_of_the_object(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    [policy] = _read(file)
    assert (policy.name, policy.mode) == ("chat", "Off")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.yaml", "name: a\nmode: Off\nmode: Active\n"),
        ("p.json", '{\n\t"name": "a",\t"mode": "Off", "mode": "Active"}'),
    ],
)
def test_a_policy_that_says_a_thing_twice_is_refused(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match="the key mode is given twice"):
        _read(file)


FAULTS = {
    "name: a\nmaxHarvest:\n  compute: 0.5\n  memry: 8Gi\n": "4: maxHarvest.memry: there is no such",
    "name: a\n---\nname: b\nmode: On\n": "4: mode: ",
    "- name: a\n-\n  slackShare: 0.2\n": "3: name: is missing",
    "name: a\nblackoutWindows:\n- {from: '22:00'}\n": "3: blackoutWindows[0].to: is missing",
    f"# says why\n{OBJECT}spec:\n  canary:\n    percent: 200\n": "7: canary.percent: ",
    f"{OBJECT}": "1: a RoseCapacityPolicy needs metadata.name and a spec",
    "\njust words\n": "2: ",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_of_a_policy_has_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        _read(file)
    assert str(refused.value).startswith(f"{file}:{FAULTS[text]}")
    assert "\n" not in str(refused.value)
