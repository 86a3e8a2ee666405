"""What the trainer needs of the outside: turns and a place to publish. Tests give stand-ins."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from rose.client import Sampling, Turn
from rose.publish import Receipt
from weight_transfer import TensorBits


class Rollouts(Protocol):
    """Generates turns: `rose.client.RolloutClient`."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        min_version: int | None = None,
    ) -> Turn:
        """One turn."""
        ...


class Publisher(Protocol):
    """Publishes versions: `rose.publish.WeightPublisher`."""

    async def publish(
        self,
        version: int,
        parent: int,
        old: Mapping[str, TensorBits],
        new: Mapping[str, TensorBits],
    ) -> Receipt:
        """The step from `old` to `new`."""
        ...
