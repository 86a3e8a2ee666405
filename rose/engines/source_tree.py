"""ROSE's source tree for an interpreter that has vLLM but not ROSE installed.

vLLM finds plugins by the entry points of installed distributions. Metadata in a folder of the
module path counts as one, so nothing has to be installed: `PYTHONPATH` names the tree and a folder
with the metadata that the tree's pyproject.toml asks for. The interpreter needs ROSE's own
dependencies (the extra `replica`) all the same.
"""

import tomllib
from pathlib import Path
from typing import Any, Final

from rose.errors import ConfigError

_ROOT: Final = Path(__file__).parents[2]


def module_path(folder: Path, root: Path = _ROOT) -> str:
    """Write the metadata into `folder`; the PYTHONPATH to start the other interpreter with.

    Raises ConfigError where ROSE does not run from a source tree.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"ROSE does not run from a source tree ({root} has no pyproject.toml of it); install it"
            " for the other interpreter: pip install --no-deps rose-rollout"
        ) from error
    name, version = project["name"], project["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(_entry_points(project), encoding="utf-8")
    return f"{root}:{folder.absolute()}"


def _entry_points(project: dict[str, Any]) -> str:
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines.extend(f"{name} = {target}" for name, target in points.items())
    return "\n".join([*lines, ""])
