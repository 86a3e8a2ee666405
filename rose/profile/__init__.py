"""`rose profile`: measure how long an engine's steps take, before it serves."""

from rose.profile.plan import Batch, LoggedStep, plan, samples_of

__all__ = ["Batch", "LoggedStep", "plan", "samples_of"]
