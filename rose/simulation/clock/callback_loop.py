"""Event loop for asyncio whose callbacks run when a simulation says so."""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from typing_extensions import override


class CallbackLoop(asyncio.AbstractEventLoop):
    """Loop without clock or sockets; a subclass has the time, and runs what is ready."""

    def __init__(self) -> None:
        self._ready: deque[asyncio.Handle] = deque()

    @abstractmethod
    def _broke(self, error: BaseException) -> None:
        """Take what a callback raised outside of any task."""

    @override
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    @override
    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    @override
    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    @override
    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and error is not None:
            self._broke(error)

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def is_running(self) -> bool:
        return True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""
