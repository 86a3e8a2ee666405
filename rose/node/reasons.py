"""Why a guest is frozen, in words for the log."""

from executor import guard, host_sight

_MEANING = {
    guard.NO_LEASE: "no job has leased it",
    guard.WARM_UP: "its engine warms up while the host is idle",
    guard.KILL_SWITCH: "the kill switch is set; take it back with `rose unkill RUN_DIR`",
    guard.HOST_DEAD: "the host's process is gone",
    guard.HOST_FOREIGN: "the process that publishes is not host.pid, nor a child of it",
    host_sight.PAGE_REPLACED: "the page's file was deleted or made anew: start the node again",
    host_sight.NO_HOST: "no process publishes on the page: start the host, with its plugin, on it",
    host_sight.HOST_VETO: "an engine serves that cannot publish on the page: see the host's log",
    host_sight.HOST_STARTING: "the host took the page just now",
    host_sight.HOST_SILENT: "the host's process has not said for a second that it lives",
    host_sight.HOST_UNREADABLE: "the host publishes half a record",
    guard.OPERATOR_HOLD: "the operator holds it",
    guard.DRAIN: "its turns are being handed back",
    guard.DRAINED: "its turns were handed back",
    guard.STALLED: "this daemon stood still for longer than a grant lives; its leases are void",
    guard.RECLAIM: "its memory is being taken back",
    guard.OWING: "it gives back KV memory that its host took back, and does nothing else",
    guard.PRESSURE: "the host needs its KV cache",
}


def sentence(guest: str, mode: str, reason: str) -> str:
    """One line: `guest-0 freeze: no_lease (no job has leased it)`."""
    meaning = _MEANING.get(reason)
    return f"{guest} {mode}: {reason}" + (f" ({meaning})" if meaning else "")
