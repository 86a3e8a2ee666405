"""The scheduler: leases the nodes' offers to the job, and publishes which replica may be used.

It decides in a core without IO. Its loop, of which `rose.scheduler.service` is the real one:

    core = SchedulerCore(load(store))
    async for event in happenings:  # reports of nodes, requests of trainers and operators, Tick
        if isinstance(event, StoredEvent):
            store.write(core.writes(event))  # durable before it is carried out
        for action in core.step(event, monotonic_s()):
            match action:
                case Reserve(write, then):      store.write(write)  # and `then` is the next event
                case Command(stream, command):  send(stream, command)
                case CloseStream(stream):       close(stream)
                case PublishTable(table):       publish(table)
                case LogRecord(event, fields):  log(event, fields)
                case Answer(value):             answer(value)

`status(now_s)` is what `rose status` shows; the stories are in tests/traces/scheduler.
"""

from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.service import SchedulerService

__all__ = ["LeaseTimes", "SchedulerCore", "SchedulerService"]
