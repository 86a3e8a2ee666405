"""Why nothing is measured.

RoseError
├── CardError     (rose.nvml) this card cannot be measured now: nothing was touched
└── PieceError    one piece could not be measured, the others may
"""

from rose.errors import RoseError


class PieceError(RoseError):
    """One piece could not be measured."""
