"""Errors of the rollout client. Each holds one message only, so all of them pickle.

RoseError
└── RolloutError
    ├── GatewayUnavailable        no gateway answered, or all said "come back later", in all tries
    ├── TurnTimedOut              the turn took longer than `timeout_s`, all tries together
    ├── TurnCancelled             `cancel` ended the turn, or its group had enough
    ├── VersionNotServed          no replica runs the requested policy version
    ├── RequestRefused            the request itself is wrong
    ├── AnswerBroken              the answer is not a turn: another server, or another version
    ├── GroupsDropped             a whole step's worth of groups failed: episodes or gateways
    └── ClientClosed              the client was used before `with`, or after its end
"""

from rose.errors import RoseError


class RolloutError(RoseError):
    """Base of all errors of the rollout client: the turn was not generated."""


class GatewayUnavailable(RolloutError):  # noqa: N818 - a state, as in the tree above
    """No gateway answered in any try, or all were busy: look at the gateways and their replicas."""


class TurnTimedOut(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The turn took longer than the client's `timeout_s`, all tries together."""


class TurnCancelled(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The turn was cancelled by its caller, or because its group no longer needs it."""


class VersionNotServed(RolloutError):  # noqa: N818 - a state, as in the tree above
    """No replica serves the requested policy version, or the trainer no longer accepts it."""


class RequestRefused(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The request itself is wrong: sending it again does not help."""


class AnswerBroken(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The gateway's answer is not a valid turn: look at what listens under that address."""


class GroupsDropped(RolloutError):  # noqa: N818 - a state, as in the tree above
    """A whole step's worth of groups failed; `__cause__` is the last episode's error."""


class ClientClosed(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The client was used before `with` or `async with`, or after its end."""
