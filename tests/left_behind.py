"""Processes that a run started and did not end: all of them inherit a variable of its."""

import psutil


def left_behind(name: str, value: str) -> list[str]:
    """Their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
