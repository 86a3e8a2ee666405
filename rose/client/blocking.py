"""The client for code without an event loop: plain threads, Ray actors, notebooks."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

from rose.client.errors import ClientClosed
from rose.client.group import Member
from rose.client.loop_thread import LoopThread
from rose.client.options import GroupOptions, SessionOptions, TurnOptions
from rose.client.progress import Progress
from rose.client.rollout import RolloutClient
from rose.client.session import Session
from rose.client.settings import Retry
from rose.client.turn import Sampling, TokenChunk, Turn

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class BlockingRolloutClient:
    """`RolloutClient` on a loop thread of its own; any number of threads may share one.

    It pickles as what it was built from and opens on first use, so it may be made in a driver and
    handed to Ray actors or processes. `close` it, or use it as a context manager.
    """

    def __init__(
        self, urls: str | Sequence[str], timeout_s: float = 300.0, *, retry: Retry | None = None
    ) -> None:
        """As `RolloutClient`."""
        self._client = RolloutClient(urls, timeout_s, retry=retry)
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._closed = False

    def __reduce__(self) -> tuple[object, ...]:
        settings = self._client.settings
        return _rebuilt, (settings.urls, settings.timeout_s, settings.retry)

    def __enter__(self) -> Self:
        self._loop()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and end the thread; the client is not usable after that."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None and thread.alive:
            thread.call(self._client.__aexit__(None, None, None))
            thread.stop()

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Turn:
        """As `RolloutClient.generate`."""
        loop = self._loop()
        return loop.call(self._client.generate(token_ids, sampling, **options))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Iterator[TokenChunk]:
        """Chunks as they come; closing the iterator early cancels the turn."""
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
        """Members as they finish; closing the iterator early cancels the rest."""
        loop = self._loop()
        group = self._client.gather_group(
            token_ids,
            sampling,
            members,
            group_id=group_id,
            need=need,
            hedges=hedges,
            **options,
        )
        return _entered(loop, group)

    @contextmanager
    def session(self, session_id: str = "", *, group_id: str = "") -> Iterator["BlockingSession"]:
        """A trajectory; its end is told to the gateways."""
        loop = self._loop()
        session = self._client.session(session_id, group_id=group_id)
        try:
            yield BlockingSession(session, loop)
        finally:
            loop.call(session.__aexit__(None, None, None))

    def cancel(self, request_id: str) -> bool:
        """As `RolloutClient.cancel`, from any thread."""
        loop = self._loop()
        return loop.call(_on_loop(lambda: self._client.cancel(request_id)))

    def progress(self) -> Progress:
        """As `RolloutClient.progress`."""
        loop = self._loop()
        return loop.call(_on_loop(self._client.progress))

    def on_loop(self) -> tuple[RolloutClient, LoopThread]:
        """The client that does the work, and the thread on which alone it may be used."""
        loop = self._loop()
        return self._client, loop

    def _loop(self) -> LoopThread:
        """The thread; started on first use, and anew in a forked process."""
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed: make another one")
            if self._thread is None or not self._thread.alive:
                settings = self._client.settings
                self._client = RolloutClient(
                    settings.urls, settings.timeout_s, retry=settings.retry
                )
                self._thread = LoopThread("rose-client")
                self._thread.call(self._client.__aenter__())
            return self._thread


class BlockingSession:
    """`Session` for code without an event loop."""

    def __init__(self, session: Session, loop: LoopThread) -> None:
        self._session = session
        self._loop = loop

    @property
    def id(self) -> str:
        """What `X-Session-ID` says."""
        return self._session.id

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> Turn:
        """As `Session.generate`."""
        return self._loop.call(self._session.generate(token_ids, sampling, **options))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[SessionOptions]
    ) -> Iterator[TokenChunk]:
        """As `BlockingRolloutClient.stream`."""
        return _entered(self._loop, self._session.stream(token_ids, sampling, **options))


class _Entered(Protocol[T_co]):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: None, error: None, trace: None) -> None: ...

    async def __anext__(self) -> T_co: ...


def _entered(loop: LoopThread, source: _Entered[T]) -> Iterator[T]:
    """Items of `source`, read on the loop; it is left when the iterator ends or is closed."""
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


def _rebuilt(urls: tuple[str, ...], timeout_s: float, retry: Retry) -> BlockingRolloutClient:
    return BlockingRolloutClient(urls, timeout_s, retry=retry)
