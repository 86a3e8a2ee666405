"""An engine's image, as far as its Python goes: packages of this environment, and no ROSE."""

import subprocess
import sysconfig
import venv
from pathlib import Path


def engine_image(folder: Path, packages: str = "*") -> Path:
    """Make an environment with the packages that match, but ROSE; return its interpreter."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for each in Path(sysconfig.get_path("purelib")).glob(packages):
        if not each.name.startswith(("rose", "__editable__")):
            (site / each.name).symlink_to(each)
    return folder / "bin" / "python"


def ran(python: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code there, with this environment alone."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(python.parent), **environ}
    command = [str(python), "-c", code]
    return subprocess.run(command, cwd=python.parent, env=env, capture_output=True, text=True)
