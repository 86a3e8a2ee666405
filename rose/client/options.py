"""What may be said of a turn beside prompt and sampling."""

import uuid
from collections.abc import Sequence
from typing import TypedDict, Unpack

from rose.client.turn import Ask, Sampling


class GroupOptions(TypedDict, total=False):
    """min_version, exact_version: policy versions that are accepted. priority: lower goes first.

    job: the training run's name; turns of one job are alike in length.
    """

    min_version: int | None
    exact_version: int | None
    priority: int
    job: str


class SessionOptions(GroupOptions, total=False):
    """request_id: of the turn, made up when missing; the same id is the same turn."""

    request_id: str


class TurnOptions(SessionOptions, total=False):
    """session_id: the trajectory's, so that the turn goes where its prefix is.

    group_id: of the samples of one prompt, whose lengths tell of each other. hedges: so many second
    copies its group_size turns may have together; not for streams.
    """

    session_id: str
    group_id: str
    group_size: int
    hedges: int


def ask_for(token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]) -> Ask:
    """The turn in full."""
    return Ask(
        options.get("request_id") or uuid.uuid4().hex,
        options.get("session_id", ""),
        tuple(token_ids),
        sampling,
        options.get("min_version"),
        options.get("exact_version"),
        options.get("priority", 0),
        options.get("group_id", ""),
        options.get("group_size", 0),
        options.get("hedges", 0),
        options.get("job", ""),
    )
