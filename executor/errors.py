"""Errors of the executor.

ExecutorError
├── DeviceError      a GPU's driver refuses a call
│   ├── DeviceMemoryShort  the GPU has not enough free memory; the mappings are unchanged
│   └── MappingLost        addresses of the KV cache are without memory: the engine has to end
├── EngineProbeError the engine behaves otherwise than ROSE's adapter expects
├── LendingError     a host's KV memory cannot be lent
├── LoanError        the other side of a loan of pages breaks the rules
├── PageError        the control page cannot be used: missing, foreign, of another layout
├── PageReleaseError the kernel does not give KV memory back, or does not report it
├── PageUnreadable   a section stays torn: its writer died or hangs in the middle of a write
└── RankError        a rank of the engine does not report its KV pages, or cannot move them
"""


class ExecutorError(Exception):
    """Base of all errors that this package raises on purpose."""


class DeviceError(ExecutorError):
    """Error of a call to a GPU's driver."""


class DeviceMemoryShort(DeviceError):  # noqa: N818 -- a state of the GPU that passes
    """Too little free memory on the GPU; nothing changed, and a later call may succeed."""


class MappingLost(DeviceError):  # noqa: N818 -- says what happened
    """Addresses of the KV cache may be without memory, so that a kernel there would fault.

    The engine has to end.
    """


class EngineProbeError(ExecutorError):
    """Error: the engine behaves otherwise than ROSE's adapter expects."""


class LendingError(ExecutorError):
    """Error: the host's KV memory cannot be lent."""


class LoanError(ExecutorError):
    """Error: a message about lent pages is invalid, or no loan can be made with that process."""


class PageError(ExecutorError):
    """Error: the control page cannot be created, mapped or locked."""


class PageReleaseError(ExecutorError):
    """Error: the kernel does not give pages of the KV cache back, or does not report them."""


class PageUnreadable(ExecutorError):  # noqa: N818 -- the contract's word for the state of a section
    """Error: a section of the control page has no consistent content right now."""


class RankError(ExecutorError):
    """Error: a rank of the engine does not report its KV pages, or cannot move them."""
