"""`rose profile`: how long an engine's steps take, measured before anybody depends on it."""

from rose.profile.plan import Batch, LoggedStep, plan, samples_of

__all__ = ["Batch", "LoggedStep", "plan", "samples_of"]
