"""EngineStarts: how many engines a session started, for which tests."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from counted.sitecustomize import STARTS

COUNTED = Path(__file__).parent / "counted"


@dataclass
class EngineStarts:
    """A line a start, written by every process that becomes an engine."""

    file: Path

    def counted(self, patch: pytest.MonkeyPatch) -> None:
        """Let all processes count that are started from here on."""
        self.file.touch()
        patch.setenv(STARTS, str(self.file))
        path = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(COUNTED), path])))

    def note(self) -> None:
        """Count an engine that is no server: one within a process of a test."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(os.environ.get("PYTEST_CURRENT_TEST", "between tests") + "\n")

    def by_file(self) -> Counter[str]:
        """Starts of each file of tests."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return Counter(Path(line.partition("::")[0]).name for line in lines)
