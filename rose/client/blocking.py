"""Client for code without an event loop: plain threads, Ray actors, notebooks.

An event loop on a thread of its own runs the asynchronous client for them.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar, Unpack

from rose.client.client import RolloutClient
from rose.client.credentials import NOTHING_SHOWN, GatewayCredentials
from rose.client.errors import ClientClosed
from rose.client.session import Member, Session
from rose.client.stream import Progress
from rose.client.types import (
    ClientSettings,
    GroupOptions,
    Retry,
    SessionOptions,
    TokenChunk,
    Turn,
    TurnOptions,
)
from rose.contract.gateway import SessionTrajectory, Versions
from rose.contract.replica import Sampling

T = TypeVar("T")


class LoopThread:
    """Daemon thread with an asyncio event loop that runs coroutines for any other thread.

    The thread starts with the object and ends with `stop`.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the loop's thread runs in this process; False in a forked child."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine `work` on the loop, wait for it, and return its result.

        Its error is raised here. An interrupted caller cancels the coroutine. Raises ClientClosed
        if the thread has ended or ends meanwhile, and if the loop's own thread calls.
        """
        if not self.alive:
            work.close()
            raise ClientClosed("the client's thread has ended: open the client anew")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientClosed("called from the client's own loop: use RolloutClient there")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop, cancel its running coroutines, and wait for the thread's end."""
        if not self.alive:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


T_co = TypeVar("T_co", covariant=True)


class BlockingRolloutClient:
    """Blocking form of `RolloutClient`, with an event loop on a thread of its own.

    Any number of threads may share one. The client pickles as its arguments and connects on first
    use, so a driver may create the client and hand it to Ray actors or processes. End it with
    `close`, or use it as a context manager.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        timeout_s: float = 300.0,
        *,
        retry: Retry | None = None,
        credentials: GatewayCredentials = NOTHING_SHOWN,
        job: str = "",
    ) -> None:
        """Create the client, without connecting; the arguments are those of `RolloutClient`."""
        self._client = RolloutClient(urls, timeout_s, retry=retry, credentials=credentials, job=job)
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._closed = False

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).of, (self._client.settings,)

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Return a new client with the arguments in `settings`."""
        urls, timeout_s, job = settings.urls, settings.timeout_s, settings.job
        credentials = settings.credentials
        return cls(urls, timeout_s, retry=settings.retry, credentials=credentials, job=job)

    @property
    def settings(self) -> ClientSettings:
        """Settings of the client: addresses, timeouts, retry, credentials, job."""
        return self._client.settings

    def __enter__(self) -> Self:
        self._loop()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the running turns and end the client's thread; later calls raise ClientClosed."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None and thread.alive:
            thread.call(self._client.__aexit__(None, None, None))
            thread.stop()

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Turn:
        """Generate one turn, wait for it, and return it whole; see `RolloutClient.generate`."""
        loop = self._loop()
        return loop.call(self._client.generate(token_ids, sampling, **options))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Iterator[TokenChunk]:
        """Yield the chunks of one turn as they arrive; closing the iterator early cancels it."""
        loop = self._loop()
        return _entered(loop, self._client.stream(token_ids, sampling, **options))

    def gather_group(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        members: int,
        *,
        group_id: str = "",
        need: int | None = None,
        hedges: int = 0,
        **options: Unpack[GroupOptions],
    ) -> Iterator[Member]:
        """Yield the samples of one prompt as they finish; closing the iterator cancels the others.

        See `RolloutClient.gather_group` for the arguments.
        """
        loop = self._loop()
        group = self._client.gather_group(
            token_ids, sampling, members, group_id=group_id, need=need, hedges=hedges, **options
        )
        return _entered(loop, group)

    @contextmanager
    def session(self, session_id: str = "", *, group_id: str = "") -> Iterator["BlockingSession"]:
        """Yield a BlockingSession for the turns of one trajectory.

        Leaving the block reports the trajectory's end to the gateways.
        """
        loop = self._loop()
        session = self._client.session(session_id, group_id=group_id)
        try:
            yield BlockingSession(session, loop)
        finally:
            loop.call(session.__aexit__(None, None, None))

    def cancel(self, request_id: str) -> bool:
        """Cancel the running turn with this request id, from any thread.

        Returns False for an id that is not running.
        """
        loop = self._loop()
        return loop.call(_on_loop(lambda: self._client.cancel(request_id)))

    def versions(self, job: str = "") -> Versions:
        """Return the policy version that each replica serves, and the newest of each job.

        See `RolloutClient.versions`.
        """
        loop = self._loop()
        return loop.call(self._client.versions(job))

    def trajectories(self, session_id: str, job: str = "") -> tuple[SessionTrajectory, ...]:
        """Return the chat turns of a session as token sequences.

        See `RolloutClient.trajectories`.
        """
        return self._loop().call(self._client.trajectories(session_id, job))

    def progress(self) -> Progress:
        """Return the running turns and the counts of ended ones; see `RolloutClient.progress`."""
        loop = self._loop()
        return loop.call(_on_loop(self._client.progress))

    def on_loop(self) -> tuple[RolloutClient, LoopThread]:
        """Return the asynchronous client, and the loop thread that alone may use it."""
        loop = self._loop()
        return self._client, loop

    def _loop(self) -> LoopThread:
        """Return the loop thread with the opened client; start both on first use and after a fork.

        Raises ClientClosed after `close`.
        """
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed: make another one")
            if self._thread is None or not self._thread.alive:
                self._client = RolloutClient.of(self._client.settings)
                self._thread = LoopThread("rose-client")
                self._thread.call(self._client.__aenter__())
            return self._thread


class BlockingSession:
    """Blocking form of `Session`: the turns of one trajectory."""

    def __init__(self, session: Session, loop: LoopThread) -> None:
        self._session = session
        self._loop = loop

    @property
    def id(self) -> str:
        """Session id, which every turn carries in the header `X-Session-ID`."""
        return self._session.id

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> Turn:
        """Generate the trajectory's next turn, block until it is whole, and return it."""
        return self._loop.call(self._session.generate(token_ids, sampling, **options))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> Iterator[TokenChunk]:
        """Yield the chunks of the trajectory's next turn; closing the iterator cancels it."""
        return _entered(self._loop, self._session.stream(token_ids, sampling, **options))


class _Entered(Protocol[T_co]):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: None, error: None, trace: None) -> None: ...

    async def __anext__(self) -> T_co: ...


def _entered(loop: LoopThread, source: _Entered[T]) -> Iterator[T]:
    """Yield the items of an asynchronous iterator, each awaited on the loop thread.

    Enters `source` as a context manager first and leaves it when the iterator ends or is closed.
    """
    loop.call(source.__aenter__())
    try:
        while True:
            try:
                item = loop.call(source.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        if loop.alive:
            loop.call(source.__aexit__(None, None, None))


async def _on_loop(work: Callable[[], T]) -> T:
    return work()
