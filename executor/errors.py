"""Errors of the executor.

ExecutorError
├── PageError        the control page cannot be used: missing, foreign, of another layout
└── PageUnreadable   a section stays torn: its writer died or hangs in the middle of a write
"""


class ExecutorError(Exception):
    """Root of everything this package raises on purpose."""


class PageError(ExecutorError):
    """The control page cannot be created or mapped."""


class PageUnreadable(ExecutorError):  # noqa: N818 -- the contract's word for the state of a section
    """A section has no consistent content right now."""
