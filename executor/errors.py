"""Errors of the executor.

ExecutorError
├── DeviceError      a GPU's driver refuses a call
│   ├── DeviceMemoryShort  the GPU has not enough free memory; the mappings are unchanged │   └──
MappingLost        addresses of the KV cache are without memory: the engine has to end ├──
LendingError     a host's KV memory cannot be lent ├── LoanError        the other side of a loan of
pages breaks the rules ├── PageError        the control page cannot be used: missing, foreign, of
another layout ├── PageReleaseError the kernel does not give KV memory back, or does not report it
└── PageUnreadable   a section stays torn: its writer died or hangs in the middle of a write
"""


class ExecutorError(Exception):
    """Root of everything this package raises on purpose."""


class DeviceError(ExecutorError):
    """A call to a GPU's driver failed."""


class DeviceMemoryShort(DeviceError):  # noqa: N818 -- a state of the GPU that passes
    """Not enough free memory; nothing changed, and a later call may succeed."""


class MappingLost(DeviceError):  # noqa: N818 -- says what happened
    """The KV cache could not be restored: a kernel that touches it would fault."""


class LendingError(ExecutorError):
    """The host's KV memory cannot be lent."""


class LoanError(ExecutorError):
    """A message about lent pages is invalid; its sender gets no more pages."""


class PageError(ExecutorError):
    """The control page cannot be created or mapped."""


class PageReleaseError(ExecutorError):
    """Pages of the KV cache can neither be returned nor counted."""


class PageUnreadable(ExecutorError):  # noqa: N818 -- the contract's word for the state of a section
    """A section has no consistent content right now."""
