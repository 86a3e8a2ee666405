"""`python -m tests.fuzz.worker MODULE CORPUS_OR_FILE [libFuzzer options]`: one module's process."""

import hashlib
import sys
from pathlib import Path

import atheris

OURS = ["rose", "executor", "weight_transfer", "elastic_scheduler", "slo"]
# Numba compiles these itself, and knows no call that Atheris put into them.
KERNELS = Path(__file__).parents[2] / "weight_transfer" / "kernels"
COMPILED = [
    ".".join(("weight_transfer.kernels", *path.relative_to(KERNELS).with_suffix("").parts))
    for path in KERNELS.rglob("*.py")
]

with atheris.instrument_imports(include=OURS, exclude=COMPILED, enable_loader_override=False):
    from tests.fuzz.targets import dispatch, load, seeds

    TARGETS = load(sys.argv[1])


def main() -> None:
    """Fuzz until libFuzzer ends this process."""
    module, place, *options = sys.argv[1:]
    if Path(place).is_dir():
        for seed in seeds(module):
            (Path(place) / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    atheris.Setup([sys.argv[0], *options, place], lambda data: dispatch(TARGETS, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
