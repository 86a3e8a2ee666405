"""`rose node` whose engines are stand-ins that hold real memory and burn a core."""

import sys
from dataclasses import replace

from rose.engines import EngineSpec, launch, process_spec
from rose.main.node import main
from rose.process.child import ProcessSpec


def standin_spec(spec: EngineSpec) -> ProcessSpec:
    """Return the same process with another program; its place and its end stay as they are."""
    program = (sys.executable, "-m", "bench.kill.engine", str(spec.port), str(spec.kv_bytes))
    return replace(process_spec(spec), argv=program)


if __name__ == "__main__":
    launch.process_spec = standin_spec  # type: ignore[attr-defined]
    sys.exit(main())
