"""Errors of the executor.

ExecutorError
├── LendingError     a host's KV memory cannot be lent
├── PageError        the control page cannot be used: missing, foreign, of another layout
├── PageReleaseError the kernel does not give KV memory back, or does not say
└── PageUnreadable   a section stays torn: its writer died or hangs in the middle of a write
"""


class ExecutorError(Exception):
    """Root of everything this package raises on purpose."""


class LendingError(ExecutorError):
    """The host keeps its KV memory to itself."""


class PageError(ExecutorError):
    """The control page cannot be created or mapped."""


class PageReleaseError(ExecutorError):
    """Pages of the KV cache can neither be returned nor counted."""


class PageUnreadable(ExecutorError):  # noqa: N818 -- the contract's word for the state of a section
    """A section has no consistent content right now."""
