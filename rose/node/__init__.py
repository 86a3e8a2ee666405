"""The node daemon: guards its host, runs its replicas, and updates them to each policy version.

Who may use a replica is decided by a core without IO, `LeaseStateMachine`. Its loop, of which
`LeaseAgent` is the real one: every event is stepped where it happens, one task calls the engine,
one call at a time, and sends the answer or, after a failure, a LeaseTick.

    core = LeaseStateMachine()
    async for event in happenings:  # Granted, Released, EngineUp, …; a LeaseTick at until_s
        for action in core.step(event, monotonic_s()):
            match action:
                case LeaseTakenBack() | Ended():  scheduler.tell(action)
                case Admit(epoch, life):          engine.admit(epoch)  # then EngineAdmitted
                case Drain(epoch, reason, life):  engine.drain(epoch)  # then EngineDrained

The loop of its grants is in `executor`; stories of a lease are in tests/traces/lease.
"""

from rose.node.config import HostConfig, NodeConfig, ReplicaConfig
from rose.node.daemon import NodeDaemon

__all__ = ["HostConfig", "NodeConfig", "NodeDaemon", "ReplicaConfig"]
