"""`rose demo` with stand-ins for all that takes long. argv: folder, then the options of `rose`.

Engines are those of a node's tests, which start and never answer while a file `mute` is in the
folder. A host dies at once where there is a file `dies`. Trainer and load generator say nothing.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.demo import run
from bench.demo.frozen_lake.models import Models
from rose.cli.main import main
from rose.engines import EngineRole, EngineSpec, launch
from rose.process.child import ManagedProcess, ProcessSpec
from tests.unit.node.node_bench import standin_spec

FOLDER = Path(sys.argv[1])
JOURNAL = FOLDER / "journal"
NODE = Path(__file__).parents[2] / "unit" / "node" / "standin_daemon.py"
DIES = "raise ValueError('no such model')"
SILENT = "import time; time.sleep(600)"


def engine(spec: EngineSpec) -> ProcessSpec:
    process = standin_spec(JOURNAL)(spec)
    if spec.role is EngineRole.HOST and (FOLDER / "dies").exists():
        return replace(process, argv=(sys.executable, "-S", "-c", DIES))
    return process


def replaced(spec: ProcessSpec) -> ProcessSpec:
    """A child of the demo: a daemon starts stand-ins too, a JSON-lines child is silent."""
    if "rose.main.node" in spec.argv:
        options = spec.argv[spec.argv.index("rose.main.node") + 1 :]
        return replace(spec, argv=(sys.executable, str(NODE), str(JOURNAL), *options))
    if spec.piped:
        return replace(spec, argv=(sys.executable, "-S", "-c", SILENT))
    return spec


async def models(*_: object) -> Models:
    folder = FOLDER / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return Models(folder, folder)


started = ManagedProcess.start.__func__  # type: ignore[attr-defined]


async def start(cls: Any, spec: ProcessSpec) -> ManagedProcess:
    child: ManagedProcess = await started(cls, replaced(spec))
    return child


ManagedProcess.start = classmethod(start)  # type: ignore[assignment,method-assign]
launch.process_spec = engine  # type: ignore[attr-defined]
run.prepare_models = models  # type: ignore[attr-defined]
run.check_host = lambda engines: None  # type: ignore[attr-defined]
sys.exit(main(sys.argv[2:]))
