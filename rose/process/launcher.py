"""Launcher: places the process it runs in, then becomes the program it is given.

    launcher.py [OPTION=VALUE…] -- PROGRAM [ARGUMENT…]

    parent=PID        parent dies ──SIGKILL──► program
    family=yes        program dies ──SIGUSR1──► keeper ──SIGKILL──► the whole group
    claim=FD          nobody has locked FD for orphan_s, or kill_file appears ──► keeper ──► group
    cores=N,N,…       pinned there
    share=background  behind every normal process, and killed first when memory runs out
    share=aside       a normal process of a tenth of the weight, and killed first
    cgroup=DIR        moved there first

The keeper is a process beside the program, so it works while the program starts, hangs or is dead.
It is a program of its own, since code run between fork and exec crashes in a parent that has
threads of gRPC. Run by path with `python -I -S`: standard library only.
"""

import ctypes
import fcntl
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

PR_SET_PDEATHSIG = 1
SYS_PROCESS_MRELEASE = 448
ORPHANED = 75
POLL_S = 0.05
NICEST = 19
# On a shared GPU launches must not wait, so that a step that has begun ends in time.
ASIDE_NICE = 10
Share = Literal["background", "aside"]
_FLOCK = struct.Struct("hhqqi4x")
_STOPS = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(words: list[str]) -> None:
    """Place this process by its options, then become the program; this does not return."""
    border = words.index("--")
    options = dict(word.split("=", 1) for word in words[:border])
    if "parent" in options:
        die_with(int(options["parent"]), signal.SIGKILL)
    if "family" in options or "claim" in options:
        fork_keeper(os.getpid(), options)
    place(options)
    program = words[border + 1 :]
    os.execvp(program[0], program)  # noqa: S606 - becoming the program is the point


def die_with(parent: int, death: signal.Signals) -> None:
    """Have the kernel send `death` to this process when its parent ends.

    Exits at once if the parent has ended already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death)
    if os.getppid() != parent:
        sys.exit(ORPHANED)  # it died before the line above: nothing will ever tell this process


def fork_keeper(leader: int, options: Mapping[str, str]) -> None:
    """Start the keeper process, which kills this group once its leader may not run.

    The leader is this process.
    """
    # Block signals before the fork, so that none finds the keeper unprepared.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    if os.fork() == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
            if os.getppid() == leader:
                keep(options)
        finally:
            # Whatever ends the watch, even an error in it, ends the group: nothing may run
            # unwatched.
            try:
                kill_group(leader)
            finally:
                os.killpg(leader, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    if "claim" in options:
        os.set_inheritable(int(options["claim"]), False)


def keep(options: Mapping[str, str]) -> None:
    """Wait until the leader is dead or unclaimed, or the kill file exists; then return."""
    if "claim" not in options:
        signal.sigwait({signal.SIGUSR1})
        return
    claim, orphan_s = int(options["claim"]), float(options["orphan_s"])
    claimed_s = time.monotonic()
    while signal.sigtimedwait({signal.SIGUSR1}, POLL_S) is None:
        if claim_holder(claim) is not None:
            claimed_s = time.monotonic()
        if time.monotonic() - claimed_s > orphan_s or Path(options["kill_file"]).exists():
            return


def kill_group(group: int) -> None:
    """Kill all processes of the group but this one, and free their memory soon.

    A killed process frees its memory itself, as part of its own end: one of lower priority does so
    only when no other process wants its core. So raise it to normal priority first, where that is
    permitted, and otherwise free its memory from here.
    """
    members = _others_of(group)
    handles = [handle for pid in members if (handle := _handle_of(pid)) is not None]
    _raise(members)
    for pid in members:
        _permitted(partial(os.kill, pid, signal.SIGKILL))
    for handle in handles:
        ctypes.CDLL(None).syscall(SYS_PROCESS_MRELEASE, handle, 0)
        os.close(handle)


def raise_group(group: int) -> bool:
    """Raise the group's threads to normal priority; return True if all of that was permitted."""
    return _raise(_others_of(group))


def _raise(members: Iterable[int]) -> bool:
    raised = True
    for thread in _threads_of(members):
        raised &= _permitted(
            partial(os.sched_setscheduler, thread, os.SCHED_OTHER, os.sched_param(0))
        )
        _permitted(partial(os.setpriority, os.PRIO_PROCESS, thread, 0))
    return raised


def lower_group(group: int, share: Share = "background") -> None:
    """Lower the group's threads as `share` says, as far as that is permitted."""
    for thread in _threads_of(_others_of(group)):
        _lower(thread, share)


def _lower(thread: int, share: Share) -> None:
    if share == "aside":
        _permitted(partial(os.setpriority, os.PRIO_PROCESS, thread, ASIDE_NICE))
    elif not _permitted(partial(os.sched_setscheduler, thread, os.SCHED_IDLE, os.sched_param(0))):
        _permitted(partial(os.setpriority, os.PRIO_PROCESS, thread, NICEST))


def _others_of(group: int) -> list[int]:
    return [pid for pid in _members(group) if pid != os.getpid()]


def _threads_of(members: Iterable[int]) -> Iterator[int]:
    return (thread for pid in members for thread in _threads(pid))


def _members(group: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(name)) == group:
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def _handle_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def claim_holder(descriptor: int) -> int | None:
    """Return the id of the process that has locked the file; None if no living one has."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else int(pid)


def place(options: Mapping[str, str]) -> None:
    """Pin this process, move it to a cgroup and lower its priority, as its options say.

    Only pinning must succeed. `rose.node.guest.cpu_placement` reads the result back.
    """
    if "cores" in options:
        os.sched_setaffinity(0, set(map(int, options["cores"].split(","))))
    if "cgroup" in options:
        _permitted(lambda: Path(options["cgroup"], "cgroup.procs").write_text(str(os.getpid())))
    if "share" in options:
        _lower(0, "aside" if options["share"] == "aside" else "background")
        _permitted(lambda: Path("/proc/self/oom_score_adj").write_text("1000"))


def _permitted(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
