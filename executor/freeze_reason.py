"""Reasons why a guest runs, slows down or is frozen: the words on the page, each with its sentence.

The guard writes one into every grant, the gate one into the guest section; logs, metrics and the
CLI show the word, and the sentence for people.
"""

from enum import StrEnum
from typing import Final, Self


class FreezeReason(StrEnum):
    """Reason why a guest runs, slows down or is frozen: a word with a `sentence` to explain it."""

    sentence: str

    def __new__(cls, word: str, sentence: str) -> Self:
        """Return a member whose value is `word`, which compares and encodes like any text."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.sentence = sentence
        return member

    # Reasons of the guard, from the hardest to the softest.
    KILL_SWITCH = "kill_switch", "the kill switch is set; take it back with `rose unkill RUN_DIR`"
    STALLED = (
        "daemon_stalled",
        "this daemon stood still for longer than a grant lives; its leases are void",
    )
    HOST_DEAD = "host_dead", "the host's process is gone"
    HOST_FOREIGN = (
        "host_foreign",
        "the process that publishes is not host.pid, nor a child of it",
    )
    RECLAIM = "reclaim", "its memory is being taken back"
    OWING = "owing", "it gives back KV memory that its host took back, and does nothing else"
    DRAINED = "drained", "its turns were handed back"
    DRAINING = "draining", "its turns are being handed back"
    OPERATOR_HOLD = "operator_hold", "the operator holds it"
    CUT_OFF = (
        "cut_off",
        "its node has heard no scheduler for longer than staleAfter: nothing is harvested",
    )
    NO_LEASE = "no_lease", "no job has leased it"
    PRESSURE = "kv_pressure", "the host needs its KV cache"
    LEASED = "leased", "a job has leased it"
    WARM_UP = "warm_up", "its engine warms up while the host is idle"

    # Reasons of guard and gate against the host's state.
    PAGE_REPLACED = (
        "page_replaced",
        "the page's file was deleted or made anew: start the node again",
    )
    NO_HOST = (
        "no_host",
        "no process publishes on the page: start the host, with its plugin, on it",
    )
    HOST_VETO = (
        "host_veto",
        "an engine serves that cannot publish on the page: see the host's log",
    )
    HOST_UNREADABLE = "host_unreadable", "the host publishes half a record"
    HOST_STARTING = "host_starting", "the host took the page just now"
    HOST_SILENT = "host_silent", "the host's process has not said for a second that it lives"

    # Reasons of the gate.
    OK = "ok", "its grant holds, and its host is idle or has time to spare"
    THROTTLED = "throttled", "its grant allows smaller steps, or none"
    HOST_BUSY = "host_busy", "the host works, and only its idle time is lent"
    NO_SLACK = "no_slack", "the host has a deadline that the next step could make it miss"
    GRANT_EXPIRED = "grant_expired", "its node daemon has granted nothing for too long"
    HEARTBEAT_STALE = "heartbeat_stale", "its node daemon or its busy host is silent"
    PAGE_UNREADABLE = "page_unreadable", "its grant cannot be read"
    FROZEN = "frozen", "its grant freezes it"
    KILLED = "killed", "its grant ends it"
    ORPHANED = "orphaned", "no node daemon has granted anything for ROSE_ORPHAN_S"


_SENTENCES: Final = {str(reason): reason.sentence for reason in FreezeReason}


def explained(word: str) -> str:
    """Return a reason's word with its sentence, as `no_lease (no job has leased it)`.

    A word that this build does not know is returned alone.
    """
    sentence = _SENTENCES.get(word)
    return f"{word} ({sentence})" if sentence else word
