"""`python -m bench.demo.view`: the view with made-up states, to work on how it looks."""

import math
import random
import time
from collections.abc import Iterator

from bench.demo.view import HostFigures, TrainingProgress, ViewState, open_view

STEPS = 34
FRAMES_PER_STEP = 4
FRAME_S = 0.1
START_S = 45.0
NOTE = "made-up numbers: nothing runs"


def _starting() -> Iterator[ViewState]:
    for elapsed_s in range(0, int(START_S), 3):
        parts = [
            TrainingProgress(name, min(elapsed_s, total), total)
            for name, total in (("host", 40.0), ("guest", START_S), ("dedicated", START_S))
        ]
        yield ViewState("starting three engines", elapsed_s, progress=parts, note=NOTE)


def _training() -> Iterator[ViewState]:
    rng = random.Random(0)  # noqa: S311 - made-up numbers
    rewards: list[float] = []
    for frame in range(STEPS * FRAMES_PER_STEP):
        step = frame // FRAMES_PER_STEP + 1
        if frame % FRAMES_PER_STEP == 0:
            rewards.append(0.45 + 0.3 * step / STEPS + rng.uniform(-0.05, 0.05))
        leased = math.sin(step) > 0
        slow = rng.uniform(0.9, 1.2)
        yield ViewState(
            stage="training",
            elapsed_s=START_S + frame,
            step=step,
            running=True,
            arm="leased" if leased else "frozen",
            rewards=tuple(rewards),
            tokens_per_s={"dedicated-0": 640 * slow, "guest-0": 310 * slow if leased else 0.0},
            host=HostFigures(0.021 * slow, 0.044 * slow, 0.008, 0.009 * slow, 0.2, 0.05, frame * 2),
            guest_mode="RUN" if leased else "FREEZE",
            guest_reason="host idle" if leased else "frozen by the experiment",
            revocations=step // 3,
            continued_turns=step // 2,
            version=step,
            wire_bytes=step * 900_000,
            full_bytes=step * 1_300_000,
            memory_bytes=4_400_000_000,
            note=NOTE,
        )


def rehearse() -> None:
    """Play a whole made-up run in a few seconds."""
    with open_view() as view:
        for states in (_starting(), _training()):
            for state in states:
                view.show(state)
                time.sleep(FRAME_S)
