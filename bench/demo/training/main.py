"""`python -m bench.demo.training.main --config FILE`: the trainer process of the demo.

stdin   {"cmd":"start"}, then perhaps {"cmd":"finish"}
stdout  ready, eval, step …, eval, done; or error with a message
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from bench.demo.cli import JOB, MAX_SEED, TrainerControl
from bench.demo.faulty_trainer import CorruptPublisher, LossyJournal
from bench.demo.frozen_lake.data import evaluate
from bench.demo.frozen_lake.task import different_lakes, training_lake
from bench.demo.report.records import StepRow, TrajectoryRecord, TurnRecord
from bench.demo.training.forward import Weights, rescored, turn_gap
from bench.demo.training.learner import LEARNING_RATE, LONG_LEARNING_RATE, Learner, Update
from bench.demo.training.rollouts import RolloutPlan, Rollouts, Trajectory, sampling
from rose.client import RolloutClient, RolloutError, Sampling
from rose.errors import ConfigError, RoseError, UnavailableError
from rose.logs.eventlog import KEEP_ALL, JsonlLog
from rose.security.keys import signing_key
from rose.weight_distribution import Receipt, WeightPublisher
from weight_transfer import read_model_dir

VERSIONS_KEPT = 4


class TrainConfig(BaseModel):
    """One training run. `streams`: trajectories in flight; a step is `groups` x `group_size`. The
    learning rate falls until `decay_steps`. Without `held_out_maps` nothing is evaluated.
    `shared`: other jobs have its replicas at times."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    gateway_url: str
    scheduler: str
    out: Path
    publish_root: Path
    publish_port: int = Field(ge=0, le=65_535)
    key: Path
    job: str = JOB
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    steps: int = Field(default=34, ge=1, le=1_000)
    decay_steps: int | None = Field(default=None, ge=1)
    streams: int = Field(default=96, ge=1, le=4_096)
    groups: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=2)
    max_staleness: int = Field(default=1, ge=0, le=2)
    held_out_maps: int = Field(default=512, ge=0, le=512)
    control: TrainerControl | None = None
    long_turns: bool = False
    torch_threads: int = Field(default=1, ge=1)
    shared: bool = False

    @property
    def first_version(self) -> int:
        """The version that training begins with.

        A running engine that has another job's weights comes to a version of this job by an
        update, but to none before the first: so the model is published as version 1, too.
        """
        return int(self.shared)

    @classmethod
    def read(cls, path: Path) -> "TrainConfig":
        """Read a file. Raises ConfigError that names what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            first = str(error).replace("\n", " ")
            raise ConfigError(f"{path}: not a trainer configuration: {first}") from error


class DemoTrainer:
    """One run. `emit` is told every event of the protocol in docs/contracts/demo-processes.md."""

    def __init__(
        self,
        config: TrainConfig,
        source: RolloutClient,
        publisher: WeightPublisher,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config = config
        self._source = source
        self._publisher = publisher
        self._emit = emit
        self._turns = JsonlLog(config.out / "turns.jsonl", KEEP_ALL)
        self._trajectories = JsonlLog(config.out / "trajectories.jsonl", KEEP_ALL)
        self._step_log = JsonlLog(config.out / "steps.jsonl", KEEP_ALL)
        self._how = sampling(long_turns=config.long_turns)
        self._learner = Learner(
            read_model_dir(config.model_dir),
            config.control,
            config.seed,
            learning_rate=LONG_LEARNING_RATE if config.long_turns else LEARNING_RATE,
            min_tokens=self._how.min_tokens,
            decay_steps=config.decay_steps,
        )
        self._taken = 0
        # Evaluated weights of the last versions.
        self._snapshots: dict[int, Weights] = {}
        self._keep()
        self._rollouts = Rollouts(source, _plan(config, self._how))
        self._scoring: asyncio.Task[None] | None = None
        self._steps = config.steps

    @property
    def _version(self) -> int:
        """The newest version, which the next step trains."""
        return self._config.first_version + self._taken

    def cut(self) -> None:
        """Finish the batch under way and stop there."""
        self._steps = min(self._steps, self._taken + 1)
        self._rollouts.end_with(self._steps - 1)

    async def run(self) -> None:
        """Evaluate, train, evaluate; every trajectory that was started is delivered."""
        await self._evaluate("warm_start")
        starting = asyncio.create_task(self._rollouts.run())
        try:
            while self._taken < self._steps:
                await self._step(await self._batch(starting))
            left = await self._rollouts.finish()
            await starting
        finally:
            starting.cancel()
        await self._scored()
        await self._score(left, {}, None)
        await self._evaluate("final")
        for log in (self._turns, self._trajectories, self._step_log):
            log.close()
        self._emit(self._done())

    async def _evaluate(self, which: str) -> None:
        maps = self._config.held_out_maps
        if not maps:
            return
        how = sampling(long_turns=self._config.long_turns, greedy=True)
        lakes = different_lakes(maps, "held-out")
        crossed = await evaluate(self._source, how, lakes, self._version, which)
        self._emit(
            {"event": "eval", "which": which, "success": sum(crossed) / maps, "n": maps}
            | {"crossed": "".join("01"[one] for one in crossed)}
        )

    async def _batch(self, starting: asyncio.Task[None]) -> list[Trajectory]:
        """The next batch, or what broke the agent loops that should have filled it."""
        batch = asyncio.create_task(self._rollouts.batch(self._taken))
        try:
            await asyncio.wait({batch, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            return await batch
        finally:
            batch.cancel()

    async def _step(self, batch: Sequence[Trajectory]) -> None:
        number, held, start_s = self._taken, self._version, time.monotonic()
        # A lost trajectory has no reward: to train on it would blame the policy for the system.
        delivered = [one for one in batch if not one.lost]
        if not delivered:
            raise UnavailableError(f"all trajectories of step {number} were lost; see the gateway")
        update = await asyncio.to_thread(self._learner.step, delivered)
        receipt = await self._publisher.publish(held + 1, held, update.old, update.new)
        await self._scored()
        self._taken = number + 1
        self._keep()
        await self._rollouts.published(self._version)
        record = self._step_row(number, start_s, delivered, update, receipt)
        self._step_log.write(record)
        self._emit({"event": "step", **record})
        known = {(name, held): values for name, values in update.logprobs.items()}
        self._scoring = asyncio.create_task(self._score(batch, known, number))

    def _keep(self) -> None:
        """Keep the newest version's weights; the oldest go."""
        values = {name: value.detach() for name, value in self._learner.values.items()}
        self._snapshots[self._version] = values
        self._snapshots.pop(self._version - VERSIONS_KEPT, None)

    async def _scored(self) -> None:
        """Wait for the scores of the batch before."""
        if self._scoring:
            await self._scoring
            self._scoring = None

    async def _score(
        self, batch: Sequence[Trajectory], known: Mapping[tuple[str, int], Tensor], step: int | None
    ) -> None:
        score = partial(rescored, batch, self._snapshots, known, self._how.min_tokens)
        scores = await asyncio.to_thread(score)
        for trajectory in batch:
            self._trajectories.write(self._trajectory_row(trajectory, step))
            for record in self._turn_rows(trajectory, scores[trajectory.name], step):
                self._turns.write(record)

    def _done(self) -> dict[str, Any]:
        rollouts = self._rollouts
        return {
            "event": "done",
            "started": rollouts.started,
            "delivered": rollouts.started - rollouts.lost,
            "lost": rollouts.lost,
            "duplicated": rollouts.duplicated,
        }

    def _step_row(
        self,
        number: int,
        start_s: float,
        batch: Sequence[Trajectory],
        update: Update,
        receipt: Receipt,
    ) -> dict[str, Any]:
        row = StepRow(
            step=number,
            start_s=start_s,
            end_s=time.monotonic(),
            reward_mean=sum(one.reward for one in batch) / len(batch),
            reward_n=len(batch),
            tokens=sum(len(one.positions()) for one in batch),
            trajectories=len(batch),
            spanning=sum(len(one.versions()) > 1 for one in batch),
            clip_fraction=update.clip_fraction,
            grad_norm=update.gradient_norm,
            version=receipt.version,
            density=receipt.density,
            full_bytes=receipt.full_bytes,
            wire_bytes=receipt.wire_bytes,
            publish_s=receipt.publish_s,
            train_s=update.train_s,
            job=self._config.job,
        )
        return msgspec.structs.asdict(row)

    def _trajectory_row(self, trajectory: Trajectory, step: int | None) -> dict[str, Any]:
        row = TrajectoryRecord(
            trajectory=trajectory.name,
            group=trajectory.group,
            step=step,
            start_s=trajectory.start_s,
            end_s=trajectory.end_s,
            turns=len(trajectory.turns),
            reward=trajectory.reward,
            versions=trajectory.versions(),
            delivered=int(not trajectory.lost),
            revoked_mid_turn=trajectory.revoked_mid_turn(),
            job=self._config.job,
        )
        return msgspec.structs.asdict(row)

    def _turn_rows(
        self, trajectory: Trajectory, scores: Sequence[float | None], step: int | None
    ) -> Iterator[dict[str, Any]]:
        start = 0
        for index, taken in enumerate(trajectory.turns):
            end = start + len(taken.turn.token_ids)
            gap, unstamped = turn_gap(taken, scores[start:end])
            row = TurnRecord(
                request_id=taken.turn.request_id,
                trajectory=trajectory.name,
                group=trajectory.group,
                step=step,
                turn=index,
                start_s=taken.start_s,
                end_s=taken.end_s,
                prompt_tokens=taken.offset,
                output_tokens=end - start,
                versions=list(taken.turn.versions),
                segments=taken.segments(),
                attempts=taken.turn.attempts,
                finish_reason=taken.turn.finish_reason,
                gap=gap,
                unstamped=unstamped,
                job=self._config.job,
            )
            start = end
            yield msgspec.structs.asdict(row)


def _plan(config: TrainConfig, how: Sampling) -> RolloutPlan:
    return RolloutPlan(
        batches=config.steps,
        groups=config.groups,
        group_size=config.group_size,
        streams=config.streams,
        max_staleness=config.max_staleness,
        how=how,
        lake_of=partial(training_lake, config.seed),
        first=config.first_version,
    )


def say(event: dict[str, Any]) -> None:
    """One event to whoever started us."""
    sys.stdout.write(json.dumps(event, separators=(",", ":")) + "\n")
    sys.stdout.flush()


async def commands() -> asyncio.StreamReader:
    """Standard input as a stream."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def train(config: TrainConfig) -> None:
    """The whole process."""
    torch.set_num_threads(config.torch_threads)
    stdin = await commands()
    corrupt = config.control == "corrupt-chunk"
    publisher = (CorruptPublisher if corrupt else WeightPublisher)(
        config.job,
        config.scheduler,
        config.publish_root,
        config.publish_port,
        signing_key(config.key),
    )
    client = LossyJournal if config.control == "drop-token" else RolloutClient
    async with client(config.gateway_url, job=config.job) as source, publisher:
        if config.shared:
            await publish_model(publisher, config)
        trainer = DemoTrainer(config, source, publisher, say)
        say({"event": "ready"})
        if not await stdin.readline():
            return
        listening = asyncio.create_task(_listen(stdin, trainer))
        try:
            await trainer.run()
        finally:
            listening.cancel()
        if config.shared:
            # Whoever trains on has the guest for itself from now on.
            await publisher.end_job()


async def publish_model(publisher: WeightPublisher, config: TrainConfig) -> None:
    """Publish the model as the first version, with a base that leads to it from any other job's."""
    model = read_model_dir(config.model_dir)
    await publisher.publish_base(0, model)
    await publisher.publish(config.first_version, 0, model, model)


async def _listen(stdin: asyncio.StreamReader, trainer: DemoTrainer) -> None:
    while line := await stdin.readline():
        if json.loads(line).get("cmd") == "finish":
            trainer.cut()


def main(argv: Sequence[str] | None = None) -> int:
    """Train until told to finish; what goes wrong is an event, and exit code 2."""
    parser = argparse.ArgumentParser(prog="bench.demo.training.main", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        asyncio.run(train(TrainConfig.read(args.config)))
    except (RoseError, RolloutError) as error:
        say({"event": "error", "message": str(error)})
        return 2
    except Exception as error:
        # A bug: whoever started us learns of it at once, its traceback goes to the log.
        say({"event": "error", "message": f"the trainer broke, see its log: {error!r}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
