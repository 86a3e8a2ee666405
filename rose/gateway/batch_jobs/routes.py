"""Routes `/v1/files` and `/v1/batches`, as OpenAI's API has them.

A file and a batch belong to the caller that made them; nobody else sees them. Bodies of files are
read piece by piece, to disk.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError
from msgspec import Struct

from rose.gateway.apis.frontend import job_of, read_json
from rose.gateway.apis.wire import clean
from rose.gateway.batch_jobs.folder import Batch, BatchFolder, BatchRecord
from rose.gateway.batch_jobs.runner import BatchRunner
from rose.gateway.errors import BadRequest, BodyTooLarge, BodyTooSlow
from rose.gateway.http_requests import Bodies, caller_of, json_answer, own_job

FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
PURPOSE: Final = "batch"
MAX_FILE_BYTES: Final = 200 << 20
PIECE_BYTES: Final = 256 << 10
MAX_FIELD_BYTES: Final = 1_024
MOST_LISTED: Final = 100
MAX_WINDOW_S: Final = 7 * 86_400
MOST_METADATA, MAX_METADATA_CHARS = 16, 512
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,4})([hd])")
_UNIT_S: Final = {"h": 3_600, "d": 86_400}
T = TypeVar("T")


class NewBatch(Struct):
    """Body of a request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    job: str | None = None


_decode_new = msgspec.json.Decoder(NewBatch)


class BatchRoutes:
    """Routes of files and batches of one gateway."""

    def __init__(
        self,
        folder: BatchFolder,
        runner: BatchRunner,
        bodies: Bodies,
        endpoints: Collection[str],
        known_job: Callable[[str], str],
        silence_s: float,
    ) -> None:
        """endpoints: routes that a batch may be for. known_job: returns the registered job that a
        name, or none, stands for, and raises TurnError without one. silence_s: longest time without
        a piece of a file.
        """
        self._folder = folder
        self._runner = runner
        self._bodies = bodies
        self._endpoints = endpoints
        self._known_job = known_job
        self._silence_s = silence_s

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post(FILES, self._upload)
        router.add_get(FILES, self._files)
        router.add_get(FILES + "/{id}", self._file)
        router.add_delete(FILES + "/{id}", self._delete)
        router.add_get(FILES + "/{id}/content", self._content)
        router.add_post(BATCHES, self._create)
        router.add_get(BATCHES, self._batches)
        router.add_get(BATCHES + "/{id}", self._batch)
        router.add_post(BATCHES + "/{id}/cancel", self._cancel)

    # ---- files ----

    async def _upload(self, http: web.Request) -> web.Response:
        """Take a file in a multipart body with the fields `purpose` and `file`."""
        if http.content_type != "multipart/form-data":
            raise BadRequest("a file comes as multipart/form-data, with purpose and file")
        draft = self._folder.draft()
        purpose, name = "", None
        try:
            reader = await http.multipart()
            while (part := await self._soon(reader.next())) is not None:
                if not isinstance(part, BodyPartReader):
                    raise BadRequest("a part of the body has parts of its own", "file")
                if part.name == "purpose":
                    purpose = await self._text(part)
                elif part.name == "file":
                    name = clean(part.filename or "batch.jsonl")
                    await self._save(part, draft)
            if purpose != PURPOSE:
                raise BadRequest(f"purpose is {purpose[:40]!r}; it is batch here", "purpose")
            if name is None:
                raise BadRequest("file: send the JSONL file in this field", "file")
            scope = caller_of(http).scope
            kept = await asyncio.to_thread(self._folder.keep, draft, name[:255], purpose, scope)
        except (ValueError, HttpProcessingError, RequestPayloadError) as error:
            said = str(error).partition("\n")[0]
            raise BadRequest(f"the body is no multipart/form-data: {said:.200}") from error
        finally:
            await asyncio.to_thread(draft.unlink, missing_ok=True)
        return json_answer(kept)

    async def _save(self, part: BodyPartReader, draft: Path) -> None:
        """Write a part of a body to a file. Raises BodyTooLarge."""
        size, room = 0, await asyncio.to_thread(self._folder.room)
        with draft.open("wb") as file:
            while data := await self._soon(part.read_chunk(PIECE_BYTES)):
                size += len(data)
                if size > MAX_FILE_BYTES:
                    raise BodyTooLarge(f"a file has at most {MAX_FILE_BYTES} bytes; send several")
                if size > room:
                    raise BodyTooLarge("the batch folder is full (--batch-bytes); delete files")
                await asyncio.to_thread(file.write, data)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())

    async def _text(self, part: BodyPartReader) -> str:
        data = b""
        while some := await self._soon(part.read_chunk(MAX_FIELD_BYTES)):
            data += some
            if len(data) > MAX_FIELD_BYTES:
                raise BadRequest(f"{part.name}: at most {MAX_FIELD_BYTES} bytes", part.name)
        return data.decode("utf-8", "replace")

    async def _soon(self, reading: Any) -> Any:  # noqa: ANN401 -- what is read
        """Return what is read. Raises BodyTooSlow."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await reading
        except TimeoutError as error:
            raise BodyTooSlow(f"nothing came for {self._silence_s:.0f} s; send it again") from error

    async def _files(self, http: web.Request) -> web.Response:
        found = await asyncio.to_thread(self._folder.files, caller_of(http).scope)
        return _page(http, found)

    async def _file(self, http: web.Request) -> web.Response:
        file_id, scope = http.match_info["id"], caller_of(http).scope
        return json_answer(await asyncio.to_thread(self._folder.file, file_id, scope))

    async def _delete(self, http: web.Request) -> web.Response:
        file_id, scope = http.match_info["id"], caller_of(http).scope
        used = [
            each.shown.id
            for each in await asyncio.to_thread(self._folder.batches, scope)
            if not each.over and each.shown.input_file_id == file_id
        ]
        if used:
            raise BadRequest(f"{used[0]} reads this file; cancel it first")
        await asyncio.to_thread(self._folder.delete, file_id, scope)
        return json_answer({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, http: web.Request) -> web.StreamResponse:
        file_id, scope = http.match_info["id"], caller_of(http).scope
        path = await asyncio.to_thread(self._folder.content, file_id, scope)
        return web.FileResponse(path, headers={"Content-Type": "application/jsonl"})

    # ---- batches ----

    async def _create(self, http: web.Request) -> web.Response:
        asked, caller = read_json(_decode_new, await self._bodies.read(http)), caller_of(http)
        job = own_job(caller, job_of(http.headers, asked.job))
        # Another job may be registered while it runs.
        job = self._known_job(job) or job
        if asked.endpoint not in self._endpoints:
            known = ", ".join(sorted(self._endpoints))
            raise BadRequest(f"endpoint is {asked.endpoint[:80]!r}; one of {known}", "endpoint")
        window_s = _seconds_of(asked.completion_window)
        _check_metadata(asked.metadata)
        await asyncio.to_thread(self._folder.file, asked.input_file_id, caller.scope)
        now = int(time.time())
        batch = Batch(
            id=self._folder.new_batch_id(),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=asked.metadata,
        )
        record = BatchRecord(batch, caller.job, caller.subject, job)
        await asyncio.to_thread(self._folder.save, record)
        self._runner.wake()
        return json_answer(batch)

    async def _batches(self, http: web.Request) -> web.Response:
        found = await asyncio.to_thread(self._folder.batches, caller_of(http).scope)
        return _page(http, [each.shown for each in found])

    async def _batch(self, http: web.Request) -> web.Response:
        batch_id, scope = http.match_info["id"], caller_of(http).scope
        found = await asyncio.to_thread(self._folder.batch, batch_id, scope)
        return json_answer(found.shown)

    async def _cancel(self, http: web.Request) -> web.Response:
        batch_id, scope = http.match_info["id"], caller_of(http).scope
        record = await asyncio.to_thread(self._folder.batch, batch_id, scope)
        if record.over:
            raise BadRequest(f"the batch is {record.shown.status} already")
        return json_answer((await asyncio.to_thread(self._folder.cancel, record)).shown)


def _seconds_of(window: str) -> int:
    """Return the seconds of a completion window as `24h` or `2d`. Raises BadRequest."""
    said = _WINDOW.fullmatch(window)
    seconds = int(said[1]) * _UNIT_S[said[2]] if said else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise BadRequest(
            f"completion_window is {window[:40]!r}; write 24h, or another time up to 7d",
            "completion_window",
        )
    return seconds


def _check_metadata(metadata: dict[str, str] | None) -> None:
    given = metadata or {}
    if len(given) > MOST_METADATA or any(
        len(text) > MAX_METADATA_CHARS for pair in given.items() for text in pair
    ):
        raise BadRequest(
            f"metadata: at most {MOST_METADATA} pairs of {MAX_METADATA_CHARS} characters",
            "metadata",
        )


def _page(http: web.Request, found: list[T]) -> web.Response:
    """Answer with a page of a list: `limit` entries behind the one with the id `after`."""
    try:
        limit = int(http.query.get("limit", "20"))
    except ValueError:
        limit = 0
    if not 1 <= limit <= 10_000:
        raise BadRequest("limit: a number from 1 to 10000", "limit")
    limit, after = min(limit, MOST_LISTED), http.query.get("after")
    ids = [each.id for each in found]  # type: ignore[attr-defined]
    start = ids.index(after) + 1 if after in ids else 0
    page = found[start : start + limit]
    return json_answer(
        {
            "object": "list",
            "data": page,
            "first_id": ids[start] if page else None,
            "last_id": ids[start + len(page) - 1] if page else None,
            "has_more": start + limit < len(found),
        }
    )
