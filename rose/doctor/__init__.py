"""`rose doctor`: what stands in the way of a node, in plain lines with what to do next."""

from rose.doctor.finding import Finding, Level
from rose.doctor.main import diagnose

__all__ = ["Finding", "Level", "diagnose"]
