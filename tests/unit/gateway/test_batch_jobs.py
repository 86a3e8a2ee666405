"""Batch jobs: each request of a file is answered once, below trainers' turns, whatever dies."""

import asyncio
import io
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.errors import ConfigError
from rose.gateway import Gateway
from rose.gateway.apis import VllmFrontend
from rose.gateway.apis.frontend import ApiRequest
from rose.gateway.batch_jobs import routes as routes_module
from rose.gateway.batch_jobs import runner as runner_module
from rose.gateway.batch_jobs.folder import ANSWERS, Batch, BatchFolder, BatchRecord, NotHere
from rose.gateway.batch_jobs.lines import faults_of
from rose.gateway.batch_jobs.runner import BatchCall, BatchRunner
from tests.fakes.replica import StandInReplica
from tests.harness.waiting import until_async
from tests.unit.gateway.gateway_cases import begin, calling, entry
from tests.unit.gateway.wire_cases import VLLM, get, vllm_body

KEY = {"Authorization": "Bearer any"}
OVER = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SCAN_S", 0.05), ("FLUSH_S", 0.005), ("FIRST_PAUSE_S", 0.01)):
        monkeypatch.setattr(runner_module, name, value)
    monkeypatch.setattr(runner_module, "SHOWN_S", 0.01)


def lines(count: int, tokens: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"ask-{k}",
            "method": "POST",
            "url": VLLM,
            "body": vllm_body(tokens, token_ids=[100 * k]),
        }
        for k in range(1, count + 1)
    ]


async def uploaded(
    session: aiohttp.ClientSession, text: bytes, purpose: str = "batch", **headers: str
) -> tuple[int, Any]:
    form = aiohttp.FormData()
    form.add_field("purpose", purpose)
    form.add_field("file", text, filename="asks.jsonl")
    async with session.post("/v1/files", data=form, headers=headers or KEY) as answer:
        return answer.status, await answer.json()


async def made(
    session: aiohttp.ClientSession, asked: Sequence[object] | bytes, **changes: Any
) -> tuple[int, Any]:
    """Upload these lines and return the answer to a request for a batch of them."""
    text = asked if isinstance(asked, bytes) else b"\n".join(json.dumps(a).encode() for a in asked)
    _, file = await uploaded(session, text)
    body = {"input_file_id": file["id"], "endpoint": VLLM, "completion_window": "24h", **changes}
    async with session.post("/v1/batches", json=body) as answer:
        return answer.status, await answer.json()


async def ended(session: aiohttp.ClientSession, batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async with asyncio.timeout(30):
        while found.get("status") not in OVER:
            found = await get(session, f"/v1/batches/{batch['id']}")
    return found


async def content(session: aiohttp.ClientSession, file_id: str | None) -> list[dict[str, Any]]:
    async with session.get(f"/v1/files/{file_id}/content") as answer:
        assert answer.status == 200
        return [json.loads(line) for line in (await answer.text()).splitlines()]


@asynccontextmanager
async def batching(
    folder: Path, replica: StandInReplica | None = None, **row: object
) -> AsyncIterator[tuple[StandInReplica, Gateway, aiohttp.ClientSession]]:
    async with (
        replica or StandInReplica() as replica,
        calling(entry(replica, "guest-0", **row), batch_dir=folder) as (gateway, session),
    ):
        yield replica, gateway, session


async def test_each_request_of_a_file_is_answered(tmp_path: Path) -> None:
    asked = lines(5)
    asked[1]["body"] = {"token_ids": [], "sampling_params": {}}
    asked[3]["body"]["stream"] = True
    async with batching(tmp_path) as (_, _, session):
        _, batch = await made(session, asked, metadata={"for": "evaluation"})
        assert batch["status"] == "validating"
        over = await ended(session, batch)
        answers = await content(session, over["output_file_id"])
        faults = await content(session, over["error_file_id"])
        (listed,) = (await get(session, "/v1/batches"))["data"]
        files = await get(session, "/v1/files?limit=2")
        metrics = await get(session, "/metrics")
    assert over["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
    assert (over["status"], over["metadata"]) == ("completed", {"for": "evaluation"})
    assert listed == over
    assert 'rose_gateway_batch_requests_total{result="failed"} 2' in metrics
    assert (len(files["data"]), files["has_more"]) == (2, True)
    by_name = {each["custom_id"]: each["response"] for each in answers}
    assert sorted(by_name) == ["ask-1", "ask-3", "ask-5"]
    choice = by_name["ask-3"]["body"]["choices"][0]
    assert choice["token_ids"] == [301, 302, 303]
    said = {each["custom_id"]: each["response"] for each in faults}
    assert {name: each["status_code"] for name, each in said.items()} == dict.fromkeys(
        ("ask-2", "ask-4"), 400
    )
    assert "a batch answers whole" in said["ask-4"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("text", "line", "code"),
    [
        (b"", None, "empty_file"),
        (b"{]", 1, "invalid_json_line"),
        (b'{"custom_id": "a"}', 1, "invalid_request"),
        (json.dumps({**lines(1)[0], "url": "/v1/embeddings"}).encode(), 1, "mismatched_endpoint"),
        (json.dumps({**lines(1)[0], "body": 3}).encode(), 1, "invalid_body"),
        (json.dumps({**lines(1)[0], "method": "GET"}).encode(), 1, "invalid_method"),
        (json.dumps({**lines(1)[0], "custom_id": ""}).encode(), 1, "invalid_custom_id"),
        (b"\n\n".join([json.dumps(lines(1)[0]).encode()] * 2), 3, "duplicate_custom_id"),
    ],
)
async def test_a_faulty_file_is_named_by_line_and_nothing_is_sent(
    tmp_path: Path, text: bytes, line: int | None, code: str
) -> None:
    async with batching(tmp_path) as (replica, _, session):
        _, batch = await made(session, text)
        over = await ended(session, batch)
    (fault,) = over["errors"]["data"]
    assert (over["status"], fault["line"], fault["code"]) == ("failed", line, code)
    assert not replica.requests


async def test_a_batch_goes_on_where_a_dead_gateway_left_it(tmp_path: Path) -> None:
    folder, asked = tmp_path / "shared", lines(40)
    async with batching(folder, max_sequences=2) as (replica, _, session):
        replica.delay_s = 0.002
        _, batch = await made(session, asked)
        log = folder / "batches" / f"{batch['id']}.{ANSWERS}"
        await until_async(
            lambda: log.exists() and log.read_bytes().count(b"\n") >= 5, 30, "answers"
        )
    done = log.read_bytes().count(b"\n")
    assert done < len(asked)
    with log.open("ab") as torn:
        torn.write(b'{"custom_id":"ask-40","resp')
    async with batching(folder) as (second, _, session):
        over = await ended(session, batch)
        answers = await content(session, over["output_file_id"])
    assert over["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert sorted(each["custom_id"] for each in answers) == sorted(a["custom_id"] for a in asked)
    assert len(second.requests) == 40 - done


async def test_two_gateways_of_a_folder_send_each_request_once(tmp_path: Path) -> None:
    async with (
        batching(tmp_path) as (first, _, session),
        batching(tmp_path) as (second, _, other),
    ):
        batches = [(await made(session, lines(10)))[1] for _ in range(3)]
        over = [await ended(other, batch) for batch in batches]
    assert [each["request_counts"]["completed"] for each in over] == [10] * 3
    assert len(first.requests) + len(second.requests) == 30


async def test_a_batch_whose_file_is_gone_fails(tmp_path: Path) -> None:
    async with batching(tmp_path, max_sequences=1) as (replica, _, session):
        replica.hang_after = 0
        _, batch = await made(session, lines(2))
        await until_async(lambda: replica.live == 1, 30, "a request")
        async with session.delete(f"/v1/files/{batch['input_file_id']}") as answer:
            assert answer.status == 400
    (tmp_path / "files" / f"{batch['input_file_id']}.json").unlink()
    async with batching(tmp_path) as (_, _, session):
        over = await ended(session, batch)
    (fault,) = over["errors"]["data"]
    assert (over["status"], fault["code"]) == ("failed", "file_missing")


async def test_a_fault_of_this_program_ends_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = VllmFrontend.read

    async def read(self: VllmFrontend, body: bytes, *given: Any) -> ApiRequest:
        if b"200" in body:
            raise KeyError("a fault")
        return await whole(self, body, *given)

    monkeypatch.setattr(VllmFrontend, "read", read)
    async with batching(tmp_path) as (_, _, session):
        _, batch = await made(session, lines(3))
        over = await ended(session, batch)
        (fault,) = await content(session, over["error_file_id"])
    assert over["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert (fault["custom_id"], fault["response"]["status_code"]) == ("ask-2", 500)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_batch_that_stops_shows_what_is_answered(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_module, "_UNIT_S", {"h": 1})
    replica = StandInReplica()
    async with batching(tmp_path, replica, max_sequences=1) as (_, _, session):
        window = "1h" if how == "expired" else "900h"
        replica.hang_after = 1
        _, stuck = await made(session, lines(3), completion_window=window)
        if how == "cancelled":
            async with session.post(f"/v1/batches/{stuck['id']}/cancel") as answer:
                assert (await answer.json())["status"] == "cancelling"
        over = await ended(session, stuck)
        await until_async(lambda: replica.live == 0, 30, "the end of it")
        late = await content(session, over["error_file_id"]) if how == "expired" else []
        replica.hang_after = None
        _, batch = await made(session, lines(3))
        assert (await ended(session, batch))["request_counts"]["completed"] == 3
        async with session.post(f"/v1/batches/{stuck['id']}/cancel") as answer:
            assert answer.status == 400
    assert over["status"] == how
    assert over[f"{how}_at"]
    assert over["output_file_id"] is None
    assert [each["error"]["code"] for each in late] == ["batch_expired"] * 3 * (how == "expired")


async def test_trainers_go_first_and_batches_do_not_starve(tmp_path: Path) -> None:
    replica = StandInReplica(delay_s=0.001)
    async with batching(tmp_path, replica, max_sequences=1) as (_, gateway, session):

        async def trains() -> int:
            for turn in range(10_000):
                status, _, _ = await begin(session, vllm_body(4, priority=0))
                assert status == 200
                if over.done():
                    return turn
            return 0

        _, batch = await made(session, lines(12))
        over = asyncio.create_task(ended(session, batch))
        turns = await asyncio.gather(*[trains() for _ in range(4)])
        found = await over
        assert gateway.status().waiting == 0
    assert found["request_counts"]["completed"] == 12
    # One batch request at a time stands among four trainers' turns.
    assert sum(turns) > 2 * 12


async def test_what_was_answered_when_a_batch_is_cancelled_is_in_its_file(tmp_path: Path) -> None:
    async with batching(tmp_path, max_sequences=64) as (_, gateway, session):
        _, batch = await made(session, lines(600))
        answered = gateway.stats.batch_requests
        await until_async(lambda: answered["answered"] > 50, 30, "some are answered")
        async with session.post(f"/v1/batches/{batch['id']}/cancel") as answer:
            assert answer.status == 200
        over = await ended(session, batch)
        assert over["request_counts"]["completed"] == answered["answered"] < 600
        assert len(await content(session, over["output_file_id"])) == answered["answered"]


def a_record() -> BatchRecord:
    batch = Batch(
        id="batch_0", endpoint=VLLM, input_file_id="", completion_window="", created_at=0,
        expires_at=0,
    )  # fmt: skip
    return BatchRecord(batch, None, "ann")


def test_answers_that_are_published_are_still_answered(tmp_path: Path) -> None:
    """A gateway that dies between the batch's files and its last record ends it again."""
    folder, record = BatchFolder(tmp_path, 1 << 20), a_record()
    line = b'{"custom_id":"ask-1"}\n'
    folder.append(record.shown.id, ANSWERS, [line])
    assert folder.room() == (1 << 20) - len(line), "it counts while the batch runs too"
    file_id = folder.publish(record, ANSWERS, "output.jsonl")
    assert folder.answered(record.shown.id, ANSWERS) == {"ask-1"}
    assert folder.publish(record, ANSWERS, "output.jsonl") == file_id


async def test_a_job_without_replicas_keeps_no_other_jobs_requests(tmp_path: Path) -> None:
    async def answer(call: BatchCall) -> tuple[int, bytes]:
        raise NotImplementedError(call)

    def room(job: str) -> bool:
        return job == "lent"

    runner = BatchRunner(
        BatchFolder(tmp_path, 1), answer, lambda _: 10, room, 1, Counter(), lambda *_, **__: None
    )
    assert (await runner.place("alone")).floor
    waits = asyncio.create_task(runner.place("alone"))
    places = [await asyncio.wait_for(runner.place("lent"), 10) for _ in range(5)]
    assert [each.floor for each in places] == [True, False, False, False, False]
    assert not waits.done()
    waits.cancel()


def test_a_request_of_several_samples_has_one_place_among_trainers() -> None:
    call = BatchCall(a_record(), VLLM, b"", floor=True)
    first, other = call.placed(3), call.placed(3, first=False)
    assert (first, other) == (3, 3 + runner_module.BEHIND)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"endpoint": "/v1/images"}, "endpoint is '/v1/images'; one of"),
        ({"completion_window": "soon"}, "completion_window is 'soon'; write 24h"),
        ({"completion_window": "8d"}, "completion_window is '8d'; write 24h"),
        ({"input_file_id": "file-0"}, "no file 'file-0' is here"),
        ({"input_file_id": "../batches/x"}, "no file '../batches/x' is here"),
        ({"metadata": {"k": "v" * 600}}, "metadata: at most 16 pairs"),
        ({"metadata": {"k": 1}}, "metadata"),
    ],
)
async def test_a_bad_request_for_a_batch_is_one_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    async with batching(tmp_path) as (_, _, session):
        status, answer = await made(session, lines(1), **changes)
    assert status in (400, 404)
    assert said in answer["error"]["message"]


async def test_bad_uploads_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "MAX_FILE_BYTES", 1_000)
    async with batching(tmp_path) as (_, _, session):
        assert (await uploaded(session, b"{}", "fine-tune"))[0] == 400
        assert (await uploaded(session, b"x" * 2_000))[0] == 413
        # A page of another site cannot send the header without asking first.
        assert (await uploaded(session, b"{}", Origin="http://127.0.0.1"))[0] == 415
        async with session.post("/v1/files", data=b"{}", headers=KEY) as answer:
            assert answer.status == 400
        # aiohttp raises errors of its own for a header of a part that is too long, or none.
        for head in (b"x: " + b"y" * 9_000, b"no header"):
            body = b"--b\r\n" + head + b"\r\n\r\n{}\r\n--b--\r\n"
            kind = KEY | {"Content-Type": "multipart/form-data; boundary=b"}
            async with session.post("/v1/files", data=body, headers=kind) as answer:
                assert answer.status == 400
        assert (await get(session, "/v1/files"))["data"] == []
        named = b'Content-Disposition: form-data; name="file"; filename="a\xff.jsonl"'
        parts = (
            b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
            named + b"\r\n\r\n{}",
        )
        body = b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"
        async with session.post("/v1/files", data=body, headers=kind) as answer:
            odd = await answer.json()
            assert answer.status == 200
        async with session.delete(f"/v1/files/{odd['id']}") as answer:
            assert answer.status == 200
        status, file = await uploaded(session, b"{}")
        assert status == 200
        async with session.delete(f"/v1/files/{file['id']}") as answer:
            assert (await answer.json())["deleted"]
        async with session.get(f"/v1/files/{file['id']}") as answer:
            assert answer.status == 404
    assert not list((tmp_path / "files").iterdir())


def test_a_long_line_is_one_fault_and_is_not_read_whole() -> None:
    sound = json.dumps(lines(1)[0]).encode()
    file = io.BytesIO(b"x" * 100_000 + b"\n" + sound)
    count, faults = faults_of(file, VLLM, 1_000)
    assert [(each.code, each.line) for each in faults] == [("line_too_long", 1)]
    assert count == 1


def test_bytes_that_no_description_names_go(tmp_path: Path) -> None:
    BatchFolder(tmp_path, 1)
    old, new = tmp_path / "files" / "file-0.jsonl", tmp_path / "files" / "file-1.jsonl"
    for path in (old, new):
        path.write_bytes(b"{}")
    os.utime(old, (0, 0))
    BatchFolder(tmp_path, 1)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [new.name]


async def test_a_file_of_another_caller_is_not_here(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, 1 << 20)
    draft = folder.draft()
    draft.write_bytes(b"{}")
    kept = folder.keep(draft, "asks.jsonl", "batch", "grpo\x1fann\x1f")
    assert folder.files("grpo\x1fbob\x1f") == []
    with pytest.raises(NotHere):
        folder.content(kept.id, "grpo\x1fbob\x1f")
    assert folder.content(kept.id, "grpo\x1fann\x1f").read_bytes() == b"{}"


async def test_without_a_folder_there_are_no_batches(tmp_path: Path) -> None:
    async with (
        StandInReplica() as replica,
        calling(entry(replica, "guest-0")) as (_, session),
        session.get("/v1/batches") as answer,
    ):
        assert answer.status == 404
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--batch-dir .*; name a folder"):
        BatchFolder(tmp_path / "file", 1)
