"""`rose kill` acts before it imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from rose.command import set_kill_switch

ACT = """
import sys
before = set(sys.modules)
from rose.command import set_kill_switch
set_kill_switch(sys.argv[1:])
print(*(name for name in set(sys.modules) - before if name.startswith("rose.")))
"""


@pytest.mark.parametrize(
    ("words", "set_"),
    [
        (["kill", "RUN"], True),
        (["kill", "RUN", "--within", "2"], True),
        (["kill", "--within", "2", "RUN"], True),
        (["kill", "RUN", "--dry-run"], False),
        (["kill", "--help", "RUN"], False),
        (["kill"], False),
        (["unkill", "RUN"], False),
        (["status", "RUN"], False),
    ],
)
def test_the_switch_is_set_for_a_kill_alone(tmp_path: Path, words: list[str], set_: bool) -> None:
    set_kill_switch([str(tmp_path) if word == "RUN" else word for word in words])
    assert (tmp_path / "KILL").exists() == set_


def test_nothing_else_of_rose_is_imported_before(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ACT, "kill", str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["rose.command"]
    assert (tmp_path / "KILL").exists()
