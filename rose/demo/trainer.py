"""The training run: batches in, versions out.

batch t complete → update → publish version t + 1 → the next trajectories start
                                 ↓
              meanwhile: recompute the logprobs of batch t under the stamped versions
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from rose.demo.grpo import LEARNING_RATE, Learner, UpdateReport, advantages
from rose.demo.heldout import MAPS, greedy_success
from rose.demo.model import load_policy
from rose.demo.outside import Publisher, Rollouts
from rose.demo.rollouts import RolloutPool
from rose.demo.train_config import TrainConfig
from rose.demo.train_records import TrainRecords
from rose.demo.trajectory import Trajectory
from rose.demo.versions_kept import PublishedVersions, published_bits
from rose.publish import Receipt


class Trainer:
    """One run. `emit` is told every event of the protocol in docs/architecture.md."""

    def __init__(
        self,
        config: TrainConfig,
        rollouts: Rollouts,
        publisher: Publisher,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config = config
        self._rollouts = rollouts
        self._publisher = publisher
        self._emit = emit
        self._records = TrainRecords(config.out)
        model = load_policy(config.model_dir)
        rate = 0.0 if config.control == "lr0" else LEARNING_RATE
        self._learner = Learner(model, rate)
        self._versions = PublishedVersions(load_policy(config.model_dir))
        self._versions.remember(0, published_bits(model))
        self._rng = random.Random(config.seed)  # noqa: S311 - a control's order, not a secret
        self._pool = RolloutPool(
            rollouts, config.seed, config.steps, config.streams, config.long_turns
        )
        self._steps = config.steps
        self._done = 0
        self._scoring: asyncio.Task[None] | None = None

    async def cut(self) -> None:
        """Finish the batch under way and stop there."""
        self._steps = min(self._steps, self._done + 1)
        await self._pool.cut_after(self._steps)

    async def run(self) -> None:
        """Evaluate, train, evaluate; every trajectory that was started is delivered."""
        await self._evaluate("warm_start")
        pool = asyncio.create_task(self._pool.run())
        try:
            while self._done < self._steps:
                await self._step(self._done)
            await pool
            left = await self._pool.finish()
        finally:
            pool.cancel()
        if self._scoring:
            await self._scoring
        await self._score(left, None)
        await self._evaluate("final")
        self._records.close()
        started, delivered = self._pool.started, self._pool.delivered
        self._emit(
            {
                "event": "done",
                "started": started,
                "delivered": len(delivered),
                "lost": started - len(delivered),
                "duplicated": sum(count - 1 for count in delivered.values()),
            }
        )

    async def _evaluate(self, which: str) -> None:
        success = await greedy_success(self._rollouts, which, self._config.long_turns, self._done)
        self._emit({"event": "eval", "which": which, "success": success, "n": MAPS})

    async def _step(self, number: int) -> None:
        batch = await self._pool.batch(number)
        start_s = time.monotonic()
        report = await asyncio.to_thread(self._update, batch)
        trained_s = time.monotonic()
        receipt = await self._publish(number)
        self._done = number + 1
        await self._pool.published(self._done)
        record = _step_record(number, start_s, trained_s, batch, report, receipt)
        self._records.step(record)
        self._emit({"event": "step", **record})
        if self._scoring:
            await self._scoring
        self._scoring = asyncio.create_task(self._score(batch, number))

    def _update(self, batch: Sequence[Trajectory]) -> UpdateReport:
        scored = advantages([t.reward for t in batch], [t.group for t in batch])
        if self._config.control == "shuffled-advantage":
            self._rng.shuffle(scored)
        return self._learner.update(batch, scored)

    async def _publish(self, parent: int) -> Receipt:
        bits = await asyncio.to_thread(published_bits, self._learner.model)
        receipt = await self._publisher.publish(
            parent + 1, parent, self._versions.bits(parent), bits
        )
        self._versions.remember(parent + 1, bits)
        return receipt

    async def _score(self, batch: Sequence[Trajectory], step: int | None) -> None:
        recomputed = await asyncio.to_thread(self._versions.logprobs, batch)
        self._records.trajectories(batch, recomputed, step, self._pool.delivered)


def _step_record(
    number: int,
    start_s: float,
    trained_s: float,
    batch: Sequence[Trajectory],
    report: UpdateReport,
    receipt: Receipt,
) -> dict[str, object]:
    return {
        "step": number,
        "start_s": start_s,
        "end_s": time.monotonic(),
        "reward_mean": sum(t.reward for t in batch) / len(batch),
        "reward_n": len(batch),
        "tokens": sum(len(p.turn.token_ids) for t in batch for p in t.turns),
        "trajectories": len(batch),
        "spanning": sum(len(t.versions) > 1 for t in batch),
        "clip_fraction": report.clip_fraction,
        "grad_norm": report.grad_norm,
        "version": receipt.version,
        "density": receipt.density,
        "full_bytes": receipt.full_bytes,
        "wire_bytes": receipt.wire_bytes,
        "publish_s": receipt.publish_s,
        "train_s": trained_s - start_s,
    }
