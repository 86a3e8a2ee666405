"""Bounded hand-over between the core and the streams that it speaks on."""

import asyncio

import grpc

from rose.rpc import rose_pb2 as pb

# Far more than a version chain: a node this far behind attaches anew and gets all of it again.
COMMAND_LIMIT = 4_096


class CommandQueue:
    """Commands for one node, in order. Nothing is ever dropped: a full queue ends the stream."""

    def __init__(self, limit: int = COMMAND_LIMIT) -> None:
        self._queue: asyncio.Queue[pb.NodeCommand | None] = asyncio.Queue(limit + 1)
        self._limit = limit
        self.closed: str | None = None
        self.code = grpc.StatusCode.ABORTED

    def put(self, command: pb.NodeCommand) -> None:
        """Add a command; closes the queue when the node does not keep up."""
        if self.closed is None and self._queue.qsize() >= self._limit:
            self.close("the node does not take its commands; attach anew")
        elif self.closed is None:
            self._queue.put_nowait(command)

    def close(self, reason: str, code: grpc.StatusCode = grpc.StatusCode.ABORTED) -> None:
        """Let `get` return None once all commands before are taken."""
        if self.closed is None:
            self.closed, self.code = reason, code
            self._queue.put_nowait(None)

    async def get(self) -> pb.NodeCommand | None:
        """The next command, None when the stream shall end."""
        return await self._queue.get()


class TableSlot:
    """The newest table for one watcher; older ones that it did not take are gone."""

    def __init__(self) -> None:
        self._table: pb.ReplicaTable | None = None
        self._fresh = asyncio.Event()

    def put(self, table: pb.ReplicaTable | None) -> None:
        """Replace whatever waits; None ends the watch."""
        self._table = table
        self._fresh.set()

    async def get(self) -> pb.ReplicaTable | None:
        """The newest table, once there is one that was not taken yet; None at the end."""
        await self._fresh.wait()
        self._fresh.clear()
        return self._table
