"""`rose node` whose engines load no tokenizer: the tiny model of these tests has none."""

import sys
from dataclasses import replace

from rose.engines import EngineSpec, launch, process_spec
from rose.main.node import main
from rose.process.child import ProcessSpec


def tokens_only(spec: EngineSpec) -> ProcessSpec:
    return process_spec(replace(spec, extra_args=("--skip-tokenizer-init",)))


launch.process_spec = tokens_only  # type: ignore[attr-defined]
sys.exit(main())
