"""The front's faces, fed with any bytes: trainers' calls, and what lies in their folders.

Each `run_…` takes one input and raises AssertionError where the front is at fault: an answer of 500
or without a line, a path outside of its roots, or an exception that nobody expects there.
"""

import asyncio
import functools
import json
import tempfile
import time
import zlib
from pathlib import Path
from typing import Final

import zstandard
from aiohttp import web

from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.gateway.http_requests import Authenticator
from rose.integrations import TrainerSettings
from rose.integrations.front import control_calls as calls
from rose.integrations.front.checkpoint_folder import INDEX, WeightRoots, look
from rose.integrations.front.forwarding import Forwarding
from rose.integrations.front.pulled_weights import PulledWeights
from rose.integrations.front.server import FrontServer
from rose.integrations.front.settings import FrontSettings
from rose.integrations.front.updates import CheckpointUpdates
from rose.integrations.front.watch import CheckpointWatcher
from rose.integrations.named_weights import Named
from rose.process.http_port import guarded
from tests.fuzz.wire import Wire, answers_of

ROUTES = (
    *sorted(calls.UPDATES),
    *sorted(calls.DONE),
    *sorted(calls.REFUSED),
    "/abort_request",
    "/workers",
    "/generate",
)
DOCUMENTED = frozenset({200, 400, 404, 405, 408, 413, 415, 417, 503})


def run_routes(data: bytes) -> None:
    """A body of a route: the first byte says of which."""
    path, body = ROUTES[data[0] % len(ROUTES)] if data else ROUTES[0], data[1:]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    _answered(head.encode() + body)


def run_http(data: bytes) -> None:
    """Fuzz the bytes of a connection, HTTP or not."""
    _answered(data)


def run_path(data: bytes) -> None:
    """A path that a caller names."""
    roots = WeightRoots([_folder()])
    try:
        found = roots.folder(data.decode("utf-8", "surrogateescape"))
    except RefusedError:
        return
    assert found.is_relative_to(_folder().resolve())


def run_weights(data: bytes) -> None:
    """A file of weights in a folder."""
    _read("model.safetensors", data)


def run_index(data: bytes) -> None:
    """The index of a folder."""
    _read(INDEX, data)


def run_changes(data: bytes) -> None:
    """A file of changes, by each encoding: what a tensor's become, compressed."""
    folder = _folder() / "stream/weight_v000001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.safetensors").write_bytes(data)
    pulling = PulledWeights(WeightRoots([_folder()]), _base())
    for encoding in ("xor", "overwrite"):
        says = {"version": 1, "base_version": 0, "delta_encoding": encoding}
        says |= {"compression_format": "zstd", "checksum_format": "adler32"}
        index = {"metadata": says, "weight_map": {"a": "a.safetensors"}}
        (folder / INDEX).write_text(json.dumps(index))
        try:
            pulling.pull(folder.parent, 1)
        except RefusedError:
            continue


def run_stream(data: bytes) -> None:
    """The index of a folder of changes."""
    folder = _folder() / "stream/weight_v000001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.safetensors").write_bytes(_changes_of(b"\0\0\0\0"))
    (folder / INDEX).write_bytes(data)
    try:
        PulledWeights(WeightRoots([_folder()]), _base()).pull(folder.parent, 1)
    except RefusedError:
        return


def run_noted(data: bytes) -> None:
    """Fuzz a watcher's saved note."""
    state = _folder() / "state"
    state.write_bytes(data)
    try:
        CheckpointWatcher(_Publisher(), _folder(), state)
    except ConfigError:
        return


class _Publisher:
    """Publishes nothing."""

    version = 0

    def publish(self, named: Named, *, wait: bool = True) -> int:
        raise RefusedError("nothing is published here")

    def wait_served(self, version: int, replicas: int | None = None) -> None:
        """Return: it is served."""


class _Nowhere(Forwarding):
    """Has no gateway."""

    def __init__(self) -> None:
        self._passing = set()

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        raise UnavailableError("there is no gateway")

    async def post(
        self, http: web.Request, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        raise UnavailableError("there is no gateway")

    async def forward(self, http: web.Request) -> web.StreamResponse | None:
        raise UnavailableError("there is no gateway")


class _Front:
    """A front without sockets, on an event loop that runs while an input is looked at."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        folder = _folder()
        trainer = TrainerSettings(
            "job", "127.0.0.1:1", "http://127.0.0.1:1", folder, folder / "root", folder / "key"
        )
        settings = FrontSettings(0, trainer, (folder,), whole_s=0.0)
        updates = CheckpointUpdates(_Publisher(), WeightRoots([folder]), whole_s=0.0)
        asking = Authenticator(None, None, time.time, lambda *_, **__: None)
        server = FrontServer(settings, updates, _Nowhere(), asking)
        runner = web.AppRunner(server.application(), handler_cancellation=True)
        await runner.setup()
        assert runner.server is not None
        self.wire = Wire(guarded(runner.server, server.connections, server.answer))


@functools.cache
def _front() -> _Front:
    return _Front()


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="rose-fuzz-front-"))


@functools.cache
def _base() -> Path:
    base = _folder() / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(len(_HEAD).to_bytes(8, "little") + _HEAD + bytes(4))
    return base


def _changes_of(raw: bytes) -> bytes:
    data = zstandard.ZstdCompressor().compress(raw)
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    head = json.dumps({"__metadata__": {"a": f"{zlib.adler32(bytes(4)):08x}"}, "a": entry})
    return len(head).to_bytes(8, "little") + head.encode() + data


def _answered(data: bytes) -> None:
    front = _front()
    sent = front.loop.run_until_complete(front.wire.sent_for(data))
    for status, body in answers_of(sent):
        assert status in DOCUMENTED, (status, body)
        assert status == 200 or not body or "\n" not in json.loads(body)["error"]["message"], body


def _read(name: str, data: bytes) -> None:
    folder = _folder() / "step_1"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / name).write_bytes(data)
    roots = WeightRoots([_folder()])
    try:
        saved = look(folder, roots)
    except RefusedError:
        return
    assert all(shard.entries or shard.size for shard in saved.shards)


_HEAD = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
SEEDS: Final[dict[str, tuple[bytes, ...]]] = {
    "run_routes": (
        b'\x01{"weight_dir":"/tmp/x"}',
        b'\x02{"model_path":"/tmp/x","weight_version":"1","abort_all_requests":true}',
        bytes([len(ROUTES) - 3]) + b'{"abort_all":true}',
        bytes([len(ROUTES) - 2]) + b'{"url":"http://x","worker_type":"regular"}',
    ),
    "run_http": (
        b"GET /server_info HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"DELETE /workers/rose HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /get_weight_version HTTP/1.0\r\n\r\n",
    ),
    "run_path": (b"/tmp", b"/tmp/../etc", b"a/b", b"/\0"),
    "run_weights": (len(_HEAD).to_bytes(8, "little") + _HEAD + b"\0\0\0\0",),
    "run_index": (b'{"weight_map":{"a":"model.safetensors"}}',),
    "run_changes": (_changes_of(bytes(4)), _changes_of(b"\1\0\0\0\2\0\0\0\0")),
    "run_stream": (
        b'{"metadata":{"version":"000001","base_version":"000000","delta_encoding":"xor",'
        b'"compression_format":"zstd","checksum_format":"adler32"},"weight_map":{"a":"a.safetensors"}}',
    ),
    "run_noted": (b'{"folder":"/","name":"step_1","number":1,"changed_ns":1,"version":1}',),
}
