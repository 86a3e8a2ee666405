"""Calibration: step times of engines, measured by `rose profile` or of published GPU tables."""

from rose.simulation.calibration.profiles import read_profile
from rose.simulation.calibration.published import (
    PublishedEngine,
    published_engine,
    published_engines,
)

__all__ = ["PublishedEngine", "published_engine", "published_engines", "read_profile"]
