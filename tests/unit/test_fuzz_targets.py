"""The fuzzed functions stay alive: every target takes its seeds, and a little noise."""

import random
import sys

import pytest

from tests.fuzz.targets import dispatch, find_modules, load, names, seeds


@pytest.mark.parametrize("module", find_modules())
def test_each_module_has_targets_and_no_others(module: str) -> None:
    targets = load(module)
    assert targets
    found = vars(sys.modules[targets[0].__module__])
    assert [target.__name__ for target in targets] == sorted(n for n in found if n[:4] == "run_")


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in find_modules() for name in names(module)]
)
def test_a_target_takes_noise(module: str, name: str) -> None:
    target = dict(zip(names(module), load(module), strict=True))[name]
    rng = random.Random(f"{module} {name}")
    for size in (0, 1, 7, 64, 300, 4_000):
        target(rng.randbytes(size))


@pytest.mark.parametrize("module", find_modules())
def test_seeds_and_cut_seeds(module: str) -> None:
    targets, rng = load(module), random.Random(module)
    for seed in seeds(module):
        dispatch(targets, seed)
        dispatch(targets, seed[: rng.randrange(len(seed) + 1)])
