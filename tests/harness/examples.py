"""Number of examples of a property test that needs another number than the profile's."""

from hypothesis import settings


def times(factor: float) -> int:
    """Return a multiple of the examples of the profile in HYPOTHESIS_PROFILE (see conftest)."""
    return max(1, round(factor * settings.default.max_examples))
