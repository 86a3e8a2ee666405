"""`rose doctor`: what stands in the way of a node, in plain lines with what to do next."""

from rose.doctor.checks import Finding, Severity
from rose.doctor.main import diagnose

__all__ = ["Finding", "Severity", "diagnose"]
