"""Fuzz targets of the bytes that weights arrive as: `run_<decoder>(data)` for each way in.

A target takes any bytes, hands them to its decoder as a peer would, and returns None. It raises
nothing: an error that is documented is what a decoder is to say of garbage, and is swallowed here;
whatever else comes out, an answer of 500 or a decoder that works for longer than WITHIN_S, is what
is looked for. Seeds that reach deep: `SEEDS[name]`.
"""

import asyncio
import functools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from rose.addresses import free_port
from rose.weight_distribution import VersionServer
from rose.weight_distribution.credentials import Credentials
from weight_transfer.catalog import Catalog, Published, ReadLeases
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import (
    CatalogError,
    ChunkFormatError,
    DeltaFormatError,
    IndexFormatError,
    ManifestError,
    ShardError,
    SignatureError,
    TensorFormatError,
    WrongBaseError,
)
from weight_transfer.fetch import publisher_client
from weight_transfer.files.delta_file import (
    FORMAT,
    MAGIC,
    DeltaFile,
    DeltaIndex,
    compressed,
    decompressed,
)
from weight_transfer.format.checkpoint import parse_head
from weight_transfer.format.chunk import HEADER, decode_chunk, encode_chunk, overwrite_chunk
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.digest import digest_of
from weight_transfer.format.manifest import (
    CODEC,
    MAX_MANIFEST_BYTES,
    ChunkRef,
    Manifest,
    TensorUpdate,
    head_of,
)
from weight_transfer.format.signing import Envelope, Kind, SigningKey
from weight_transfer.format.tensors import TensorBits
from weight_transfer.publish.shards import ShardReport, ShardTensor
from weight_transfer.serve import Signer

WITHIN_S: Final = 5.0
KEY: Final = SigningKey.from_hex("01" * 32)
_ROWS, _COLUMNS = 64, 64


class SlowError(AssertionError):
    """A decoder that worked for too long on few bytes."""


@contextmanager
def _within(most_s: float = WITHIN_S) -> Iterator[None]:
    began_s = time.thread_time()
    yield
    took_s = time.thread_time() - began_s
    if took_s > most_s:
        raise SlowError(f"{took_s:.1f} s of work")


def _old() -> TensorBits:
    draws = np.random.default_rng(1).standard_normal(_ROWS * _COLUMNS).astype(np.float32)
    return TensorBits("w", "bfloat16", (_ROWS, _COLUMNS), (draws.view("<u4") >> 16).astype("<u2"))


def _stepped(old: TensorBits, density: float) -> TensorBits:
    moved = np.random.default_rng(2).random(old.bits.size) < density
    return TensorBits(old.name, old.dtype, old.shape, np.where(moved, old.bits + 1, old.bits))


OLD: Final = _old()
DIGEST: Final = digest_of(OLD.bits)
_CHUNKS = [
    encode_chunk(OLD, _stepped(OLD, density), (0, _ROWS), DIGEST, level).encoded
    for density in (0.0, 0.01, 0.1, 0.4, 1.0)
    for level in Level
]
_REFS = (ChunkRef("ab" * 32, (0, 5), "sparse", 100, 7), ChunkRef("cd" * 32, (5, 8), "empty", 64, 0))
_TENSORS = (
    TensorUpdate("w", "bfloat16", (8, 4), "0" * 16, "1" * 16, _REFS),
    TensorUpdate("f", "float32", (), "2" * 16, "2" * 16, ()),
)
_MANIFEST = Manifest("job", 2, 1, CODEC, "t", 10.0, 4e9, _TENSORS, origins=("http://a",)).signed(
    KEY
)
_CATALOG = publisher_client.encode_catalog(Catalog({4: 9}, (Published(5, 4, 7),)), "job", KEY, 50.0)
_INDEX = DeltaIndex(
    FORMAT,
    "fast",
    single=True,
    files=(DeltaFile("m.safetensors", 100, head="ab" * 32),),
    tensors=_TENSORS,
    fresh=(),
    blobs={"ab" * 32: (len(MAGIC), 10)},
)
_REPORT = ShardReport(0, 2, 1, (ShardTensor("w", "bfloat16", (8, 4), 7, _REFS),))


def run_chunk(data: bytes) -> None:
    """A chunk against its tensor; what it says lies inside."""
    with _within(), suppress(ChunkFormatError, WrongBaseError):
        change = decode_chunk(data, OLD, DIGEST)
        assert change.indices.size == change.new.size <= OLD.bits.size
        if change.indices.size:
            assert 0 <= change.indices[0] <= change.indices[-1] < OLD.bits.size
            assert (np.diff(change.indices) > 0).all()


def run_chunk_in_place(data: bytes) -> None:
    """A chunk written into its tensor: what is refused has written nothing."""
    tensor = TensorBits(OLD.name, OLD.dtype, OLD.shape, OLD.bits.copy())
    try:
        with _within():
            overwrite_chunk(data, tensor, DIGEST)
    except (ChunkFormatError, WrongBaseError):
        assert np.array_equal(tensor.bits, OLD.bits)


def run_chunk_payload(data: bytes) -> None:
    """A payload under a header that fits: one byte for the encoding, two for how many changes."""
    if len(data) < 3:
        return
    changed = int.from_bytes(data[1:3], "little") % (OLD.bits.size + 1)
    head = HEADER.pack(
        b"ROSC", 1, data[0] % 5, 2, 0, 0, _ROWS, _COLUMNS, changed, DIGEST, len(data) - 3, 0
    )
    run_chunk(head + data[3:])


def run_manifest(data: bytes) -> None:
    """A manifest that nobody vouches for; one that is read is written as it is read again."""
    with _within(), suppress(ManifestError):
        manifest = Manifest.from_bytes(data)
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def run_manifest_lines(data: bytes) -> None:
    """A payload in an envelope that fits, with a key that vouches for it."""
    raw = Envelope(Kind.MANIFEST, data).signed(KEY).to_bytes()
    with _within(), suppress(ManifestError):
        Manifest.from_bytes(raw, KEY.verify_key)


def run_manifest_expiry(data: bytes) -> None:
    """The first line alone."""
    with _within(), suppress(ManifestError):
        head_of(data)


def run_envelope(data: bytes) -> None:
    """Nothing that KEY did not sign passes."""
    if data in (_MANIFEST.to_bytes(), _CATALOG):
        return
    for kind in Kind:
        with suppress(ManifestError):
            envelope = Envelope.of(data, kind, MAX_MANIFEST_BYTES)
            try:
                envelope.verify(KEY.verify_key)
            except SignatureError:
                continue
            raise AssertionError("a signature that was not made")


def run_catalog(data: bytes) -> None:
    """A catalog, and every way through it."""
    with _within(), suppress(IndexFormatError):
        _walk(publisher_client.decode_catalog(data, "job", None, 60.0))


def run_catalog_payload(data: bytes) -> None:
    """A payload in an envelope that fits."""
    raw = Envelope(Kind.CATALOG, data).signed(KEY).to_bytes()
    with _within(), suppress(IndexFormatError):
        _walk(publisher_client.decode_catalog(raw, "job", KEY.verify_key, 60.0))


def _walk(catalog: Catalog) -> None:
    catalog.needed([], 0.0)
    catalog.base_due()
    for held in (None, 0):
        with suppress(CatalogError):
            catalog.plan(held, catalog.newest or 0)


def run_delta_index(data: bytes) -> None:
    """The index of a delta file as it is stored: compressed."""
    with _within(), suppress(DeltaFormatError):
        DeltaIndex.from_bytes(data, 1_000)


def run_delta_index_json(data: bytes) -> None:
    """The same, of which only the JSON is anything."""
    run_delta_index(compressed(data))


def run_shard_report(data: bytes) -> None:
    """A rank's report."""
    with _within(), suppress(ShardError):
        assert ShardReport.from_json(data).to_json()


def run_safetensors_head(data: bytes) -> None:
    """The head of a checkpoint's file."""
    with _within(), suppress(TensorFormatError):
        parse_head(data, max(1_000, len(data)), "model.safetensors")


def run_http_request(data: bytes) -> None:
    """Bytes as they come at a publisher's port: no answer of 500, and it serves on."""
    _face().send(data)


def run_http_lease(data: bytes) -> None:
    """The body of a lease that is asked for."""
    head = b"POST /leases HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer tok\r\n"
    _face().send(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)


def run_http_path(data: bytes) -> None:
    """Fuzz the path of a request with a good token."""
    path = bytes(byte for byte in data if byte > 32)
    _face().send(b"GET /%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer tok\r\n\r\n" % path)


def run_http_range(data: bytes) -> None:
    """Fuzz the range of a chunk's request."""
    asked = bytes(byte for byte in data if byte not in b"\r\n")
    head = b"GET /chunks/%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer tok\r\n"
    head += b"Range: %s\r\n\r\n"
    _face().send(head % (_face().chunk.encode(), asked))


def run_http_token(data: bytes) -> None:
    """Fuzz the token: only the right one is let in."""
    shown = bytes(byte for byte in data if byte not in b"\r\n")
    line = _face().send(
        b"GET /catalog HTTP/1.1\r\nHost: localhost\r\nAuthorization: %s\r\n\r\n" % shown
    )
    assert b" 200 " not in line or shown.strip() == b"Bearer tok"


class _Face:
    """A publisher's server in this process, on a loop that runs while it is asked."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rose-fuzz-")
        store = ChunkStore(Path(self._folder.name))
        self.chunk = store.put(_CHUNKS[-1])
        self._port = free_port()
        self._server = VersionServer(
            store,
            self._port,
            credentials=Credentials("tok"),
            leases=ReadLeases(0.0),
            signer=Signer("job", KEY),
        )
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._server.start())

    def send(self, data: bytes) -> bytes:
        """The first line of the answer, empty where the server hangs up or waits for more."""
        with _within():
            line = self._loop.run_until_complete(self._answer(data))
        assert b" 500 " not in line[:16], line
        return line

    async def _answer(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(data)
            if writer.can_write_eof():
                writer.write_eof()
            async with asyncio.timeout(WITHIN_S):
                return await reader.readline()
        except ConnectionError:
            return b""
        finally:
            writer.close()


@functools.cache
def _face() -> _Face:
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # It says each 400.
    return _Face()


Target = Callable[[bytes], None]
TARGETS: Final[dict[str, Target]] = {
    name: target for name, target in list(globals().items()) if name.startswith("run_")
}
SEEDS: Final[dict[str, tuple[bytes, ...]]] = dict.fromkeys(TARGETS, (b"",)) | {
    "run_chunk": tuple(_CHUNKS),
    "run_chunk_in_place": tuple(_CHUNKS),
    "run_chunk_payload": tuple(bytes([c[5]]) + c[32:34] + c[HEADER.size :] for c in _CHUNKS),
    "run_manifest": (_MANIFEST.to_bytes(),),
    "run_manifest_lines": (
        bytes(Envelope.of(_MANIFEST.to_bytes(), Kind.MANIFEST, 1 << 20).payload),
    ),
    "run_manifest_expiry": (_MANIFEST.to_bytes(),),
    "run_envelope": (_MANIFEST.to_bytes(), _CATALOG),
    "run_catalog": (_CATALOG,),
    "run_catalog_payload": (bytes(Envelope.of(_CATALOG, Kind.CATALOG, 1 << 20).payload),),
    "run_delta_index": (_INDEX.to_bytes(),),
    "run_delta_index_json": (decompressed(_INDEX.to_bytes(), 1 << 20),),
    "run_shard_report": (_REPORT.to_json(),),
    "run_safetensors_head": (
        b"\x40" + bytes(7) + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64),
    ),
    "run_http_request": (
        b"GET /catalog HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer tok\r\n\r\n",
    ),
    "run_http_lease": (b'{"reader":"r","version":1,"ttl_s":1.5}',),
    "run_http_path": (b"manifests/1.base", b"catalog", b"group", b"chunks/" + b"a" * 64),
    "run_http_range": (b"bytes=5-",),
    "run_http_token": (b"Bearer tok", b"Bearer \xff"),
}
