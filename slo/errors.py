"""Errors of the input of `slo`. Each message is one line and says what to do next.

ValueError
└── SloError
    ├── TargetError          latency targets that cannot be, or contradict each other
    ├── UnknownPresetError   no preset has that name
    ├── ProfileError         step samples or a saved profile that no step model can come from
    └── ScrapeError          text that is not the metrics of one engine this package knows
"""


class SloError(ValueError):
    """Base of the errors of this package."""


class TargetError(SloError):
    """Error: a latency target is not a positive time, or two targets contradict each other."""


class UnknownPresetError(SloError):
    """Error: no preset has that name."""


class ProfileError(SloError):
    """Error: no step model can be made from these samples or this saved profile."""


class ScrapeError(SloError):
    """Error: the text does not hold the metrics of one known engine."""
