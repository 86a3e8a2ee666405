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
    """A turn was not generated."""


class GatewayUnavailable(RolloutError):  # noqa: N818 - a state, as in the tree above
    """No answer after all tries: look at the gateways and their replicas."""


class TurnTimedOut(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The turn took too long: give the client a longer `timeout_s`, or look at the replicas."""


class TurnCancelled(RolloutError):  # noqa: N818 - a state, as in the tree above
    """A caller of this client ended the turn."""


class VersionNotServed(RolloutError):  # noqa: N818 - a state, as in the tree above
    """No replica runs an acceptable policy version."""


class RequestRefused(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The request is wrong: sending it again does not help."""


class AnswerBroken(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The answer is not a turn: look at what listens under the gateway's address."""


class GroupsDropped(RolloutError):  # noqa: N818 - a state, as in the tree above
    """Episodes fail one after the other: the cause is the last one's error."""


class ClientClosed(RolloutError):  # noqa: N818 - a state, as in the tree above
    """Use the client inside `with` or `async with`."""
