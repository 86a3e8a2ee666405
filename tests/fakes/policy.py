"""StandInSource: a gateway that answers from a script, for the trainer's unit tests."""

import asyncio
from collections.abc import Sequence

from bench.demo.frozen_lake import vocab
from rose.client import RolloutError, Sampling, Turn


class StandInSource:
    """Answers every turn with `reply`, stamped with `version`; fails where `fails` says so."""

    def __init__(self, reply: Sequence[int] | None = None) -> None:
        self.reply = tuple(reply or (vocab.THEN_ID, vocab.MOVE_IDS[1], vocab.STOP_ID))
        self.version = 0
        self.fails: set[str] = set()
        self.asked: list[tuple[str, int | None]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        min_version: int | None = None,
    ) -> Turn:
        """One scripted turn."""
        self.asked.append((request_id, min_version))
        await self.gate.wait()
        if session_id in self.fails:
            raise RolloutError("stand-in: this session fails")
        size = len(self.reply)
        return Turn(
            request_id=request_id,
            token_ids=self.reply,
            logprobs=(-1.0,) * size,
            versions=((self.version, 0, size),),
            segments=(("stand-in", "dedicated", 0, size),),
            finish_reason="stop",
            attempts=1,
        )
