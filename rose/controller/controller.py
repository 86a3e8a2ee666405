"""PolicyController: the shell that follows the API server and acts in the scheduler's name.

    follow     list and watch, in threads ──> Reflector
    probe      each half second, beside the watch ──> Reflector
    reconcile  at each change and each half second ──> policies in force, then `objects_heard`
    say        every other second ──> statuses that differ, then their events

`objects_heard` keeps policies of objects from being held. It names a moment only when all objects
that the API server had then are in force and durable.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from elastic_scheduler.capacity import CapacityPolicy
from rose.controller.conditions import (
    INVALID,
    REFUSED,
    Refusal,
    differs,
    dumped,
    events_of,
    is_news,
    judged,
)
from rose.controller.kube_api import ApiError, KubeApi, Watch
from rose.controller.reconciler import ObjectReader, plan
from rose.controller.reflector import (
    Action,
    AskList,
    AskWatch,
    Changed,
    Ended,
    Event,
    Listed,
    Object,
    Opened,
    Pause,
    Probed,
    Received,
    Reflector,
    Start,
    StopWatch,
    Woke,
)
from rose.errors import ConfigError, RefusedError
from rose.scheduler.core.messages import PolicyApplied, PolicyDeleted
from rose.scheduler.core.policy_views import PolicyView

PROBE_S: Final = 0.5
RECONCILE_S: Final = 0.5
STATUS_S: Final = 2.0
# Changed figures alone are written no more often than this.
FIGURES_S: Final = 15.0
SILENT_S: Final = 2.0
BY: Final = "kubernetes"


class Scheduler(Protocol):
    """The leading scheduler, as the controller uses it."""

    async def ask(self, event: PolicyApplied | PolicyDeleted, by: str) -> int:
        """Carry a request out durably."""

    def objects_heard(self, heard_s: float, refused: frozenset[str]) -> None:
        """Report the time at which the policies of objects were last known to be complete."""

    def policies_in_force(self) -> tuple[Mapping[str, CapacityPolicy], frozenset[str]]:
        """Return all policies by name, and the names of those that come from objects."""

    def policy_views(self) -> Mapping[str, PolicyView]:
        """Return the scheduler's view of each policy."""


class PolicyController:
    """Follows RoseCapacityPolicy objects for one term of a scheduler.

    events(event, **fields): takes `objects_unheard`, `objects_heard`, `object_refused`.
    clock: the scheduler's.
    """

    def __init__(
        self,
        api: KubeApi,
        scheduler: Scheduler,
        events: Callable[..., object],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._scheduler, self._events = api, scheduler, events
        self._clock, self._wall_clock = clock, wall_clock
        self._reader = ObjectReader()
        self._call: asyncio.Task[None] | None = None
        self._watch: _WatchThread | None = None
        self._refused: dict[str, Refusal] = {}
        self._written_s: dict[str, float] = {}
        self._unheard = False
        self._unstored = self._unsaid = ""
        self._begin()

    def _begin(self) -> None:
        self._reflector = Reflector()
        # Each event with its watch.
        self._inbox: asyncio.Queue[tuple[_WatchThread | None, Event]] = asyncio.Queue()
        self._changed = asyncio.Event()

    def troubles(self) -> list[str]:
        """Return the faults that stop its work now, a line each."""
        status = self._reflector.status()
        why = status.trouble
        if not why and status.heard_s is not None and self._clock() > status.heard_s + SILENT_S:
            why = "the API server is silent"
        held = f"policies of objects are held: {why}" if why else ""
        return [each for each in (held, self._unstored, self._unsaid) if each]

    async def run(self) -> None:
        """Run until cancelled; a second call starts anew."""
        self._begin()
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._follow, self._probe, self._reconcile, self._say):
                    group.create_task(work())
        finally:
            self._stop_watch()
            if self._call is not None:
                self._call.cancel()

    # ---- following the API server ----

    async def _follow(self) -> None:
        self._feed(Start())
        while True:
            watch, event = await self._inbox.get()
            # An event of a watch that was given up may still be in the queue.
            if watch is None or watch is self._watch:
                self._feed(event)

    def _feed(self, event: Event) -> None:
        for action in self._reflector.step(event, self._clock()):
            self._carry_out(action)
        self._say_trouble()

    def _carry_out(self, action: Action) -> None:
        match action:
            case AskList():
                self._call = asyncio.create_task(self._list())
            case AskWatch():
                self._stop_watch()
                loop = asyncio.get_running_loop()
                self._watch = _WatchThread(self._api, action.resource_version, loop, self._inbox)
            case StopWatch():
                self._stop_watch()
            case Pause():
                self._call = asyncio.create_task(self._wake(action.pause_s))
            case Changed():
                self._changed.set()

    async def _list(self) -> None:
        try:
            event: Event = Listed(await asyncio.to_thread(self._api.list))
        except ApiError as error:
            event = Ended(str(error), error.code)
        self._inbox.put_nowait((None, event))

    async def _wake(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._inbox.put_nowait((None, Woke()))

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            asked_s = self._clock()
            with suppress(ApiError):  # then nothing was heard, which is what counts
                body = await asyncio.to_thread(self._api.probe)
                self._inbox.put_nowait((None, Probed(body, asked_s)))

    def _say_trouble(self) -> None:
        status = self._reflector.status()
        if bool(status.trouble) == self._unheard:
            return
        self._unheard = bool(status.trouble)
        if self._unheard:
            self._events("objects_unheard", message=status.trouble)
        else:
            self._events("objects_heard", objects=len(status.objects))

    # ---- policies in force ----

    async def _reconcile(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECONCILE_S):
                    await self._changed.wait()
            self._changed.clear()
            status = self._reflector.status()
            if status.synced and status.heard_s is not None:
                await self._put_in_force(dict(status.objects), status.heard_s)

    async def _put_in_force(self, objects: Mapping[str, Object], heard_s: float) -> None:
        read = self._reader.read(objects)
        todo = plan(read, *self._scheduler.policies_in_force())
        refused = {name: Refusal(INVALID, line) for name, line in (todo.refused or {}).items()}
        try:
            for policy in todo.apply:
                refusal = await self._apply(policy)
                if refusal is not None:
                    refused[policy.name] = refusal
            for name in todo.delete:
                await self._scheduler.ask(PolicyDeleted(name, of_object=True), BY)
        except TimeoutError:
            self._unstored = "the store takes no writes for now: policies of objects wait"
            return
        self._unstored = ""
        for name in refused.keys() - self._refused.keys():
            self._events("object_refused", policy=name, message=refused[name].line)
        self._refused = refused
        self._scheduler.objects_heard(heard_s, frozenset(refused))

    async def _apply(self, policy: CapacityPolicy) -> Refusal | None:
        try:
            await self._scheduler.ask(PolicyApplied(policy, of_object=True), BY)
        except (RefusedError, ConfigError) as error:
            return Refusal(REFUSED, str(error))
        return None

    # ---- what objects say of themselves ----

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            status = self._reflector.status()
            if not status.synced or status.trouble:
                continue
            views = self._scheduler.policy_views()
            why = ""
            for name, each in sorted(status.objects.items()):
                view = views.get(name)
                own = view if view is not None and view.of_object else None
                why = await self._say_one(name, each, own) or why
            for name in self._written_s.keys() - status.objects.keys():
                del self._written_s[name]
            self._unsaid = why

    async def _say_one(self, name: str, each: Object, view: PolicyView | None) -> str:
        """Write the status of one object if it differs; return a fault in that, or ""."""
        wall_s = self._wall_clock()
        status = judged(each, self._refused.get(name), view, wall_s)
        said = dumped(status)
        now_s = self._clock()
        due = now_s >= self._written_s.get(name, -FIGURES_S) + FIGURES_S
        if not differs(each, said) or not (due or is_news(each, said)):
            return ""
        version = each["metadata"]["resourceVersion"]
        try:
            await asyncio.to_thread(self._api.write_status, name, version, said)
            self._written_s[name] = now_s
            for event in events_of(each, status, wall_s):
                await asyncio.to_thread(self._api.create_event, event)
        except ApiError as error:
            # The watch reports an object that changed or was deleted meanwhile.
            return "" if error.code in (404, 409) else f"status of {name}: {error}"
        return ""


class _WatchThread:
    """Reader of one watch in a thread of its own."""

    def __init__(
        self,
        api: KubeApi,
        version: str,
        loop: asyncio.AbstractEventLoop,
        inbox: "asyncio.Queue[tuple[_WatchThread | None, Event]]",
    ) -> None:
        self._api, self._version, self._loop, self._inbox = api, version, loop, inbox
        self._stopped = False
        self._watch: Watch | None = None
        # A daemon: a process that ends does not wait for a silent server.
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """End it; its later events are dropped."""
        self._stopped = True
        if self._watch is not None:
            with suppress(Exception):  # it may have ended at this very moment
                self._watch.stop()

    def _run(self) -> None:
        end = Ended()
        try:
            self._watch = self._api.watch(self._version)
            if self._stopped:  # while it was opened
                self._watch.stop()
            self._tell(Opened())
            for chunk in self._watch.chunks():
                self._tell(Received(chunk))
        except ApiError as error:
            end = Ended(str(error), error.code)
        except Exception as error:  # noqa: BLE001 - a watch that ends, for whatever reason, is resumed
            end = Ended(f"the watch broke ({type(error).__name__}: {error})")
        self._tell(end)

    def _tell(self, event: Event) -> None:
        # Its loop may be closed by now, and nobody reads the queue then.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event) -> None:
        self._inbox.put_nowait((self, event))
