"""`rose profile --model DIR`: run steps of several sizes, fit their times, save the fit.

The engine starts as a node starts a guest, on a control page of its own. The file goes into a
node's configuration: `step_profile` of a replica, or of the host for the host's model.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from executor import ControlPage
from executor.control_page.page import PAGE_FOLDER
from rose.command_line.parser import Parser
from rose.engines import EngineProcess
from rose.errors import ConfigError, EngineStartError, RoseError
from rose.node.guest.memory_gauges import Gpus
from rose.profile.driver import LOG, OpenGrant, ProfileDriver, add_options, positive, spec_of
from rose.profile.plan import (
    DECODE_STEPS,
    SMALLEST_PROMPT,
    EngineLimits,
    LoggedStep,
    plan,
    report,
    samples_of,
    waited_share,
)
from slo import ProfileError, StepSample, fit_profile

EXIT_STOPPED = 143
CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Samples of all batches, and the share of their time in which the engine had no core."""

    samples: list[StepSample]
    waited: float


def main(argv: Sequence[str] | None = None) -> int:
    """Profile an engine, print the report and save the fit; return the exit status.

    Raises RoseError.
    """
    args = _checked(parser().parse_args(argv))
    out: Path = args.out
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder; give --out a file in one")
    folder = Path(tempfile.mkdtemp(prefix="rose-profile-", dir=PAGE_FOLDER))
    keep_log = False
    try:
        measured = asyncio.run(_measured(args, folder))
    except asyncio.CancelledError:
        return EXIT_STOPPED
    except EngineStartError:
        # Its log says more than one line can.
        keep_log = (folder / LOG).exists()
        raise
    finally:
        if keep_log:
            shutil.rmtree(folder / "steps")
            (folder / "page").unlink()
        else:
            shutil.rmtree(folder)
    try:
        profile = fit_profile(measured.samples)
    except ProfileError as error:
        raise RoseError(f"no profile: {error}") from error
    sys.stdout.write("\n".join(report(profile, measured.samples, measured.waited)) + "\n")
    out.write_text(profile.to_json() + "\n", encoding="utf-8")
    sys.stdout.write(f"saved to {out}\n")
    return 0


def parser(prog: str = "rose profile") -> Parser:
    """Return the command-line parser of `rose profile`."""
    parser = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("step_profile.json"), metavar="FILE")
    for name, default, what in (
        ("--max-num-seqs", 64, "most sequences in a step (a replica's max_sequences)"),
        ("--max-model-len", 512, "longest sequence"),
        ("--token-budget", 512, "most tokens in a step"),
        ("--kv-bytes", 64 << 20, "size of the KV cache"),
        ("--timeout-s", 900, "give up after so long"),
    ):
        parser.add_argument(name, type=positive, default=default, metavar="N", help=what)
    add_options(parser)
    return parser


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    if args.max_model_len < SMALLEST_PROMPT + DECODE_STEPS:
        raise ConfigError(
            f"--max-model-len is {args.max_model_len}; "
            f"give at least {SMALLEST_PROMPT + DECODE_STEPS}"
        )
    if args.token_budget < args.max_num_seqs:
        raise ConfigError(
            f"--token-budget {args.token_budget} is below --max-num-seqs {args.max_num_seqs}: "
            "a decode step of all sequences would not fit"
        )
    return args


async def _measured(args: argparse.Namespace, folder: Path) -> MeasuredSteps:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with asyncio.timeout(args.timeout_s):
            return await _with_engine(args, folder)
    except TimeoutError:
        raise EngineStartError(
            f"profiling took longer than {args.timeout_s} s; give a longer --timeout-s or smaller"
            f" sizes, and see {folder}"
        ) from None


async def _with_engine(args: argparse.Namespace, folder: Path) -> MeasuredSteps:
    spec = spec_of(args, folder, Gpus())
    (folder / "steps").mkdir()
    page = ControlPage.create(folder / "page")
    grant = OpenGrant(page, args.token_budget, args.max_num_seqs)
    grant.start()
    engine: EngineProcess | None = None
    try:
        engine = await EngineProcess.start(spec)
        await engine.wait_healthy(args.timeout_s)
        return await _drive(args, folder, engine, grant)
    finally:
        if engine is not None:
            await engine.stop()
        grant.stop()
        page.close()


async def _drive(
    args: argparse.Namespace, folder: Path, engine: EngineProcess, grant: OpenGrant
) -> MeasuredSteps:
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        driver = ProfileDriver(engine, grant, http, folder / "steps", _vocabulary(args.model))
        kv_tokens = await driver.admit()
        limits = EngineLimits(args.max_num_seqs, args.max_model_len, args.token_budget, kv_tokens)
        batches = plan(limits)
        if not batches:
            raise ConfigError(
                f"the KV cache holds {kv_tokens} tokens, too few for one turn; give more --kv-bytes"
            )
        samples: list[StepSample] = []
        every: list[list[LoggedStep]] = []
        for number, batch in enumerate(batches, 1):
            sys.stderr.write(
                f"\rbatch {number} of {len(batches)}: {batch.sequences} x {batch.prompt_tokens}"
                f" tokens in steps of {batch.token_budget} "
            )
            runs = await driver.runs(batch)
            samples += samples_of(runs)
            every += runs
        sys.stderr.write("\n")
    # On a GPU its thread waits for the card, and that is the step.
    return MeasuredSteps(samples, 0.0 if args.device is not None else waited_share(every))


def _vocabulary(model_dir: Path) -> int:
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{model_dir / 'config.json'} names no vocab_size") from error


if __name__ == "__main__":
    sys.exit(main())
