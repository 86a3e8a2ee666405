"""Where a run keeps its files."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ConfigError
from rose.eventlog import log_parts

RAW_FILES = (
    "client_requests.jsonl",
    "host_latency.jsonl",
    "turns.jsonl",
    "steps.jsonl",
    "trajectories.jsonl",
    "blocks.jsonl",
    "activations.jsonl",
    "events.jsonl",
    "guest.jsonl",
    "memory.jsonl",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Folders of one run below `out`: raw records at the top, logs and scratch beneath."""

    out: Path

    @property
    def logs(self) -> Path:
        """Logs of all processes."""
        return self.out / "logs"

    @property
    def scratch(self) -> Path:
        """Stores, pages and weights; of no interest after the run."""
        return self.out / "scratch"

    def node(self, name: str) -> Path:
        """Raw records of one node daemon, merged when the run ends."""
        return self.logs / name

    def prepare(self) -> None:
        """Make the folders anew. Raises ConfigError rather than delete what no run wrote."""
        if self.out.exists():
            if any(self.out.iterdir()) and not (self.out / "run.json").is_file():
                raise ConfigError(f"{self.out} holds other files; choose an empty folder for --out")
            shutil.rmtree(self.out)
        for folder in (self.logs, self.scratch):
            folder.mkdir(parents=True)

    def gather(self) -> None:
        """Merge what the processes wrote into one file a kind; every raw file exists afterwards."""
        for name in RAW_FILES:
            pattern = "events-*.jsonl" if name == "events.jsonl" else name
            logs = sorted(path for path in self.logs.rglob(pattern) if path.is_file())
            parts = [part for log in logs for part in log_parts(log)]
            lines = [line for part in parts for line in _whole_lines(part)]
            with (self.out / name).open("a", encoding="utf-8") as target:
                target.writelines(lines)


def _whole_lines(path: Path) -> list[str]:
    """Lines that were written to their end: a killed process may leave half a one."""
    with path.open(encoding="utf-8") as file:
        return [line for line in file if line.endswith("\n")]
