"""Errors of the input of `slo`. Each message is one line and says what to do next.

ValueError
└── SloError
    ├── TargetError          latency targets that cannot be, or contradict each other
    ├── UnknownPresetError   no preset has that name
    ├── ProfileError         step samples or a saved profile that no step model can come from
    └── ScrapeError          text that is not the metrics of one engine this package knows
"""


class SloError(ValueError):
    """Any of the below."""


class TargetError(SloError):
    """A latency target is not a positive time, or two targets contradict each other."""


class UnknownPresetError(SloError):
    """No preset has that name."""


class ProfileError(SloError):
    """Samples or a saved profile from which no step model can be made."""


class ScrapeError(SloError):
    """Not the metrics of one known engine."""
