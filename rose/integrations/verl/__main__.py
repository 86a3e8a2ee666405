"""Self-check of the plugin: verl swallows a plugin's errors, so this prints what is wrong.

    python -m rose.integrations.verl

It prints one line for each thing that verl and ROSE need of each other. Exit code 2 if one is
missing in this environment: run it on each machine, as verl's workers run.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version

from rose.client import RolloutClient
from rose.errors import ConfigError, RoseError
from rose.integrations.settings import TrainerSettings
from rose.integrations.tested import check_tested
from rose.integrations.verl.configuration import TESTED

GROUP, PLUGIN = "verl.plugins", "rose.integrations.verl.plugin"
ANSWER_S = 10.0
EXIT_BAD = 2


def _installed() -> str:
    return f"verl {check_tested('verl', TESTED)}, ray {version('ray')}"


def _entry_point() -> str:
    if PLUGIN not in {point.value for point in entry_points(group=GROUP)}:
        raise ConfigError(
            f"no entry point of group {GROUP} leads to {PLUGIN}: verl will not find it; install"
            f" ROSE here (pip install 'rose-rollout[verl]'), or set VERL_USE_EXTERNAL_MODULES"
        )
    return f"entry point of group {GROUP}"


def _registered() -> str:
    importlib.import_module(PLUGIN)
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    found = (
        get_rollout_replica_class("rose"),
        get_rollout_class("rose", "async"),
        CheckpointEngineRegistry.get("rose"),
    )
    return f"registered {', '.join(each.__name__ for each in found)}"


def _configured() -> str:
    settings = TrainerSettings.from_env()
    settings.signing_key()
    return f"job {settings.job}, versions in {settings.root}"


def _reachable() -> str:
    settings = TrainerSettings.from_env()

    async def asked() -> int:
        async with (
            asyncio.timeout(ANSWER_S),
            RolloutClient(
                settings.gateway, credentials=settings.credentials(), job=settings.job
            ) as client,
        ):
            return len((await client.versions()).replicas)

    try:
        found = asyncio.run(asked())
    except TimeoutError:
        raise ConfigError(f"{settings.gateway} did not answer in {ANSWER_S:g} s") from None
    return f"gateway {settings.gateway}: {found} replicas of the job now"


CHECKS: tuple[Callable[[], str], ...] = (
    _installed,
    _entry_point,
    _registered,
    _configured,
    _reachable,
)


def main() -> int:
    """Run all checks, print a line for each, and return 0 if all hold, else 2."""
    wrong = 0
    for check in CHECKS:
        try:
            said = f"ok    {check()}"
        except (RoseError, ImportError, AttributeError, KeyError, ValueError) as error:
            wrong += 1
            said = f"WRONG {' '.join(str(error).split()) or repr(error)}"
        sys.stdout.write(f"{said}\n")
    return EXIT_BAD if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
