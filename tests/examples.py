"""How many examples a property test draws where the profile's number is not what it wants."""

from hypothesis import settings


def times(factor: float) -> int:
    """So many times the examples of the profile that HYPOTHESIS_PROFILE chose (see conftest)."""
    return max(1, round(factor * settings.default.max_examples))
