"""Errors that a person reads: one line that says what is wrong and what to do next.

RoseError
├── ConfigError          a setting, option or file is wrong
├── EngineStartError     an engine could not be started
├── UnavailableError     a process of ROSE does not answer
└── RefusedError         a request breaks a rule (stale epoch, wrong version, no room)
"""


class RoseError(Exception):
    """Base of all errors that end a command with one line and exit code 2."""


class ConfigError(RoseError):
    """A setting, an option or a file is wrong."""


class EngineStartError(RoseError):
    """An engine could not be started."""


class UnavailableError(RoseError):
    """A process of ROSE does not answer."""


class RefusedError(RoseError):
    """A request breaks a rule: stale epoch, wrong version, no room."""
