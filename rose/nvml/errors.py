"""Why a card cannot be used or asked.

RoseError
└── CardError     no driver, no such card, or one that cannot be used now: nothing was touched
"""

from rose.errors import RoseError


class CardError(RoseError):
    """A GPU cannot be used, or its driver does not answer."""
