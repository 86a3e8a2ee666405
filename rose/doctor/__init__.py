"""`rose doctor`: finds what keeps a node from working, in plain lines with what to do next."""

from rose.doctor.checks import Finding, Severity
from rose.doctor.main import diagnose

__all__ = ["Finding", "Severity", "diagnose"]
